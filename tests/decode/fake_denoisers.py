"""Stand-ins for a model, and a plain transcription of the reference's two `generate` functions."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from oled_jax.config import DecodingConfig
from oled_jax.decode.block_diffusion import BlockDiffusion, Prediction
from oled_jax.decode.events import Event, FinishEvent, Result
from oled_jax.passes import PassKind, PassOutcome

MASK, EOS, VOCAB = 15, 14, 16
EDITING = [False, True]


def config(**changes: Any) -> DecodingConfig:
    fields = {
        "mask_id": MASK,
        "eos_id": EOS,
        "block_length": 4,
        "gen_length": 10,
        "threshold": 0.7,
        "editing_threshold": 0.6,
        "fold_commits": False,
    }
    return DecodingConfig(**{**fields, **changes})


def random_config(rng: np.random.Generator, *, editing: bool) -> DecodingConfig:
    return config(
        editing=editing,
        eos_id=EOS if rng.random() < 0.7 else -1,
        block_length=int(rng.integers(1, 9)),
        gen_length=int(rng.integers(4, 30)),
        steps=int(rng.integers(1, 12)),
        minimal_topk=int(rng.integers(1, 5)),
        threshold=float(rng.uniform(0, 1.2)),
        editing_threshold=float(rng.uniform(0, 1.2)),
        max_post_steps=int(rng.integers(0, 6)),
        num_to_transfer=int(rng.integers(1, 4)),
        eos_early_stop=bool(rng.random() < 0.5),
    )


def random_prompt(rng: np.random.Generator, most: int = 20) -> list[int]:
    return rng.integers(0, EOS, rng.integers(0, most)).tolist()


# (tokens before the block, tokens of the block) -> predicted tokens, confidence
Model = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def hashed_model(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Arbitrary but fixed predictions that depend on every token before and inside the block."""
    rng = np.random.default_rng(zlib.crc32(np.concatenate([prefix, block]).astype(np.int64).tobytes()))
    drawn = rng.integers(0, MASK, len(block)).astype(np.int32)
    kept = (block != MASK) & (rng.random(len(block)) < 0.8)
    return np.where(kept, block, drawn).astype(np.int32), rng.random(len(block)).astype(np.float32)


