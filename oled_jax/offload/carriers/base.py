"""What a carrier is: it brings the router's result to the cache manager, and the plan and its pages to the device.

It has two sides. A `Carrier` is traced inside the model's program, once for each MoE layer, and is gone when that is
compiled. A `Mover` belongs to an engine and does what happens between passes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Float, Float32, Int

from oled_jax.offload.manager import CacheManager
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool
from oled_jax.offload.schedule import Move
from oled_jax.offload.store import PageStore


@dataclasses.dataclass(frozen=True)
class Plan:
    """A plan as a program has it.

    A field that is cut out is a kernel, and the device waits for a plan: so that is done where it is needed, and not
    before a loop that nearly never turns.
    """

    flat: Int[Array, " size"]
    layout: PlanLayout

    def __getitem__(self, field: str) -> Int[Array, " _"]:
        return self.flat[self.layout.slices[field]]

    def entry(self, field: str, index: Int[Array, ""] | int) -> Int[Array, ""]:
        """One number of a field."""
        return self.flat[self.layout.slices[field].start + index]


class InPlan(NamedTuple):
    """First item and end, as they stand behind one another in a plan: in this field, from this place on."""

    field: str
    place: int = 0


# First item and end.
Span = InPlan | tuple[Int[Array, ""], Int[Array, ""]]
# Computes these work items from the pool into their rows of `out`.
Compute = Callable[[Span, Pool, Float[Array, "I R D"]], Float[Array, "I R D"]]


@runtime_checkable
class Carrier(Protocol):
    """Carries out plans and decides nothing."""

    def route(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        pool: Pool,
        layout: PlanLayout,
    ) -> tuple[Pool, Plan]:
        """Asks the manager for a plan of this layout."""
        ...

    def carry_out(
        self, layer: int, plan: Plan, pool: Pool, out: Float[Array, "I R D"], compute: Compute
    ) -> tuple[Pool, Float[Array, "I R D"]]:
        """Moves the plan's pages and computes each work item when its page is in place."""
        ...

    def add_cpu_share(self, layer: int, plan: Plan, pool: Pool, total: Float32[Array, "N D"]) -> Float32[Array, "N D"]:
        """`total` plus what the CPU computes for this layer; `total` itself, bit for bit, if it computes nothing."""
        ...


@runtime_checkable
class Mover(Protocol):
    """The host side of a carrier, for one engine. Made from its store, and its manager if it runs passes.

    name: of the carrier. overlaps: pages move beside the arithmetic. handle: operand by which programs find the
    engine. operands: the store's arrays, as far as programs read them.
    """

    name: ClassVar[str]
    overlaps: ClassVar[bool]
    handle: np.int32
    operands: Sequence[Pool]

    def __init__(self, store: PageStore, manager: CacheManager | None = None) -> None: ...

    def attach(self, pool: Pool) -> None:
        """The engine's pool is this one from now on: at the start, and after a failure that consumed the last."""
        ...

    def stage(self, pool: Pool, moves: Sequence[Move]) -> Pool:
        """Moves pages between passes."""
        ...

    def drain(self, pool: Pool) -> None:
        """Waits until every staged page is in the pool that `stage` returned."""
        ...

    def reset(self) -> None:
        """After a failed pass: forgets what was asked for. When this returns nothing writes to the pool."""
        ...
