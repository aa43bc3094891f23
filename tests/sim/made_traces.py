"""A small trace made by hand, for tests of the simulator: requests with a prefill, two blocks, batches of rows."""

from collections.abc import Iterator

import numpy as np

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces.trace import MemoryTrace, TraceHeader, TracePass

HEADER = TraceHeader(
    source="synthetic", model="made by hand", num_layers=3, num_experts=16, top_k=2, hidden_size=64,
    moe_intermediate_size=32, dtype="float32", block_length=4,
)  # fmt: skip
KINDS = [PassKind.DENOISE, PassKind.DENOISE, PassKind.DENOISE, PassKind.COMMIT]


def made_trace(
    *, seed: int = 0, requests: int = 3, rows: int = 1, prefill_tokens: int = 8, header: TraceHeader = HEADER
) -> MemoryTrace:
    """Two blocks a request; most tokens keep their experts from one pass to the next.

    The last token of every prefill is padding.
    """
    rng = np.random.default_rng(seed)
    return MemoryTrace(header, tuple(_passes(rng, header, requests, rows, prefill_tokens)))


def _passes(
    rng: np.random.Generator, header: TraceHeader, requests: int, rows: int, prefill_tokens: int
) -> Iterator[TracePass]:
    T = header.block_length
    for request in range(requests):
        numbers = np.arange(rows, dtype=np.int32) + request * rows
        prompts = tuple(rng.integers(0, 90, prefill_tokens - 1).astype(np.int32) for _ in numbers)
        yield _pass(rng, header, PassKind.PREFILL, numbers, prefill_tokens, prompts=prompts)
        for block in range(2):
            routes = None
            for step, kind in enumerate(KINDS):
                made = _pass(rng, header, kind, numbers, T, start=(block + 2) * T, step=step, earlier=routes)
                routes = made.expert_ids
                yield made


def _pass(
    rng: np.random.Generator,
    header: TraceHeader,
    kind: PassKind,
    numbers: np.ndarray,
    tokens: int,
    *,
    prompts: tuple[np.ndarray, ...] = (),
    start: int = 0,
    step: int = 0,
    earlier: np.ndarray | None = None,
) -> TracePass:
    L, E, K, N = header.num_layers, header.num_experts, header.top_k, len(numbers) * tokens
    ids = rng.permuted(np.broadcast_to(np.arange(E, dtype=np.int32), (L, N, E)), axis=-1)[..., :K]
    if earlier is not None:
        ids = np.where(rng.random((L, N, 1)) < 0.3, ids, earlier)
    prefill = kind is PassKind.PREFILL
    real = np.tile(np.arange(tokens) < tokens - prefill, len(numbers))
    masked = np.zeros(N, bool) if prefill else np.arange(N) % tokens >= step
    written = masked & (np.arange(N) % tokens == step) & (kind is PassKind.DENOISE)
    confidence = np.ones(N, np.float32) if prefill or step == 0 else rng.random(N).astype(np.float32)
    token_ids = rng.integers(0, 90, N).astype(np.int32)
    info = PassInfo(kind=kind, token_ids=token_ids, masked=masked, token_mask=real, confidence=confidence)
    after = np.ones(N, np.float32) if prefill else rng.random(N).astype(np.float32)
    outcome = IterationOutcome(kind=kind, token_ids=token_ids, written=written, masked=masked, confidence=after)
    return TracePass(
        prompts=prompts,
        new_blocks=int(step == 0 and not prefill),
        request_ids=numbers,
        block_starts=np.full(len(numbers), start, np.int32),
        info=info,
        expert_ids=np.ascontiguousarray(ids),
        gates=rng.random((L, N, K)).astype(np.float32),
        outcome=outcome,
    )
