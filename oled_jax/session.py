"""One generation run's view of an engine: the KV cache, the random keys, the confidence of the last iteration.

Implements the decoder's `Denoiser`. Owns everything that ends with the run; what outlives it is the engine's.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Bool, Int32

from oled_jax.config import DecodingConfig
from oled_jax.decode.block_diffusion import Prediction
from oled_jax.decode.sampling import request_numbers
from oled_jax.decode.whole_text import rounded_up
from oled_jax.models.kv_cache import KVCache, init_kv_cache
from oled_jax.passes import PassKind, PassOutcome
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.program import PassInputs, Sampling, sample, unpack_sample

if TYPE_CHECKING:
    from oled_jax.engine import Engine

MAX_CHUNK = 1024  # positions of one prefill pass


def prefill_chunk(length: int, block_length: int) -> int:
    """Positions of one prefill pass for prompts of up to `length`: whole blocks, few different values.

    The number of blocks is a power of two, so that nearby prompt lengths share a program.
    """
    blocks = 1 << max(0, math.ceil(length / block_length) - 1).bit_length()
    return min(blocks, max(1, MAX_CHUNK // block_length)) * block_length


def kv_capacity(prompt_lengths: Sequence[int], decoding: DecodingConfig) -> int:
    """Positions that the KV cache of a run must hold, rounded up to few different values."""
    L = decoding.block_length
    longest = max(prompt_lengths, default=0)
    canvas = math.ceil((longest + decoding.gen_length) / L) * L
    chunk = prefill_chunk(longest, L)
    needed = max(canvas, math.ceil(longest // L * L / chunk) * chunk, L)
    return rounded_up(needed)


class Session:
    """A `Denoiser` over an engine for one batch of prompts.

    Args:
      engine: runs the passes; no other session may run meanwhile.
      prompts: token ids per row.
      decoding: how the run decodes.
    """

    def __init__(self, engine: "Engine", prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self._engine = engine
        self._decoding = decoding
        self._sampling = Sampling(
            mask_id=decoding.mask_id,
            temperature=decoding.temperature,
            top_k=decoding.top_k,
            top_p=decoding.top_p,
            editing=decoding.editing or decoding.whole_text,  # RND1 compares logits, too
            entropy=decoding.whole_text,
            shifted=engine.config.shifted_logits,
        )
        self._cache = self._empty_cache(lengths)
        self._sequence_length = np.int32(max(lengths, default=0) + decoding.gen_length)
        self._requests = request_numbers(prompts)
        self._pass_index = 0
        self._starts = np.full(len(prompts), -1, np.int32)
        self._confidence = np.ones((len(prompts), decoding.block_length), np.float32)
        self._iterations = np.zeros(len(prompts), np.int32)  # denoise and edit passes so far over each row's block
        self._warm_up(max(lengths, default=0) // decoding.block_length * decoding.block_length)

    def _empty_cache(self, lengths: Sequence[int]) -> KVCache | None:
        """Keys and values of nothing yet, for prompts of these lengths."""
        cache = init_kv_cache(self._engine.config, len(lengths), kv_capacity(lengths, self._decoding))
        # Committed, as what a pass returns is: else the second pass would compile anew.
        return jax.device_put(cache, jax.local_devices()[0])

    def _warm_up(self, prefill_length: int) -> None:
        """Compiles the run's programs by passes in which no token routes, so that no compilation is timed."""
        B, L = self._confidence.shape
        chunk = (prefill_chunk(prefill_length, L),) if prefill_length else ()
        for kind, width in zip((PassKind.DENOISE, PassKind.PREFILL), (L, *chunk), strict=False):
            tokens, starts = np.zeros((B, width), np.int32), np.zeros(B, np.int32)
            nothing = np.zeros((B, width), bool)
            shape = (width, L, 0 if self._cache is None else self._cache.capacity, B, self._sampling)
            with self._engine.warm_up(kind, shape) as cold:
                if cold:
                    iterations = np.full(B, -1, np.int32) if kind is PassKind.DENOISE else None
                    hidden = self._run(kind, tokens, starts, nothing, np.ones((B, width), np.float32), iterations)
                    if kind is PassKind.DENOISE:
                        jax.block_until_ready(self._sample(hidden, 0))

    def prefill(self, tokens: Int32[np.ndarray, "B P"], lengths: Int32[np.ndarray, " B"]) -> None:
        """Whole prompt blocks into the KV cache, in equal chunks."""
        B, P = tokens.shape
        chunk = prefill_chunk(P, self._decoding.block_length)
        for start in range(0, P, chunk):
            part = np.full((B, chunk), self._decoding.mask_id, np.int32)
            width = min(chunk, P - start)
            part[:, :width] = tokens[:, start : start + width]
            mask = start + np.arange(chunk) < lengths[:, None]
            starts = np.full(B, start, np.int32)
            ones = np.ones((B, chunk), np.float32)
            self._run(PassKind.PREFILL, part, starts, mask, ones)
            self._engine.end_iteration(
                IterationOutcome(
                    kind=PassKind.PREFILL,
                    token_ids=part.ravel(),
                    written=np.zeros(B * chunk, bool),
                    masked=np.zeros(B * chunk, bool),
                    confidence=ones.ravel(),
                )
            )

    def forward(
        self,
        kind: PassKind,
        tokens: Int32[np.ndarray, "B T"],
        starts: Int32[np.ndarray, " B"],
        active: Bool[np.ndarray, " B"],
        commit: Bool[np.ndarray, " B"],
        is_prompt: Bool[np.ndarray, "B T"],
    ) -> Prediction | None:
        """One pass over one block per row. See `Denoiser`."""
        entered = active & (starts != self._starts)
        if entered.any():
            self._confidence[entered] = 1.0
            self._iterations[entered] = 0
            self._starts = np.where(active, starts, self._starts)
            self._engine.begin_block()
        mask = self._real(active, tokens.shape[1])
        compared = active & ~commit
        hidden = self._run(kind, tokens, starts, mask, self._confidence, np.where(compared, self._iterations, -1))
        self._iterations += compared
        pass_index = self._pass_index
        self._pass_index += 1
        if not compared.any():
            return None
        return Prediction(*unpack_sample(self._sample(hidden, pass_index)))

    def _real(self, active: Bool[np.ndarray, " B"], width: int) -> Bool[np.ndarray, "B T"]:
        """Positions of a pass that hold a token: they route and are seen."""
        return np.broadcast_to(active[:, None], (len(active), width))

    def _sample(self, hidden: jax.Array, pass_index: int) -> jax.Array:
        seed = np.int32(self._decoding.seed)
        return sample(self._sampling, self._engine.head, hidden, seed, self._requests, np.int32(pass_index))

    def end_pass(self, outcome: PassOutcome) -> None:
        """Gives the cache manager what the decoder did."""
        self._confidence = outcome.confidence.copy()
        self._engine.end_iteration(
            IterationOutcome(
                kind=outcome.kind,
                token_ids=outcome.tokens_after.ravel(),
                written=outcome.written.ravel(),
                masked=outcome.masked_before.ravel(),
                confidence=outcome.confidence.ravel(),
            )
        )

    def _run(
        self,
        kind: PassKind,
        tokens: Int32[np.ndarray, "B T"],
        starts: Int32[np.ndarray, " B"],
        token_mask: Bool[np.ndarray, "B T"],
        confidence: np.ndarray,
        iterations: np.ndarray | None = None,
    ) -> jax.Array:
        info = PassInfo(
            kind=kind,
            token_ids=tokens.ravel(),
            masked=(tokens == self._decoding.mask_id).ravel() & token_mask.ravel(),
            token_mask=token_mask.ravel(),
            confidence=confidence.ravel(),
        )
        inputs = PassInputs.of(
            tokens=tokens,
            starts=starts,
            token_mask=token_mask,
            sequence_length=self._sequence_length,
            manager=self._engine.handle,
            iterations=iterations if self._engine.records_hidden else None,
        )
        self._cache, hidden = self._engine.run_pass(info, inputs, self._cache, self._decoding.block_length)
        return hidden
