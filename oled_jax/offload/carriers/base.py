"""What a carrier is: it brings the router's result to the cache manager and the plan and its pages to the device."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Float32, Int

from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool


@runtime_checkable
class Carrier(Protocol):
    """Traced inside the model's program, once per MoE layer. Carries out plans and decides nothing."""

    def route(
        self,
        layer: int,
        x: Float[Array, "N D"],
        ids: Int[Array, "N K"],
        gates: Float[Array, "N K"],
        layout: PlanLayout,
    ) -> dict[str, Int[Array, "..."]]:
        """Asks the manager. Returns the plan's fields (`PlanLayout.fields`)."""
        ...

    def fetch(
        self,
        layer: int,
        pool: Pool,
        experts: Int[Array, " M"],
        slots: Int[Array, " M"],
        begin: Int[Array, ""],
        end: Int[Array, ""],
    ) -> Pool:
        """Moves pages begin <= i < end of a layer from the store into their slots."""
        ...

    def add_cpu_share(
        self, layer: int, cpu_pairs: Int[Array, ""], total: Float32[Array, "N D"]
    ) -> Float32[Array, "N D"]:
        """`total` plus what the CPU computes for this layer; `total` itself, bit for bit, if cpu_pairs is 0."""
        ...
