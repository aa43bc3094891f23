"""Finds the router's knobs that give a synthetic trace its targets: by routing its own first passes again and again.

Each target has a knob of its own that moves it one way (`score_router`): by layer, the pool for distinct experts, its
hardness for the adjacent overlap and the block's share for the boundary overlap; for all layers, the churn of each
state for the kept shares and the slope for the correlation. Knobs and figures are compared as logits (logarithms where
there is no upper end), in which one moves roughly in proportion to the other. A round routes, measures
(`locality_meter`), and moves every knob by its gain times what its target lacks; what a knob does to the other targets
is mended in the next round. First rounds are short.

The random numbers are those of the trace itself: so nothing but the knobs changes between rounds, and a long trace
differs from the last round only by what its later passes add. Layers differ in their number of distinct experts, by a
random pattern whose spread is the heterogeneity.
"""

import dataclasses
import itertools
import math

import numpy as np
from jaxtyping import Float

from oled_jax.passes import PassKind
from oled_jax.traces.locality import UNWRITTEN, Locality, correlation_of
from oled_jax.traces.locality_meter import LocalityMeter
from oled_jax.traces.score_router import Knobs, routed_passes
from oled_jax.traces.script import Script, Stream, random_numbers
from oled_jax.traces.spec import SyntheticSpec, Targets
from oled_jax.traces.trace import TraceHeader

SHORT, SHORT_ROUNDS = 80, 6  # iterations of a short round, and how many there are
LONG, LONG_ROUNDS = 600, 4  # at most
CLOSE = 0.03  # no further round once every target is met as closely
POOL_GAIN, HARDNESS_GAIN, BLOCK_GAIN, SLOPE_GAIN = 1.6, 1.5, -1.0, 4.0  # tried out on the presets
CHURN_GAINS = np.array([-1.8, -1.8, -4.0])
MAX_STEP = 0.5
LEAST, MOST = np.log(0.3), np.log(30.0)  # hardness
END = 6.0  # no logit is further from 0
STEEPEST = 20.0  # slope
SPREAD = 1.8  # no layer is more standard deviations from the mean


def deviations(targets: Targets, found: Locality) -> dict[str, float]:
    """By target, how far what was found is from it: relative, or absolute if the target is 0. NaN: not measured."""
    values = achieved(found)
    return {
        name: (values[name] - wanted) / (abs(wanted) or 1.0) for name, wanted in dataclasses.asdict(targets).items()
    }


def achieved(found: Locality) -> dict[str, float]:
    """The figures that `Targets` names."""
    return {
        "distinct_experts": float(found.distinct.mean()),
        "adjacent_overlap": float(found.overlap[0].mean()),
        "boundary_overlap": float(found.boundary.mean()),
        "confidence_correlation": found.correlation["unwritten"],
        "layer_heterogeneity": found.heterogeneity,
        **{f"kept_{state.removeprefix('just_')}": kept for state, kept in found.kept_by_state.items()},
    }


def calibrate(spec: SyntheticSpec, header: TraceHeader) -> Knobs:
    """The knobs of the best long round. A target that no knobs reach is missed by as little as was found."""
    wanted = _layer_targets(spec)
    point = _start(spec, wanted)
    for _ in range(SHORT_ROUNDS):
        point = point.step(_measure(spec, header, point, SHORT), wanted, spec.targets)
    best, least, iterations = point, math.inf, _long_round(spec)
    for _ in range(LONG_ROUNDS):
        found = _measure(spec, header, point, iterations)
        apart = [value for value in deviations(spec.targets, found).values() if not math.isnan(value)]
        if math.hypot(*apart) < least:  # not the greatest: where one target cannot be met, the others count as well
            best, least = point, math.hypot(*apart)
        if max(map(abs, apart)) <= CLOSE:
            break
        point = point.step(found, wanted, spec.targets)
    return best.knobs()


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Point:
    """Knobs as they are moved: logits of shares, logarithm of hardness, the slope in its unit."""

    pool: Float[np.ndarray, " L"]
    hardness: Float[np.ndarray, " L"]
    block_share: Float[np.ndarray, " L"]
    churn: Float[np.ndarray, " 3"]
    slope: float
    slope_unit: float

    def knobs(self) -> Knobs:
        return Knobs(
            pool=_share(self.pool),
            hardness=np.exp(self.hardness),
            block_share=_share(self.block_share),
            churn=_share(self.churn),
            slope=self.slope * self.slope_unit,
        )

    def step(self, found: Locality, distinct: Float[np.ndarray, " L"], targets: Targets) -> "_Point":
        """Every knob moved towards its target. distinct: wanted by layer."""
        kept = np.array(list(found.kept_by_state.values()))
        wanted_kept = np.array([targets.kept_decoded, targets.kept_masked, targets.kept_written])
        correlation = np.array([targets.confidence_correlation, _correlation_to_come(found, wanted_kept)])
        stable, measured = np.arctanh(np.clip(correlation, -0.999, 0.999))
        adjacent = _logit(targets.adjacent_overlap) - _logit(found.overlap[0])
        boundary = _logit(targets.boundary_overlap) - _logit(found.boundary)
        return _Point(
            pool=np.clip(self.pool + _step(POOL_GAIN * np.log(distinct / found.distinct)), -END, END),
            hardness=np.clip(self.hardness + _step(HARDNESS_GAIN * adjacent), LEAST, MOST),
            block_share=np.clip(self.block_share + _step(BLOCK_GAIN * boundary), -END, END),
            churn=np.clip(self.churn + _step(CHURN_GAINS * (_logit(wanted_kept) - _logit(kept))), -END, END),
            slope=float(np.clip(self.slope + _step(SLOPE_GAIN * (stable - measured)), -STEEPEST, STEEPEST)),
            slope_unit=self.slope_unit,
        )


