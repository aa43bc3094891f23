"""The carriers by name, and which one "auto" is."""

from collections.abc import Sequence

from jaxtyping import Array, Int

from oled_jax.errors import UsageError
from oled_jax.offload.carriers import native
from oled_jax.offload.carriers.base import Carrier, Mover
from oled_jax.offload.carriers.native import NativeCarrier, NativeMover
from oled_jax.offload.carriers.portable import PortableCarrier, PortableMover
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.pool import Pool
from oled_jax.offload.store import PageStore

AUTO = "auto"
MOVERS: dict[str, type[Mover]] = {mover.name: mover for mover in (PortableMover, NativeMover)}


def choose(name: str = AUTO) -> tuple[str, str]:
    """The carrier that `name` stands for here, and why in a few words.

    "auto" is native where it can run, else portable. That holds without a GPU, too: host callbacks cost more there than
    a pass of a small model (docs/performance-notes.md).

    Raises:
      UsageError: an unknown name, or a carrier that cannot run here.
    """
    if name == AUTO:
        reason = native.unusable()
        return (PortableMover.name, reason) if reason else (NativeMover.name, "the extension is built")
    if name not in MOVERS:
        raise UsageError(f"carrier {name!r} is unknown; choose {', '.join([AUTO, *MOVERS])}")
    if name == NativeMover.name and (reason := native.unusable()):
        raise UsageError(f"--carrier native: {reason}; leave it out, or use portable")
    return name, "as asked for"


def make_mover(name: str, store: PageStore, manager: CacheManager | None = None) -> Mover:
    """The host side of the carrier that `choose` finds. Raises as it does."""
    return MOVERS[choose(name)[0]](store, manager)


def make_carrier(name: str, handle: Int[Array, ""], store: Sequence[Pool], *, uses_cpu: bool) -> Carrier:
    """The traced side of the carrier called `name`. Arguments as of `PortableCarrier`."""
    if name == NativeMover.name:
        return NativeCarrier(uses_cpu=uses_cpu)
    return PortableCarrier(handle, store, uses_cpu=uses_cpu)
