"""One generation run's view of an engine: the KV cache, the random keys, the confidence of the last iteration.

Implements the decoder's `Denoiser`. Owns everything that ends with the run; what outlives it is the engine's.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Bool, Int32

from oled_jax.config import DecodingConfig
from oled_jax.decode.block_diffusion import Prediction
from oled_jax.decode.events import FinishEvent
from oled_jax.decode.sampling import request_numbers
from oled_jax.decode.whole_text import rounded_up
from oled_jax.folding import place_blocks
from oled_jax.models.kv_cache import KVCache, init_kv_cache
from oled_jax.offload.shares import CacheShares
from oled_jax.passes import PassKind, PassOutcome
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.prefix import KeptPrefix
from oled_jax.program import Packed, PassInputs, SampleInputs, Sampling, sample, unpack_sample

if TYPE_CHECKING:
    from oled_jax.engine import Engine

MAX_CHUNK = 1024  # positions of one prefill pass


def prefill_chunk(length: int, block_length: int, batch: int = 1) -> int:
    """Positions of one prefill pass for prompts of up to `length`: whole blocks, few different values.

    The number of blocks is a power of two, so that nearby prompt lengths share a program. The rows of a batch divide
    `MAX_CHUNK` between them, down to a block each: the memory of a pass grows with its tokens.
    """
    blocks = 1 << max(0, math.ceil(length / block_length) - 1).bit_length()
    most = max(1, MAX_CHUNK // (block_length * max(1, batch)))
    return min(blocks, 1 << (most.bit_length() - 1)) * block_length


def kv_capacity(prompt_lengths: Sequence[int], decoding: DecodingConfig, batch: int | None = None) -> int:
    """Positions that the KV cache of a run must hold in each row, rounded up to few different values.

    Args:
      batch: rows. If there are more prompts, a chunk of a prompt will be written while other rows are in the middle
        of their text; they write theirs, which holds nothing, behind their text. So do rows that do not fold in a pass
        in which others do (`folding.py`), be it in their last block.
    """
    L, requests = decoding.block_length, len(prompt_lengths)
    batch = min(batch or requests, requests)
    longest = max(prompt_lengths, default=0)
    canvas = math.ceil((longest + decoding.gen_length) / L) * L
    chunk = prefill_chunk(longest, L, batch)
    needed = max(canvas, math.ceil(longest // L * L / chunk) * chunk, L)
    if 1 < batch < requests:
        needed += chunk
    elif batch > 1 and decoding.fold_commits:
        needed += L
    return rounded_up(needed)


class Session:
    """A `Denoiser` over an engine for one run.

    Args:
      engine: runs the passes; no other session may run meanwhile.
      prompts: token ids of every request.
      decoding: how the run decodes.
      places: rows of the batch; requests may be more.
      kept: the KV cache of the run before, if there is one prompt.
    """

    def __init__(
        self,
        engine: "Engine",
        prompts: Sequence[Sequence[int]],
        decoding: DecodingConfig,
        places: int,
        kept: KeptPrefix | None = None,
    ) -> None:
        lengths = [len(prompt) for prompt in prompts]
        self._engine = engine
        self._decoding = decoding
        self._prompts = prompts
        self._sampling = Sampling.of(engine.config, decoding)
        self._kept = kept
        self._first = 0  # where the first prompt pass begins
        self._cache, self._chunk = self._memory(lengths, places)
        self._numbers = request_numbers(prompts)
        self.shares = CacheShares(places, engine.config.num_experts)
        # Of the request in each place:
        self._request = np.full(places, -1, np.int32)
        self._sequence_length = np.full(places, decoding.gen_length, np.int32)
        self._passes = np.zeros(places, np.int32)  # over its blocks so far, a commit that was folded counts as one
        self._starts = np.full(places, -1, np.int32)
        self._tokens = np.zeros((places, decoding.block_length), np.int32)  # after the last pass
        self._confidence = np.ones((places, decoding.block_length), np.float32)
        self._folds = np.zeros(places, bool)  # in the pass that runs
        self._iterations = np.zeros(places, np.int32)  # denoise and edit passes so far over its block
        self._warm_up(lengths)

    def _memory(self, lengths: Sequence[int], places: int) -> tuple[KVCache | None, int]:
        """The KV cache, and the positions of a prompt pass."""
        config, decoding, kept = self._engine.config, self._decoding, self._kept
        cache = None
        if kept is None:
            positions = kv_capacity(lengths, decoding, places)
            chunk = prefill_chunk(max(lengths, default=0), decoding.block_length, places)
        else:
            cache, positions, chunk = kept.take(), kept.positions, kept.chunk
        if cache is None:
            # Committed, as what a pass returns is: else the second pass would compile anew.
            cache = jax.device_put(init_kv_cache(config, places, positions), jax.local_devices()[0])
        return cache, chunk

    @property
    def _capacity(self) -> int:
        """Positions of the KV cache, 0 without one."""
        return 0 if self._cache is None else self._cache.capacity

    def _warm_up(self, lengths: Sequence[int]) -> None:
        """Compiles the run's programs by passes in which no token routes, so that no compilation is timed."""
        B, L = self._confidence.shape
        widths = [(PassKind.DENOISE, L)]
        if self._decoding.fold_commits and any(self._num_blocks(length) > 1 for length in lengths):
            widths.append((PassKind.DENOISE, 2 * L))
        if max(lengths, default=0) >= L:
            widths.append((PassKind.PREFILL, self._chunk))
        for kind, width in widths:
            with self._engine.warm_up(kind, (width, L, self._capacity, B, self._sampling)) as cold:
                if cold:
                    self._compile(kind, width)

    def _compile(self, kind: PassKind, width: int) -> None:
        """Runs such a pass. It writes where no text stands: the cache may hold that of an earlier run."""
        B, L = self._confidence.shape
        tokens, starts = np.zeros((B, width), np.int32), np.full(B, max(0, self._capacity - width), np.int32)
        nothing, ones = np.zeros((B, width), bool), np.ones((B, width), np.float32)
        if kind is PassKind.PREFILL:
            self._run(kind, tokens, starts, nothing, ones)
            return
        folds = np.zeros(B, bool) if width > L else None
        never = np.full(B, -1, np.int32)
        jax.block_until_ready(self._run(kind, tokens, starts, nothing, ones, never, folds, self._passes))

    def _num_blocks(self, length: int) -> int:
        """Blocks that are denoised after a prompt of so many tokens."""
        L, end = self._decoding.block_length, length + self._decoding.gen_length
        return math.ceil(end / L) - length // L

    def enter(self, place: int, request: int) -> None:
        """A request takes a place. See `Denoiser`."""
        prompt = np.asarray(self._prompts[request], np.int32)
        self._request[place] = request
        self._sequence_length[place] = prompt.size + self._decoding.gen_length
        self._passes[place], self._starts[place] = 0, -1
        if self._kept is not None:
            L = self._decoding.block_length
            self._first = self._kept.begin(prompt[: prompt.size // L * L])
        self._engine.begin_request(prompt, place)

    def with_share(self, event: FinishEvent) -> FinishEvent:
        """The event with what the expert cache did for its request, which still has its place."""
        (place,) = np.flatnonzero(self._request == event.row)
        return FinishEvent(row=event.row, result=dataclasses.replace(event.result, share=self.shares.take(int(place))))

    def prefill(self, tokens: Int32[np.ndarray, "B P"], lengths: Int32[np.ndarray, " B"]) -> None:
        """Whole prompt blocks into the KV cache, in equal chunks."""
        if self._cache is None:
            raise RuntimeError("a run without a KV cache has nothing to prefill")
        B, P = tokens.shape
        chunk = self._chunk
        for start in range(self._first, P, chunk):
            part = np.full((B, chunk), self._decoding.mask_id, np.int32)
            width = min(chunk, P - start)
            part[:, :width] = tokens[:, start : start + width]
            mask = start + np.arange(chunk) < lengths[:, None]
            # Every row writes a chunk. One that has none here writes it where it will never look (`kv_capacity`).
            starts = np.where(mask[:, 0], start, self._capacity - chunk).astype(np.int32)
            ones = np.ones((B, chunk), np.float32)
            self.shares.begin_pass(np.zeros(B, bool))
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
        if self._kept is not None:
            self._kept.prefilled(tokens[0])

    def forward(
        self,
        kind: PassKind,
        tokens: Int32[np.ndarray, "B T"],
        starts: Int32[np.ndarray, " B"],
        active: Bool[np.ndarray, " B"],
        commit: Bool[np.ndarray, " B"],
        folds: Bool[np.ndarray, " B"],
        is_prompt: Bool[np.ndarray, "B T"],
    ) -> Prediction | None:
        """One pass over one block per row, or two where it folds. See `Denoiser`.

        The random keys of a run that folds are those of one that does not.
        """
        L, wide = tokens.shape[1], folds if folds.any() else None
        entered = active & (starts != self._starts)
        if entered.any():
            self._iterations[entered] = 0
            self._starts[active] = starts[active]
            self._engine.begin_block()
        compared = active & ~commit
        self.shares.begin_pass(compared)
        self._folds = folds
        confidence = np.where(entered[:, None], np.float32(1.0), self._confidence)
        passes = self._passes + folds
        sampled = self._run(
            kind,
            place_blocks(folds, tokens, finished=self._tokens, empty=self._decoding.mask_id),
            starts - folds * np.int32(L),
            place_blocks(folds, self._real(active, L), finished=True, empty=False),
            place_blocks(folds, confidence, finished=self._confidence, empty=1.0),
            np.where(compared, self._iterations, -1),
            wide,
            passes if compared.any() else None,
        )
        if self._kept is not None:
            if folds[0]:
                self._kept.saw(int(starts[0]) - L, self._tokens[0])
            self._kept.saw(int(starts[0]), tokens[0])
        self._iterations += compared
        self._passes = passes + active
        return None if sampled is None else Prediction(*unpack_sample(sampled))

    def _real(self, active: Bool[np.ndarray, " B"], width: int) -> Bool[np.ndarray, "B T"]:
        """Positions of a pass that hold a token: they route and are seen."""
        return np.broadcast_to(active[:, None], (len(active), width))

    def close(self) -> None:
        """The run is over, or given up."""
        if self._kept is not None and self._cache is not None:
            self._kept.give_back(self._cache)

    def end_pass(self, outcome: PassOutcome) -> None:
        """Gives the cache manager what the decoder did."""
        folds, mask_id = self._folds, self._decoding.mask_id
        tokens = place_blocks(folds, outcome.tokens_after, finished=self._tokens, empty=mask_id)
        confidence = place_blocks(folds, outcome.confidence, finished=self._confidence, empty=1.0)
        self._tokens, self._confidence = outcome.tokens_after, outcome.confidence
        self._engine.end_iteration(
            IterationOutcome(
                kind=outcome.kind,
                token_ids=tokens.ravel(),
                written=place_blocks(folds, outcome.written, finished=False, empty=False).ravel(),
                masked=place_blocks(folds, outcome.masked_before, finished=False, empty=False).ravel(),
                confidence=confidence.ravel(),
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
        folds: np.ndarray | None = None,
        passes: np.ndarray | None = None,
    ) -> jax.Array | None:
        """A pass; its samples, if it is told which pass of its request each row's is."""
        info = PassInfo(
            kind=kind,
            token_ids=tokens.ravel(),
            masked=(tokens == self._decoding.mask_id).ravel() & token_mask.ravel(),
            token_mask=token_mask.ravel(),
            confidence=confidence.ravel(),
            folds=folds,
        )
        inputs = PassInputs.of(
            tokens=tokens,
            starts=starts,
            token_mask=token_mask,
            sequence_length=self._sequence_length,
            manager=self._engine.handle,
            iterations=iterations if self._engine.records_hidden else None,
            folds=folds if self._engine.records_hidden else None,
        )

        given = None
        if passes is not None:
            seed, requests = np.uint32(self._decoding.seed).view(np.int32), self._numbers[self._request]
            given = Packed.of(SampleInputs.of(seed=seed, requests=requests, pass_index=passes, folds=folds))

        def follow(hidden: jax.Array) -> jax.Array | None:
            return None if given is None else sample(self._sampling, self._engine.head, hidden, given)

        block_length = self._decoding.block_length
        self._cache, sampled = self._engine.run_pass(info, inputs, self._cache, block_length, follow)
        return sampled
