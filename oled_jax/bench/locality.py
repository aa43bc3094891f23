"""How local the routing of a model is: what a cache of experts can hope for (the numbers of the model card).

`RecordingEngine` holds every page (policy `all`: routes are outputs of its program). One prompt at a time, so that
an iteration is one row's.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.config import DecodingConfig
from oled_jax.engine import Engine
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo

CONFIDENCE_EDGES = (0.3, 0.6, 0.9)
STATES = ("decoded", "masked", "just_written")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Iteration:
    """One denoise or edit pass over one block.

    starts_block: it is the block's first. routes: experts of every token, by MoE layer. masked: the token was a
    mask when the pass began. written: it got its token in this pass. confidence: of the pass itself (1.0 for prompt
    tokens).
    """

    starts_block: bool
    routes: Int[np.ndarray, "L N K"]
    masked: Bool[np.ndarray, " N"]
    written: Bool[np.ndarray, " N"]
    confidence: Float[np.ndarray, " N"]


class RecordingEngine(Engine):
    """An engine that keeps what it routed. It takes over the pool of a resident engine, which ends that one's life.

    Raises:
      RuntimeError: the engine pages experts; its routes are known to its manager only.
    """

    def __init__(self, engine: Engine) -> None:
        if engine.manager is not None:
            raise RuntimeError("routes are recorded from an engine that holds every page (policy all)")
        super().__init__(engine.config, engine.trunk, pool=engine.pool)
        self.iterations: list[Iteration] = []
        self._routes: Int[np.ndarray, "L N K"] | None = None
        self._new_block = True

    def begin_block(self) -> None:
        self._new_block = True
        super().begin_block()

    def end_iteration(self, outcome: IterationOutcome) -> None:
        if outcome.kind in (PassKind.DENOISE, PassKind.EDIT) and self._routes is not None:
            self.iterations.append(
                Iteration(
                    starts_block=self._new_block,
                    routes=self._routes,
                    masked=outcome.masked.copy(),
                    written=outcome.written.copy(),
                    confidence=outcome.confidence.copy(),
                )
            )
            self._new_block = False
        super().end_iteration(outcome)

    def _count_routes(self, info: PassInfo, routes: Iterable[jax.Array]) -> None:
        routes = tuple(routes)
        self._routes = np.stack([np.asarray(ids) for ids in routes])
        super()._count_routes(info, routes)


def measure_locality(engine: Engine, prompts: Sequence[Sequence[int]], decoding: DecodingConfig) -> dict[str, Any]:
    """Decodes the prompts one by one and summarises (`summarise_locality`). The engine cannot be used afterwards."""
    recorder = RecordingEngine(engine)
    iterations: list[list[Iteration]] = []
    for prompt in prompts:
        recorder.iterations = []
        recorder.generate([prompt], decoding)
        iterations.append(recorder.iterations)
    return summarise_locality(iterations)


def summarise_locality(requests: Sequence[Sequence[Iteration]]) -> dict[str, Any]:
    """Means over layers and iterations of several requests.

    distinct_experts: activated by a pass, per layer. adjacent_overlap: share of the activated experts that the
    pass before, over the same block, activated too; boundary_overlap: the same from a block's last pass to the next
    block's first. kept_routes: share of a token's K experts that it had in the pass before, by its state in that
    pass: decoded before it (or a prompt token), written in it, still masked after it. kept_by_confidence: the same
    share by the token's confidence in the pass before, for each state and group `confidence_groups()`, with the
    number of tokens.
    """
    distinct: list[float] = []
    adjacent: list[float] = []
    boundary: list[float] = []
    kept: dict[str, list[_Kept]] = {state: [] for state in STATES}
    for iterations in requests:
        distinct += [float(np.unique(layer).size) for iteration in iterations for layer in iteration.routes]
        for previous, current in itertools.pairwise(iterations):
            overlaps = [_overlap(*pair) for pair in zip(current.routes, previous.routes, strict=True)]
            (boundary if current.starts_block else adjacent).extend(overlaps)
            if not current.starts_block:
                _collect_kept(kept, previous, current)
    return {
        "iterations": sum(map(len, requests)),
        "distinct_experts": _mean(distinct),
        "adjacent_overlap": _mean(adjacent),
        "boundary_overlap": _mean(boundary),
        "kept_routes": {state: _mean([share for share, _ in found]) for state, found in kept.items()},
        "kept_by_confidence": {state: _by_confidence(found) for state, found in kept.items()},
    }


def confidence_groups() -> list[str]:
    """Names of the groups of confidence, from low to high. A group holds its lower bound."""
    low, *middle = CONFIDENCE_EDGES
    between = [f"{a} to {b}" for a, b in itertools.pairwise(CONFIDENCE_EDGES)]
    return [f"below {low}", *between, f"from {middle[-1]}"]


_Kept = tuple[float, float]  # share of a token's routes that it kept, mean over layers; its confidence


def _overlap(now: Int[np.ndarray, "N K"], before: Int[np.ndarray, "N K"]) -> float:
    activated = np.unique(now)
    return float(np.isin(activated, before).mean())


def _collect_kept(kept: dict[str, list[_Kept]], previous: Iteration, current: Iteration) -> None:
    same = (current.routes[..., :, None] == previous.routes[..., None, :]).any(-1).mean((0, -1))
    states = {
        "decoded": ~previous.masked,
        "masked": previous.masked & ~previous.written,
        "just_written": previous.written & previous.masked,
    }
    for state, tokens in states.items():
        kept[state] += zip(same[tokens].tolist(), previous.confidence[tokens].tolist(), strict=True)


def _by_confidence(found: Sequence[_Kept]) -> dict[str, dict[str, Any]]:
    shares: dict[str, list[float]] = {name: [] for name in confidence_groups()}
    names = list(shares)
    for share, confidence in found:
        shares[names[bisect.bisect_right(CONFIDENCE_EDGES, confidence)]].append(share)
    return {name: {"tokens": len(kept), "kept": _mean(kept)} for name, kept in shares.items()}


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None
