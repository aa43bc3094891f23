"""Passes and routes for tests that drive a cache manager without a model."""

import numpy as np

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo

L, E, K, N = 3, 16, 2, 8


def info(kind=PassKind.DENOISE, tokens=N, real=None) -> PassInfo:
    mask = np.ones(tokens, bool) if real is None else np.arange(tokens) < real
    return PassInfo(
        kind=kind,
        token_ids=np.zeros(tokens, np.int32),
        masked=np.zeros(tokens, bool),
        token_mask=mask,
        confidence=np.ones(tokens, np.float32),
    )


def outcome(kind=PassKind.DENOISE, tokens=N) -> IterationOutcome:
    start = info(kind, tokens)
    return IterationOutcome(
        kind=kind,
        token_ids=start.token_ids,
        written=start.masked,
        masked=start.masked,
        confidence=start.confidence,
    )


def packed(ids) -> np.ndarray:
    ids = np.asarray(ids, np.int32)
    return np.concatenate([ids, np.full(ids.shape, 0.5, np.float32).view(np.int32)], axis=1)


def routes(rng, tokens=N) -> np.ndarray:
    return np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
