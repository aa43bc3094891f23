"""Recording: an engine's passes, as its cache manager sees them, become the passes of a trace. NumPy only.

The recorder copies what it is given. It is called like a manager: by the engine between passes, and once per MoE
layer in between, by the manager or, where every page is resident, by the engine.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float32, Int, Int32

import oled_jax
from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces.trace import COSINE_GAPS, TraceHeader, TracePass, arrays_of

_Record = TypeVar("_Record", PassInfo, IterationOutcome)


@runtime_checkable
class PassSink(Protocol):
    """Where recorded passes go, such as a `TraceWriter`."""

    def add(self, pass_: TracePass) -> None: ...


class TraceRecorder:
    """Turns calls into passes. A pass that does not reach its end is left out.

    Args:
      header: of the trace.
      writer: gets each pass when it has ended.
      hidden: layer inputs are compared as well (`TracePass.cosine`).

    Attributes:
      idle: passes run, but nothing is recorded.
    """

    def __init__(self, header: TraceHeader, writer: PassSink, *, hidden: bool = False) -> None:
        self.header = header
        self.hidden = hidden
        self.idle = False
        self._writer = writer
        self._num_requests = 0
        self._prompts: list[np.ndarray] = []
        self._requests: dict[int, int] = {}  # of each place of the batch
        self._new_blocks = 0
        self._pass: _OpenPass | None = None

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"], place: int) -> None:
        """A request starts, in this place of the batch."""
        self._prompts.append(np.array(prompt_ids, np.int32))
        self._requests[place] = self._num_requests
        self._num_requests += 1

    def begin_block(self) -> None:
        """Some row enters a new block."""
        self._new_blocks += 1

    def begin_pass(self, info: PassInfo, starts: Int32[np.ndarray, " B"]) -> None:
        """A forward pass starts.

        Args:
          starts: position in its sequence where each row's chunk begins.
        """
        self._pass = None
        if self.idle:
            return
        header = self.header
        routes = header.num_layers, info.token_mask.size, header.top_k
        self._pass = _OpenPass(
            request_ids=np.array([self._requests[place] for place in range(starts.size)], np.int32),
            block_starts=np.array(starts, np.int32),
            info=_copied(info),
            expert_ids=np.empty(routes, np.int32),
            gates=np.empty(routes, np.float32),
        )

    def on_route(self, layer: int, expert_ids: Int[np.ndarray, "N K"], gates: Float32[np.ndarray, "N K"]) -> None:
        """The router's result for one MoE layer."""
        if self._pass is None:
            return
        self._pass.expert_ids[layer] = expert_ids
        self._pass.gates[layer] = gates
        self._pass.layers += 1

    def add_cosine(self, cosine: Float32[np.ndarray, "L G"]) -> None:
        """The comparison of this pass's layer inputs with earlier ones."""
        if self._pass is not None:
            self._pass.cosine = np.array(cosine, np.float32)

    def end_iteration(self, outcome: IterationOutcome) -> None:
        """A pass is over and the decoder has acted. Raises what the writer raises."""
        done, self._pass = self._pass, None
        if done is None:
            return
        if done.layers != self.header.num_layers:
            raise RuntimeError(f"a pass ended after {done.layers} of {self.header.num_layers} layers were recorded")
        prompts, self._prompts = self._prompts, []
        new_blocks, self._new_blocks = self._new_blocks, 0
        cosine = done.cosine
        if cosine is None and self.hidden:  # a pass that is compared with none
            cosine = np.full((self.header.num_layers, COSINE_GAPS), np.nan, np.float32)
        self._writer.add(
            TracePass(
                prompts=tuple(prompts),
                new_blocks=new_blocks,
                request_ids=done.request_ids,
                block_starts=done.block_starts,
                info=done.info,
                expert_ids=done.expert_ids,
                gates=done.gates,
                outcome=_copied(outcome),
                cosine=cosine,
            )
        )


@dataclasses.dataclass(kw_only=True)
class _OpenPass:
    """A pass that runs. layers: how many have routed."""

    request_ids: np.ndarray
    block_starts: np.ndarray
    info: PassInfo
    expert_ids: np.ndarray
    gates: np.ndarray
    layers: int = 0
    cosine: np.ndarray | None = None


def recorded_header(
    config: ModelConfig, decoding: DecodingConfig, *, model: str, settings: Mapping[str, Any]
) -> TraceHeader:
    """The header of a recording.

    Args:
      model: what the user calls it.
      settings: of the run, for people to read; the decoding settings and the version are added.
    """
    return TraceHeader(
        source="recorded",
        model=model,
        num_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.moe_intermediate_size,
        dtype=config.dtype,
        block_length=traced_block_length(decoding),
        settings={"version": oled_jax.__version__, **dataclasses.asdict(decoding), **settings},
    )


def traced_block_length(decoding: DecodingConfig) -> int:
    """0 where whole texts are decoded: their passes have as many positions as the text needs."""
    return 0 if decoding.whole_text else decoding.block_length


def _copied(record: _Record) -> _Record:
    """The same with arrays of its own."""
    arrays: dict[str, Any] = {name: value.copy() for name, value in arrays_of(record).items()}
    return dataclasses.replace(record, **arrays)
