"""A routing trace in memory: what every pass routed, and what the decoder made of it. NumPy only.

A trace is the log of the calls that a cache manager gets, in order. Replaying it into another manager is therefore
the same run under another policy, as far as routing is concerned. How it lies in a file is `traces/files.py`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int, Int32

from oled_jax.policies.base import IterationOutcome, PassInfo

FORMAT = 1  # of the file; a file of another version is refused
COSINE_GAPS = 8  # earlier iterations of the same block that a layer input is compared with


@dataclasses.dataclass(frozen=True, kw_only=True)
class TraceHeader:
    """What a trace is about. Constant over the file.

    Attributes:
      source: "recorded" or "synthetic".
      model: what the user called it, or the name of the preset.
      num_layers, num_experts, top_k: MoE layers, experts per layer, experts per token.
      hidden_size, moe_intermediate_size, dtype: of a page; they give its size and its FLOPs.
      block_length: positions denoised together; 0: the whole text, however long.
      settings: whatever else made the trace (seed, policy, threshold, targets, versions), for people to read.
    """

    source: str
    model: str
    num_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    dtype: str
    block_length: int
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def page_bytes(self) -> int:
        """Size of one routed expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size * (4 if self.dtype == "float32" else 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracePass:
    """One forward pass over B rows of T positions, N = B * T tokens.

    Attributes:
      prompts: token ids of each request that began since the pass before.
      new_blocks: how often the decoder entered blocks since the pass before (`CacheManager.begin_block` calls).
      request_ids: number of each row's request, from 0, in the order of the trace.
      block_starts: position in its sequence where each row's chunk begins.
      info: what was known when the pass began.
      expert_ids, gates: the router's result in every MoE layer.
      outcome: what was known when the decoder had acted.
      cosine: mean over the active tokens of the cosine between a layer's input in this pass and in the pass 1, ...,
        COSINE_GAPS iterations before, in the same block; NaN where there is no such pass. None if not recorded.
    """

    prompts: tuple[Int32[np.ndarray, " P"], ...] = ()
    new_blocks: int = 0
    request_ids: Int32[np.ndarray, " B"]
    block_starts: Int32[np.ndarray, " B"]
    info: PassInfo
    expert_ids: Int[np.ndarray, "L N K"]
    gates: Float32[np.ndarray, "L N K"]
    outcome: IterationOutcome
    cosine: Float32[np.ndarray, "L 8"] | None = None


@runtime_checkable
class Trace(Protocol):
    """Passes that can be gone through more than once, a bounded number of them in memory at a time."""

    @property
    def header(self) -> TraceHeader: ...

    def __len__(self) -> int:
        """Number of passes."""
        ...

    def __iter__(self) -> Iterator[TracePass]: ...


@dataclasses.dataclass(frozen=True)
class MemoryTrace:
    """A `Trace` that is a tuple of passes."""

    header: TraceHeader
    passes: tuple[TracePass, ...]

    def __len__(self) -> int:
        return len(self.passes)

    def __iter__(self) -> Iterator[TracePass]:
        return iter(self.passes)


def arrays_of(record: PassInfo | IterationOutcome) -> dict[str, np.ndarray]:
    """The record's arrays, by field."""
    return {name: value for name, value in vars(record).items() if isinstance(value, np.ndarray)}


def first_pass(trace: Trace, request: int) -> int:
    """Number of the pass before which a request begins, counted from 0; all passes if there is no such request."""
    begun = 0
    for number, step in enumerate(trace):
        begun += len(step.prompts)
        if begun > request:
            return number
    return len(trace)
