"""Routes of a synthetic trace: a router's scores, made up so that few parameters govern how local the routes are.

The score of expert e for the token at position t in layer l is

    s = pool(u_le) + w · own_te + sqrt(1 − w²) · z_te

* u is the expert's appeal to the block: a normal variable made of what it is worth to every text (popularity), to this
  request and to this block alone. `block_share` is the block's part of the variance: the smaller, the more alike are
  successive blocks, so it sets the **boundary overlap**.
* pool(u) is 0 at the appeal that a share `pool` of the experts exceeds. Above it scores rise by POPULARITY / pool for
  each unit of appeal, below it they fall by `hardness`. So the tokens of a block choose from a pool, whose size sets
  the number of **distinct experts**; how often a choice falls outside, and thus the **adjacent overlap** that a given
  churn leaves, is set by its hardness.
* own is what the input itself asks for: one vector for the mask token, one for every (layer, token id). A token that is
  written trades one for the other, which costs it most of its routes; who knows the token id can learn the new ones.
  Its weight w is MASK_WEIGHT or IDENTITY_WEIGHT.
* z is the context: noise of the position that changes from pass to pass as z' = sqrt(1 − q) z + sqrt(q) noise. The
  `churn` q by state (decoded, masked, just written) sets the **kept shares**; by `slope` it falls with the confidence,
  which sets the **correlation of confidence and stability**.

Experts are the K greatest scores, gates their sigmoids, normalised and scaled as the model's router does it. So greater
gates last longer, and a dropped expert was a near miss first, as in a trained router.
"""

import dataclasses
from collections.abc import Iterator
from statistics import NormalDist

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome
from oled_jax.traces.locality_meter import token_states
from oled_jax.traces.script import Script, Stream, random_numbers
from oled_jax.traces.spec import SyntheticSpec
from oled_jax.traces.trace import TracePass

POPULARITY = 0.15  # so that in a pool of any size some experts serve many tokens and some serve one
REQUEST_SHARE = 0.25  # of the appeal's variance that the block leaves, the request's part
MASK_WEIGHT, IDENTITY_WEIGHT = 0.4, 0.85
# By state, about the mean confidence in `script.py`: there `slope` changes no churn. A written token's never changes.
CONFIDENCE_MIDDLES = np.array([0.92, 0.28, 0.0], np.float32)
GATE_MIDDLE = 3.0  # the score whose sigmoid is one half
BOUND = 24.0  # of pool(u): experts that far outside are never among the K best
SCALE = 2.0**25  # scores per integer step while the K best are found: |score| < 2^6 fits
MIN_BANK = 1 << 20
MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F))  # odd, as in splitmix64 and xxHash


@dataclasses.dataclass(frozen=True, kw_only=True)
class Knobs:
    """What governs the routes. churn: of tokens decoded earlier, masked, just written (`locality.STATES`)."""

    pool: Float[np.ndarray, " L"]
    hardness: Float[np.ndarray, " L"]
    block_share: Float[np.ndarray, " L"]
    churn: Float[np.ndarray, " 3"]
    slope: float


