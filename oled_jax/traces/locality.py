"""How local a trace's routing is: the figures, as `locality_meter` finds them and docs/locality.md explains them.

An iteration is a denoise or edit pass. Overlaps and kept routes are those of one sequence (a row of the batch) and, but
for the boundary, of one block; activation ratios and costs are those of the whole pass. NumPy only.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from oled_jax.passes import PassKind
from oled_jax.traces.trace import COSINE_GAPS, TraceHeader

ITERATIONS = (PassKind.DENOISE, PassKind.EDIT)
CONFIDENCE_EDGES = (0.3, 0.6, 0.9)
STATES = ("decoded", "masked", "just_written")
UNWRITTEN = ("decoded", "masked")
GAPS = COSINE_GAPS  # overlaps are measured as far back as cosines are recorded


def confidence_groups() -> list[str]:
    """Names of the groups of confidence, from low to high. A group holds its lower bound."""
    low, *middle = CONFIDENCE_EDGES
    between = [f"{a} to {b}" for a, b in itertools.pairwise(CONFIDENCE_EDGES)]
    return [f"below {low}", *between, f"from {middle[-1]}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodingCost:
    """What decoding blocks costs, beside a decoder of one token per pass. None: the trace generated no token.

    Attributes:
      pass_bytes: pages that an iteration activates, all layers together, mean.
      token_bytes: pages that denoise, edit and commit passes activated, for each generated token.
      token_flops: of their routed experts, for each generated token.
      single_bytes, single_flops: K pages and their products in every layer: one token, one pass.
    """

    pass_bytes: float | None
    token_bytes: float | None
    token_flops: float | None
    single_bytes: int
    single_flops: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Locality:
    """What a trace says. NaN (None in JSON): there was nothing to measure.

    Attributes:
      header: of the trace.
      passes: by kind.
      generated: masks that were filled.
      distinct: experts that an iteration activates.
      overlap: share of an iteration's experts that the iteration 1, ..., 8 before it, in the same block, activated too.
      boundary: the same between a block's first iteration and the last one of the block before.
      cosine: of layer inputs 1, ..., 8 iterations apart.
      tokens, kept: by state and confidence group, tokens that the next iteration saw again, and the share of their K
        routes that it kept, mean over layers.
      moments: by state, over the same tokens: their number n, Σx, Σy, Σx², Σy², Σxy of confidence x and kept share y.
      cost: bytes and FLOPs.
    """

    header: TraceHeader
    passes: Mapping[PassKind, int]
    generated: int
    distinct: Float[np.ndarray, " L"]
    overlap: Float[np.ndarray, "8 L"]
    boundary: Float[np.ndarray, " L"]
    cosine: Float[np.ndarray, "8 L"]
    tokens: Int[np.ndarray, "3 4"]
    kept: Float[np.ndarray, "3 4"]
    moments: Float[np.ndarray, "3 6"]
    cost: DecodingCost

    @property
    def correlation(self) -> dict[str, float]:
        """Of a token's confidence with the share it keeps: by state, of unwritten (the first two) and all tokens."""
        groups: Mapping[str, Sequence[str]] = {
            **{name: (name,) for name in STATES},
            "unwritten": UNWRITTEN,
            "all": STATES,
        }
        return {name: correlation_of(self.moments, states) for name, states in groups.items()}

    @property
    def iterations(self) -> int:
        return sum(self.passes[kind] for kind in ITERATIONS)

    @property
    def activation_ratio(self) -> Float[np.ndarray, " L"]:
        """Share of a layer's experts that an iteration activates."""
        return self.distinct / self.header.num_experts

    @property
    def heterogeneity(self) -> float:
        """Standard deviation over mean of the layers' activation ratios."""
        return float(self.distinct.std() / self.distinct.mean())

    @property
    def kept_by_state(self) -> dict[str, float]:
        """Share of a token's routes that the next iteration keeps, over all confidences."""
        totals = np.where(self.tokens > 0, self.kept, 0.0) * self.tokens
        return dict(zip(STATES, ratio(totals.sum(-1), self.tokens.sum(-1)).tolist(), strict=True))

    def as_json(self) -> dict[str, Any]:
        """One object: figures of the whole trace, means over layers, and by layer where layers differ."""
        groups = confidence_groups()
        return {
            "iterations": self.iterations,
            "passes": {kind.value: self.passes[kind] for kind in PassKind},
            "generated_tokens": self.generated,
            "distinct_experts": _number(self.distinct.mean()),
            "adjacent_overlap": _number(self.overlap[0].mean()),
            "boundary_overlap": _number(self.boundary.mean()),
            "overlap_by_gap": [_number(value) for value in self.overlap.mean(-1)],
            "cosine_by_gap": [_number(value) for value in self.cosine.mean(-1)],
            "kept_routes": {state: _number(value) for state, value in self.kept_by_state.items()},
            "kept_by_confidence": {
                state: {
                    group: {"tokens": int(self.tokens[s, g]), "kept": _number(self.kept[s, g])}
                    for g, group in enumerate(groups)
                }
                for s, state in enumerate(STATES)
            },
            "confidence_correlation": {name: _number(value) for name, value in self.correlation.items()},
            "activation_ratio": _number(self.activation_ratio.mean()),
            "layer_heterogeneity": _number(self.heterogeneity),
            "by_layer": {
                "activation_ratio": [_number(value) for value in self.activation_ratio],
                "adjacent_overlap": [_number(value) for value in self.overlap[0]],
                "boundary_overlap": [_number(value) for value in self.boundary],
            },
            "cost": dataclasses.asdict(self.cost),
        }


def correlation_of(moments: Float[np.ndarray, "3 6"], states: Sequence[str]) -> float:
    """Pearson's r over the tokens of some states, from `Locality.moments`. NaN if either side does not vary."""
    n, x, y, xx, yy, xy = moments[[STATES.index(state) for state in states]].sum(0)
    if n < 2:
        return float("nan")
    spread = (xx - x * x / n) * (yy - y * y / n)
    return float((xy - x * y / n) / np.sqrt(spread)) if spread > 1e-12 * n * n else float("nan")


def ratio(total: np.ndarray, count: np.ndarray) -> np.ndarray:
    """total / count, NaN where nothing was counted."""
    return np.divide(total, count, out=np.full(np.shape(total), np.nan), where=np.asarray(count) > 0)


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
