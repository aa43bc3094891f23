"""What the CPU computes of a MoE layer, and the interface that every CPU expert backend has.

A backend reads pages through NumPy views of the store's bytes and owns no weights. `submit` and `collect` are
called inside host callbacks of the running device program: neither may call JAX, and both wait passively,
because a thread that spins takes the core that the callback needs.
"""

import abc
import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import ClassVar

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.errors import UsageError

WEIGHT_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32))

# One MoE layer's experts: gate and up [E, 2F, D] (gate rows first) and down [E, D, F].
LayerPages = tuple[Float[np.ndarray, "E F2 D"], Float[np.ndarray, "E D F"]]


@dataclasses.dataclass(slots=True, kw_only=True)  # not frozen: one is made for every layer, and freezing costs 2 us
class CpuWork:
    """One layer's CPU share. Nobody changes it. The arrays are the caller's, unchanged until `collect` or `reset`
    returns.

    hidden: in the dtype of the weights. experts: those computed here, each named once. expert_ids, gates: the
    router's result; a token names an expert at most once. token_mask: False for padding, which adds nothing.
    """

    layer: int
    hidden: Float[np.ndarray, "N D"]
    experts: Int[np.ndarray, " H"]
    expert_ids: Int[np.ndarray, "N K"]
    gates: Float[np.ndarray, "N K"]
    token_mask: Bool[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CpuStats:
    """What was computed so far, counted when a layer is collected.

    pages: experts computed with at least one token. busy_us: time inside workers, summed over them. span_us:
    from submit to the last worker's end, summed over layers: span_us / pages is what a page costs. wait_us:
    time that `collect` waited, which is what the device program noticed.
    """

    pages: int = 0
    busy_us: float = 0.0
    span_us: float = 0.0
    wait_us: float = 0.0

    def __add__(self, other: "CpuStats") -> "CpuStats":
        return CpuStats(
            pages=self.pages + other.pages,
            busy_us=self.busy_us + other.busy_us,
            span_us=self.span_us + other.span_us,
            wait_us=self.wait_us + other.wait_us,
        )


class CpuExperts(abc.ABC):
    """Computes experts on host cores, from the store's bytes.

    Args:
      pages: per MoE layer, gate and up [E, 2F, D] and down [E, D, F]; C-contiguous, all layers alike.
      threads: worker threads, at least 1.

    `description` says in one sentence which backend runs and why; `notes` are warnings for the user.

    Raises:
      UsageError: `threads` is below 1, or the backend cannot run here.
      ValueError: pages of a shape, layout or dtype that no store has.
    """

    name: ClassVar[str]

    def __init__(self, pages: Sequence[LayerPages], *, threads: int) -> None:
        if threads < 1:
            raise UsageError(f"CPU expert threads is {threads}, it must be at least 1")
        _check_pages(pages)
        self.pages = list(pages)
        self.threads = threads
        self.stats = CpuStats()
        self.notes: tuple[str, ...] = ()
        self.description = f"CPU experts: {self.name}, {threads} thread{'s' if threads > 1 else ''}"

    @abc.abstractmethod
    def submit(self, work: CpuWork) -> None:
        """Starts a layer's share and returns at once; what that layer had uncollected is dropped.

        Raises:
          ValueError: the work does not fit the pages. RuntimeError: the backend is closed.
        """

    @abc.abstractmethod
    def collect(self, layer: int) -> Float[np.ndarray, "N D"]:
        """Waits for a layer's share: float32, per token the sum over its experts in `CpuWork.experts` of
        gate * down(silu(gate_proj(x)) * up_proj(x)).

        Weights are exact, products and sums are float32, and so is the activation between the two products:
        against an FFN in the model dtype the result differs by that FFN's rounding.

        Raises:
          The error of the computation, as itself. By then no thread reads the caller's arrays any more.
          RuntimeError: a result is not finite (layer and expert are named), a worker died, nothing was
            submitted for this layer, or the backend is closed. All but a closed backend stay usable.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Drops all work that was not collected. No thread reads them afterwards."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends the worker threads. May be called twice."""

    def _require_fit(self, work: CpuWork) -> None:
        gate_up, _ = self.pages[work.layer]
        if work.hidden.shape[1] != gate_up.shape[2] or work.hidden.dtype != gate_up.dtype:
            raise ValueError(
                f"CPU experts: hidden {work.hidden.dtype} {work.hidden.shape} does not fit pages "
                f"{gate_up.dtype} {gate_up.shape}"
            )

    def _not_finite(
        self, layer: int, expert: int, x: Float[np.ndarray, "n D"], gates: Float[np.ndarray, " n"]
    ) -> RuntimeError:
        """The error for an expert's result that is not finite: where, and whose fault it is."""
        gate_up, down = self.pages[layer]
        if not (np.isfinite(gate_up[expert]).all() and np.isfinite(down[expert]).all()):
            blame = "its weights hold NaN or infinity"
        elif not (np.isfinite(x).all() and np.isfinite(gates).all()):
            blame = "the hidden states or gates hold NaN or infinity"
        else:
            blame = "float32 overflowed"
        return RuntimeError(
            f"CPU experts ({self.name}): layer {layer}, expert {expert}: the result is not finite: {blame}"
        )

    def __enter__(self) -> "CpuExperts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_pages(pages: Sequence[LayerPages]) -> None:
    if not pages:
        raise ValueError("CPU experts need at least one MoE layer")
    for layer, (gate_up, down) in enumerate(pages):
        E, D, F = down.shape
        problem = None
        if gate_up.shape != (E, 2 * F, D):
            problem = f"gate_up {gate_up.shape} does not match down {down.shape}"
        elif gate_up.shape != pages[0][0].shape or gate_up.dtype != pages[0][0].dtype:
            problem = f"{gate_up.dtype} {gate_up.shape} differs from layer 0"
        elif gate_up.dtype not in WEIGHT_DTYPES or down.dtype != gate_up.dtype:
            problem = f"dtypes {gate_up.dtype} and {down.dtype}, not one of bfloat16, float16, float32"
        elif not (gate_up.flags.c_contiguous and down.flags.c_contiguous):
            problem = "arrays are not C-contiguous"
        if problem:
            raise ValueError(f"pages of MoE layer {layer}: {problem}")