def constant(token: int, confidence: float = 1.0) -> Model:
    """The same prediction everywhere."""

    def model(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.full(len(block), token, np.int32), np.full(len(block), confidence, np.float32)

    return model


class FakeDenoiser:
    """Runs a `Model` behind the denoiser protocol, with a KV cache that holds tokens instead of keys.

    The model sees the cache before the block, as a real one would: without a commit it sees stale tokens.
    """

    def __init__(self, model: Model = hashed_model, *, length: int = 512):
        self._model, self._length = model, length
        self.calls: list[dict[str, Any]] = []
        self.outcomes: list[PassOutcome] = []
        self.prefills = 0
        self.entered: list[tuple[int, int]] = []
        self.passes_at_entry: list[int] = []
        self._cache: np.ndarray | None = None

    def _cache_for(self, B: int) -> np.ndarray:
        if self._cache is None:
            self._cache = np.full((B, self._length), -1, np.int32)
        return self._cache

    def enter(self, place: int, request: int) -> None:
        self.entered.append((place, request))
        self.passes_at_entry.append(len(self.outcomes))

    def prefill(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        self.prefills += 1
        cache = self._cache_for(len(tokens))
        for row, length in enumerate(lengths):
            cache[row, :length] = tokens[row, :length]

    def forward(
        self,
        kind: PassKind,
        tokens: np.ndarray,
        starts: np.ndarray,
        active: np.ndarray,
        commit: np.ndarray,
        folds: np.ndarray,
        is_prompt: np.ndarray,
    ) -> Prediction | None:
        cache = self._cache_for(len(tokens))
        predicted, confidence = np.full_like(tokens, MASK), np.full(tokens.shape, np.nan, np.float32)
        for row in np.flatnonzero(active):
            start = int(starts[row])
            if folds[row]:
                cache[row, start - tokens.shape[1] : start] = self.outcomes[-1].tokens_after[row]
            cache[row, start : start + tokens.shape[1]] = tokens[row]
            if not commit[row]:
                predicted[row], confidence[row] = self._model(cache[row, :start], tokens[row])
        self.calls.append(
            {
                "kind": kind,
                "tokens": tokens.copy(),
                "commit": commit.copy(),
                "folds": folds.copy(),
                "is_prompt": is_prompt.copy(),
            }
        )
        return None if (commit == active).all() else Prediction(predicted, confidence)

    def end_pass(self, outcome: PassOutcome) -> None:
        self.outcomes.append(outcome)


class ReplayDenoiser(FakeDenoiser):
    """Answers the passes of one row with the recorded predictions, in order."""

    def __init__(self, steps: Sequence[Mapping[str, Any]]):
        remaining = iter(steps)

        def recorded(prefix: np.ndarray, block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            step = next(remaining)
            return np.array(step["x0"], np.int32), np.array(step["confidence"], np.float32)

        super().__init__(recorded)


def decode(
    prompts: Sequence[Sequence[int]], config: DecodingConfig, denoiser: Any = None, places: int | None = None
) -> tuple[list[Event], dict[int, Result]]:
    """Runs to the end: all events, and the result of every row."""
    denoiser = FakeDenoiser() if denoiser is None else denoiser
    events = list(BlockDiffusion(denoiser, config).run(prompts, places))
    return events, {e.row: e.result for e in events if isinstance(e, FinishEvent)}


def reference_generate(
    prompt: Sequence[int], config: DecodingConfig, model: Model = hashed_model
) -> tuple[list[int], list[int], int]:
    """Output, canvas, forward calls of REFERENCE sections 6 and 7. No eos in the prompt, gen_length > 0."""
    P, L = len(prompt), config.block_length
    N = -(-(P + config.gen_length) // L)
    canvas = np.array(list(prompt) + [config.mask_id] * (N * L - P), np.int32)
    calls, block_loop = 0, _block_of_21 if config.editing else _block_of_20
    for b in range(P // L, N):
        made, returned = block_loop(canvas, P, slice(b * L, (b + 1) * L), config, model)
        calls += made
        has_eos = config.eos_id in canvas[P : (b + 1) * L]
        if returned or (has_eos and (not config.editing or config.eos_early_stop)):
            break
    output = canvas[P : P + config.gen_length].tolist()
    if config.eos_id in output:
        output = output[: output.index(config.eos_id) + 1]
    return output, canvas.tolist(), calls


def _take(active: list[int], confidence: np.ndarray, threshold: float, n: int) -> list[int]:
    high = [i for i in active if confidence[i] > np.float32(threshold)]
    return high if len(high) >= n else sorted(active, key=lambda i: (-confidence[i], i))[:n]


def _block_of_20(canvas: np.ndarray, P: int, span: slice, config: DecodingConfig, model: Model) -> tuple[int, bool]:
    L, steps = config.block_length, min(config.steps, config.gen_length // config.minimal_topk)
    for t in range(steps):
        block = canvas[span]
        active = np.flatnonzero(block == config.mask_id).tolist()
        if not active:
            return t, False
        x0, confidence = model(canvas[: span.start], block)
        chosen = _take(active, confidence, config.threshold, L // steps + (t < L % steps))
        block[chosen] = x0[chosen]
        if config.eos_early_stop and config.eos_id in x0[chosen]:
            e = canvas.tolist().index(config.eos_id)
            if config.mask_id not in canvas[P:e]:
                return t + 1, True
    return steps, False


def _block_of_21(canvas: np.ndarray, P: int, span: slice, config: DecodingConfig, model: Model) -> tuple[int, bool]:
    post = calls = 0
    while True:
        block, old = canvas[span], canvas[span].copy()
        active = np.flatnonzero(old == config.mask_id).tolist()
        post += not active
        if post > config.max_post_steps:
            return calls, False
        x0, confidence = model(canvas[: span.start], old)
        calls += 1
        chosen = _take(active, confidence, config.threshold, config.num_to_transfer) if active else []
        edits = [
            i
            for i in range(len(old))
            if i not in active and span.start + i >= P and confidence[i] > config.editing_threshold and x0[i] != old[i]
        ]
        block[chosen + edits] = x0[chosen + edits]
        if not active and not edits:
            return calls, False
