"""Least frequently used, with and without ageing."""

import dataclasses

from oled_jax.policies.allocation import UniformAllocation
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.composed import ComposedPolicy
from oled_jax.policies.dispatch import TransferAll
from oled_jax.policies.options import NoOptions, PolicyEntry, require_range
from oled_jax.policies.retention import Frequency


@dataclasses.dataclass(frozen=True, kw_only=True)
class LfuDecayOptions:
    """halve_every: passes between two halvings of all counts."""

    halve_every: int = 32

    def __post_init__(self) -> None:
        require_range(self, "halve_every", 1)


class LfuPolicy(ComposedPolicy):
    """Keeps the experts that most passes of this request activated. Moves every miss, also in prefill.

    A use is one pass that activates the expert, however many of its tokens do: a page is needed once per
    pass. Prefill passes count. With `halve_every`, all counts are halved after that many passes.
    """

    def __init__(self, context: PolicyContext, *, name: str, halve_every: int | None = None) -> None:
        super().__init__(
            context,
            name=name,
            retention=Frequency(context, since="request", halve_every=halve_every),
            allocation=UniformAllocation(context),
            dispatch=TransferAll(context),
        )


def build_lfu(options: NoOptions, context: PolicyContext) -> LfuPolicy:
    return LfuPolicy(context, name="lfu")


def build_decay(options: LfuDecayOptions, context: PolicyContext) -> LfuPolicy:
    return LfuPolicy(context, name="lfu-decay", halve_every=options.halve_every)


ENTRIES = (
    PolicyEntry(name="lfu", summary="least often activated expert of this request leaves", build=build_lfu),
    PolicyEntry(
        name="lfu-decay",
        summary="lfu with counts halved every 32 passes",
        build=build_decay,
        options=LfuDecayOptions,
    ),
)