class ScoreRouter:
    """Routes one block after another. Random numbers depend on seed, request and block, not on what came before.

    Args:
      spec: shape and seed.
      knobs: how local.
    """

    def __init__(self, spec: SyntheticSpec, knobs: Knobs) -> None:
        L, T, E = spec.num_layers, spec.block_length, spec.num_experts
        self._spec, self._knobs = spec, knobs
        # Windows of one array of noise, at random offsets, cost a hundredth of new random numbers.
        size = max(MIN_BANK, 4 * L * T * E)
        self._bank = random_numbers(spec.seed, Stream.BANK).standard_normal(size, dtype=np.float32)
        self._windows = np.lib.stride_tricks.sliding_window_view(self._bank, E)
        self._popularity = self._noise(random_numbers(spec.seed, Stream.POPULARITY), L, E)
        self._scratch, self._keys = np.empty((L, T, E), np.float32), np.empty((L, T, E), np.int32)
        self._mask = MASK_WEIGHT * self._noise(random_numbers(spec.seed, Stream.MASK), L, E)

    def enter(self, request: int, block: int) -> None:
        """Begins a block."""
        spec, knobs = self._spec, self._knobs
        L, T, E = spec.num_layers, spec.block_length, spec.num_experts
        self._random = random_numbers(spec.seed, Stream.ROUTES, request, block)
        own = self._noise(self._random, L, E)
        of_request = self._noise(random_numbers(spec.seed, Stream.REQUEST, request), L, E)
        lasting = np.sqrt(1 - REQUEST_SHARE) * self._popularity + np.sqrt(REQUEST_SHARE) * of_request
        share = knobs.block_share[:, None]
        above = np.sqrt(1 - share) * lasting + np.sqrt(share) * own - self._bend()
        below = knobs.hardness[:, None]
        slope = np.where(above > 0, POPULARITY / knobs.pool[:, None], below)
        self._pool = np.clip(slope * above, -BOUND, BOUND).astype(np.float32)[:, None]
        self._fixed = np.empty((L, T, E), np.float32)
        self._inputs = np.full(T, -1, np.int32)
        self._weight = np.ones(T, np.float32)
        self._context = self._noise(self._random, L, T, E).copy()

    def route(
        self, tokens: Int[np.ndarray, " T"], masked: Bool[np.ndarray, " T"]
    ) -> tuple[Int32[np.ndarray, "L T K"], Float32[np.ndarray, "L T K"]]:
        """Experts by falling gate, and gates."""
        self._read_inputs(tokens, masked)
        K, E = self._spec.top_k, self._spec.num_experts
        scores, keys = self._scratch, self._keys
        np.multiply(self._context, self._weight[:, None], out=scores)
        scores += self._fixed
        scores *= np.float32(SCALE)
        np.copyto(keys, scores, casting="unsafe")
        # The expert's number in the low bits makes all scores different and lets one sort carry both.
        numbers = (1 << (E - 1).bit_length()) - 1
        keys &= ~numbers
        keys |= np.arange(E, dtype=np.int32)
        keys.partition(E - K, axis=-1)
        best = -np.sort(-keys[..., E - K :], axis=-1)
        gates = 1 / (1 + np.exp(GATE_MIDDLE - (best & ~numbers) / np.float32(SCALE)))
        gates *= self._spec.routed_scaling_factor / gates.sum(-1, keepdims=True)
        return best & numbers, gates.astype(np.float32)

    def advance(self, outcome: IterationOutcome) -> None:
        """The decoder has acted: contexts change before the next pass over the block."""
        state = token_states(outcome)
        churn = self._knobs.churn[state]
        unsure = CONFIDENCE_MIDDLES[state] - outcome.confidence
        odds = churn / (1 - churn) * np.exp(self._knobs.slope * unsure)
        churn = np.where(outcome.written, churn, odds / (1 + odds)).astype(np.float32)[:, None]
        self._context *= np.sqrt(1 - churn)
        self._context += np.multiply(self._noise(self._random, *self._context.shape), np.sqrt(churn), out=self._scratch)

    def _read_inputs(self, tokens: Int[np.ndarray, " T"], masked: Bool[np.ndarray, " T"]) -> None:
        """Brings `_fixed` and `_weight` up to date where the input is another one than in the pass before."""
        changed = np.flatnonzero(tokens != self._inputs)
        hidden, shown = changed[masked[changed]], changed[~masked[changed]]
        self._fixed[:, hidden] = self._pool + self._mask[:, None]
        self._weight[hidden] = np.sqrt(1 - MASK_WEIGHT**2)
        self._fixed[:, shown] = self._pool + np.float32(IDENTITY_WEIGHT) * self._own(tokens[shown])
        self._weight[shown] = np.sqrt(1 - IDENTITY_WEIGHT**2)
        self._inputs = tokens

    def _own(self, tokens: Int[np.ndarray, " n"]) -> Float32[np.ndarray, "L n E"]:
        """What each token id asks for: windows of the bank at places that layer and token alone determine."""
        layers = np.arange(self._spec.num_layers, dtype=np.uint64)[:, None] + np.uint64(1)
        mixed = (tokens.astype(np.uint64) + np.uint64(1)) * MIX[0] ^ layers * MIX[1]
        places = (mixed * MIX[0] >> np.uint64(32)) % np.uint64(len(self._windows))
        return self._windows[places]

    def _bend(self) -> Float[np.ndarray, "L 1"]:
        normal = NormalDist()
        return np.array([[normal.inv_cdf(1 - share)] for share in self._knobs.pool])

    def _noise(self, random: np.random.Generator, *shape: int) -> Float32[np.ndarray, "..."]:
        """A view: not to be written to."""
        size = int(np.prod(shape))
        start = int(random.integers(len(self._bank) - size))
        return self._bank[start : start + size].reshape(shape)


def routed_passes(spec: SyntheticSpec, knobs: Knobs, *, prefill: bool = True) -> Iterator[TracePass]:
    """The passes of a specification. prefill: without, those are left out; the others are the same."""
    T, router = spec.block_length, ScoreRouter(spec, knobs)
    for each in Script(spec):
        tokens, masked = each.info.token_ids, each.info.masked
        if each.info.kind is PassKind.PREFILL:
            if not prefill:
                continue
            routes = []
            for first in range(0, len(tokens), T):
                router.enter(each.request, each.block + first // T)
                routes.append(router.route(tokens[first : first + T], masked[first : first + T]))
            ids, gates = (np.concatenate(arrays, axis=1) for arrays in zip(*routes, strict=True))
        else:
            if each.new_block:
                router.enter(each.request, each.block)
            ids, gates = router.route(tokens, masked)
            router.advance(each.outcome)
        yield TracePass(
            prompts=() if each.prompt is None else (each.prompt,),
            new_blocks=int(each.new_block),
            request_ids=np.array([each.request], np.int32),
            block_starts=np.array([each.block * T], np.int32),
            info=each.info,
            expert_ids=ids,
            gates=gates,
            outcome=each.outcome,
        )
