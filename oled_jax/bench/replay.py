"""A trace replayed through a real engine: its routes take the place of the router's, everything else is computed.

With random weights of a published size that gives the time of a pass under the activation and the overlap of the
trace. The contents of pages are irrelevant to time.
"""

import dataclasses
import time
from collections.abc import Iterator

import jax
import numpy as np

from oled_jax.config import ModelConfig
from oled_jax.engine import Engine
from oled_jax.models.kv_cache import KVCache, init_kv_cache
from oled_jax.models.registry import family_named
from oled_jax.passes import PassKind
from oled_jax.policies.base import PassInfo
from oled_jax.program import Packed, PassInputs, SampleInputs, Sampling, sample, unpack_sample
from oled_jax.traces.trace import Trace, TracePass

KV_STEP = 64  # positions; capacities are few, so that traces share programs


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTime:
    """Seconds of one pass: the forward pass, what head and sampling take longer, and the policy's end of it."""

    kind: PassKind
    forward_s: float
    sample_s: float
    end_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.sample_s + self.end_s


def greedy_sampling(config: ModelConfig) -> Sampling:
    """The head as a model of this shape runs it by default, whatever its weights."""
    mask_id = min(family_named(config.family).default_mask_id, config.vocab_size - 1)
    return Sampling(mask_id=mask_id, temperature=0.0, top_k=None, top_p=None, editing=False)


class EngineReplay:
    """Drives an engine through a trace, as the decoder would.

    Args:
      engine: of a model with the trace's MoE layers, experts and top-k.
      trace: what to replay; every pass has the same number of rows.
      sampling: of the head's program; None: it does not run.
    """

    def __init__(self, engine: Engine, trace: Trace, sampling: Sampling | None) -> None:
        self.engine = engine
        self.trace = trace
        self.sampling = sampling
        longest = rows = 0
        for each in trace:
            rows = len(each.block_starts)
            longest = max(longest, int(each.block_starts.max()) + each.info.token_ids.size // rows)
        self.rows = rows
        self.positions = -(-longest // KV_STEP) * KV_STEP

    def run(self) -> Iterator[PassTime]:
        """Replays the whole trace. The first time compiles."""
        engine = self.engine
        cache = jax.device_put(init_kv_cache(engine.config, self.rows, self.positions), jax.local_devices()[0])
        for number, each in enumerate(self.trace):
            for prompt in each.prompts:
                engine.begin_request(prompt)
            for _ in range(each.new_blocks):
                engine.begin_block()
            if engine.manager is not None:
                engine.manager.place_free_residents()
            inputs = self._inputs(each)
            started = time.perf_counter()
            cache, samples = self._forward(each.info, inputs, cache, number)
            forwarded = time.perf_counter()
            if samples is not None:
                unpack_sample(samples)
            sampled = time.perf_counter()
            engine.end_iteration(each.outcome)
            ended = time.perf_counter()
            yield PassTime(
                kind=each.info.kind,
                forward_s=forwarded - started,
                sample_s=sampled - forwarded,
                end_s=ended - sampled,
            )

    def _forward(
        self, info: PassInfo, inputs: PassInputs, cache: KVCache, number: int
    ) -> tuple[KVCache, jax.Array | None]:
        def follow(hidden: jax.Array) -> jax.Array | None:
            if self.sampling is None or info.kind not in (PassKind.DENOISE, PassKind.EDIT):
                return None
            requests = np.zeros(self.rows, np.int32)
            given = SampleInputs.of(seed=np.int32(0), requests=requests, pass_index=np.int32(number), folds=info.folds)
            return sample(self.sampling, self.engine.head, hidden, Packed.of(given))

        return self.engine.run_pass(info, inputs, cache, self.trace.header.block_length, follow)

    def _inputs(self, each: TracePass) -> PassInputs:
        shape, vocabulary = (self.rows, -1), self.engine.config.vocab_size
        return PassInputs.of(
            # A synthetic trace has a mask token of its own, beyond the vocabulary.
            tokens=np.minimum(each.info.token_ids, vocabulary - 1).reshape(shape).astype(np.int32),
            starts=each.block_starts.astype(np.int32),
            token_mask=each.info.token_mask.reshape(shape),
            sequence_length=np.int32(self.positions),
            manager=self.engine.handle,
            routes=each.expert_ids.astype(np.int32),
        )