def _start(spec: SyntheticSpec, distinct: Float[np.ndarray, " L"]) -> _Point:
    """About where the presets end. The more tokens share an expert, the softer the pool that gives the same overlap."""
    shared = spec.block_length * spec.top_k / distinct.mean()
    hardness = np.clip(4.0 * (2.6 / shared) ** 4, 0.5, 15.0)
    pool = distinct / spec.num_experts * np.clip(0.5 + 0.1 * hardness, 0.5, 1.0)
    return _Point(
        pool=_logit(pool),
        hardness=np.full(spec.num_layers, np.log(hardness)),
        block_share=np.full(spec.num_layers, _logit(0.08)),
        churn=_logit(np.array([0.33, 0.12, 0.87])),
        slope=0.6,
        # The fewer routes a token has, the more chance is in the share it keeps, and the less shows of the slope.
        slope_unit=math.sqrt(200 / (spec.num_layers * spec.top_k)),
    )


def _layer_targets(spec: SyntheticSpec) -> Float[np.ndarray, " L"]:
    """Distinct experts that each layer shall have: a random pattern of exactly the wanted mean and spread.

    Where the spread leaves no room, values end at what is possible.
    """
    mean, spread = spec.targets.distinct_experts, spec.targets.layer_heterogeneity
    pattern = np.zeros(spec.num_layers)
    if spec.num_layers > 1:
        drawn = random_numbers(spec.seed, Stream.LAYERS).standard_normal(spec.num_layers)
        pattern = np.clip((drawn - drawn.mean()) / drawn.std(), -SPREAD, SPREAD)
        pattern = (pattern - pattern.mean()) / pattern.std()
    most = min(spec.num_experts, spec.block_length * spec.top_k)
    return np.clip(mean * (1 + spread * pattern), spec.top_k, most)


def _long_round(spec: SyntheticSpec) -> int:
    """Iterations of the trace itself, if they are neither few nor many."""
    denoise = (each for each in Script(spec) if each.info.kind is PassKind.DENOISE)
    return max(SHORT, sum(1 for _ in itertools.islice(denoise, LONG)))


def _measure(spec: SyntheticSpec, header: TraceHeader, point: _Point, iterations: int) -> Locality:
    meter = LocalityMeter(header)
    begun = dataclasses.replace(spec, requests=None, iterations=iterations)
    for pass_ in routed_passes(begun, point.knobs(), prefill=False):
        meter.add(pass_)
    return meter.result()


def _correlation_to_come(found: Locality, kept: Float[np.ndarray, " 3"]) -> float:
    """The correlation once every state keeps the share it shall: a small gap between states weighs much in it."""
    moments = found.moments.copy()
    n, x, y, _, yy, xy = moments.T  # views
    change = kept - np.divide(y, n, out=kept.copy(), where=n > 0)
    yy += 2 * change * y + n * change**2
    xy += change * x
    y += change * n
    return correlation_of(moments, UNWRITTEN)


def _step(change: np.ndarray) -> np.ndarray:
    """No knob moves far at once, and none where nothing was measured."""
    return np.nan_to_num(np.clip(change, -MAX_STEP, MAX_STEP))


def _logit(share: np.ndarray | float) -> np.ndarray:
    inside = np.clip(np.asarray(share), 1e-3, 1 - 1e-3)
    return np.log(inside / (1 - inside))


def _share(logit: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-logit))
