"""Fiddler: popular experts are fixed on the GPU; a miss runs where it is done sooner."""

import dataclasses

import numpy as np
from jaxtyping import Float

from oled_jax.policies.base import LayerRouting, PolicyContext
from oled_jax.policies.composed import Dispatch
from oled_jax.policies.dispatch import Split
from oled_jax.policies.options import PolicyEntry
from oled_jax.policies.static import StaticPolicy, calibrated_policy


@dataclasses.dataclass(frozen=True, kw_only=True)
class FiddlerOptions:
    """calibration: npz file with `counts` [L, E]; auto: the counts of the first prefill."""

    calibration: str | None = None


class SoonerSide(Dispatch):
    """A miss runs on the CPU if that takes no longer than its transfer, each miss for itself."""

    def split(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> Split:
        costs = self.context.costs
        misses = routing.misses
        on_cpu = costs.cpu_fixed_us + costs.cpu_token_us * routing.loads[misses] <= costs.h2d_us
        return misses[~on_cpu], misses[on_cpu]


def build(options: FiddlerOptions, context: PolicyContext) -> StaticPolicy:
    """Keeps the most popular pages of a calibration run, whichever layers they lie in. A miss of n tokens
    runs on the CPU iff cpu(n) <= T_H2D and is transferred otherwise; a transferred expert is not kept. In
    prefill every miss is transferred, which is what the rule says there for all but rare experts.

    Source: Fiddler (Kamahori et al.). Differences: its CPU time is linear in the tokens, here affine.
    """
    return calibrated_policy(context, name="fiddler", dispatch=SoonerSide(context), calibration=options.calibration)


ENTRIES = (
    PolicyEntry(
        name="fiddler",
        summary="Fiddler: popular experts fixed on the GPU, a miss runs on whichever side is sooner",
        build=build,
        options=FiddlerOptions,
        needs_cpu=True,
    ),
)
