"""Retention by expected reuse: which experts the next pass will activate, from the states of its tokens (`oled+`)."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from oled_jax import native
from oled_jax.folding import first_tokens, own_tokens
from oled_jax.passes import PassKind
from oled_jax.policies.allocation import ADAPTING_PASSES
from oled_jax.policies.base import IterationOutcome, LayerRouting, PassInfo, PolicyContext
from oled_jax.policies.composed import Retention
from oled_jax.policies.lasting import LastingValue
from oled_jax.policies.learned import COUNT, Limits
from oled_jax.policies.token_table import MOST, TokenTable

# What a token was when its pass had ended: decoded earlier, still masked, just written.
DECODED, MASKED, WRITTEN = range(3)
FIRST_KEPT = (0.8, 0.75, 0.25)  # before anything was seen
KEPT_PACE, WRITTEN_PACE = 0.02, 0.02  # weight of one new token in the running means
OPENING_PACE = 0.03  # weight of a new block's first pass
OPENING_SHARE = 0.7  # of the opening rates in the ranking after prefill and commit passes
LASTING_SHARE = 0.3  # of V in the ranking
CONFIDENCE_GROUPS = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95])


class StateReuse:
    """Estimates, per layer, how often routes are kept in each state of a token, and what follows for the next pass.

    kept [L, 3, K]: how often the k-th route of a token in this state is kept. written [groups]: how often a masked
    token of this confidence is written in the pass. opening [L, E]: how often a block's first pass activates an expert.
    Of the pass that runs, [L, N, K]: ids, the routes that it has come to; absent, the chance that a token's k-th route
    is not kept, while nobody knows who will be written.
    """

    def __init__(self, context: PolicyContext) -> None:
        L, E, K = context.num_layers, context.num_experts, context.top_k
        self.kept = np.tile(np.array(FIRST_KEPT)[None, :, None], (L, 1, K))
        self.written = np.full(CONFIDENCE_GROUPS.size + 1, 0.2)
        self.opening = np.zeros((L, E))
        self.openings = np.zeros(1, np.int64)
        self.ids: Int32[np.ndarray, "L N K"] = np.zeros((L, 0, K), np.int32)
        self._offsets = (np.arange(L) * E)[:, None, None]
        self._E = E
        self.absent = np.zeros((L, 0, K))
        self._groups = np.zeros(0, np.int64)
        self._info: PassInfo | None = None
        self._opens = False  # the next denoise pass is a block's first
        self._before: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None  # routes, tokens and states of that pass

    def arrays(self) -> dict[str, np.ndarray]:
        """What it has learned."""
        return {"kept": self.kept, "written": self.written, "opening": self.opening, "openings": self.openings}

    def limits(self) -> dict[str, Limits]:
        """What `arrays` lie between."""
        return {"kept": (0, MOST), "written": (0, 1), "opening": (0, 1), "openings": COUNT}

    def restored(self) -> None:
        """The arrays hold what another had learned."""

    def begin_pass(self, info: PassInfo) -> None:
        """A forward pass starts."""
        self._info = info
        N = info.token_mask.size
        L, _, K = self.ids.shape
        self.ids = np.zeros((L, N, K), np.int32)  # not the old one: that is what this pass is compared with
        self._groups = np.searchsorted(CONFIDENCE_GROUPS, info.confidence)
        masked = info.token_mask & info.masked
        written = self.written[self._groups] * masked
        shares = np.stack([info.own_mask & ~masked, masked - written, written], axis=1)
        self.absent = 1.0 - shares @ self.kept

    def end_pass(self, outcome: IterationOutcome, activated: Bool[np.ndarray, "L E"]) -> None:
        """A pass is over: learns from how it differs from the one before."""
        info = self._info
        if info is None:
            raise RuntimeError("a pass ended that had not begun")
        adapting = outcome.kind in ADAPTING_PASSES
        if adapting:
            self._learn_written(info, outcome)
            if self._opens:
                self.openings += 1
                pace = max(OPENING_PACE, 1.0 / int(self.openings[0]))
                self.opening += pace * (activated - self.opening)
        self._learn_kept(info)
        self._opens = not adapting
        states = np.where(outcome.written, WRITTEN, np.where(outcome.masked, MASKED, DECODED))
        own = own_tokens(info.folds, states.size)
        self._before = (self.ids[:, own], outcome.token_ids[own], states[own]) if adapting else None

    def _learn_written(self, info: PassInfo, outcome: IterationOutcome) -> None:
        masked = info.token_mask & info.masked
        groups = self._groups[masked]
        counts = np.bincount(groups, minlength=self.written.size)
        written = np.bincount(groups, outcome.written[masked], self.written.size)
        means = written / np.maximum(counts, 1)
        self.written += (1.0 - (1.0 - WRITTEN_PACE) ** counts) * (means - self.written)

    def _learn_kept(self, info: PassInfo) -> None:
        again = first_tokens(info.folds, info.token_ids.size)
        now = self.ids[:, again]
        if self._before is None or self._before[0].shape != now.shape:
            return
        ids, tokens, states = self._before
        L, N, _ = ids.shape
        routed = np.zeros((L * N, self._E), bool)
        rows = np.arange(L * N)[:, None]
        routed[rows, now.reshape(L * N, -1)] = True
        kept = routed[rows, ids.reshape(L * N, -1)].reshape(ids.shape)
        same = info.token_mask[again] & (tokens == info.token_ids[again])
        chosen = ((states == np.arange(3)[:, None]) & same).astype(np.float64)
        counts = chosen.sum(1)[:, None]
        pace = 1.0 - (1.0 - KEPT_PACE) ** counts
        self.kept += pace * (chosen @ kept / np.maximum(counts, 1.0) - self.kept)
        np.minimum(self.kept, MOST, out=self.kept)

    def new_text(self) -> Bool[np.ndarray, " N"]:
        """Tokens of the pass that just ran whose routes as text were seen for the first time.

        In prefill all of them, later those that the pass before wrote. To be asked before `end_pass`.
        """
        info = self._info
        if info is None:
            raise RuntimeError("no pass has begun")
        if info.kind is PassKind.PREFILL:
            return info.token_mask
        found = np.zeros(info.token_ids.shape, bool)
        again = first_tokens(info.folds, found.size)
        if self._before is not None and self._before[1].shape == found[again].shape:
            _, tokens, states = self._before
            found[again] = info.token_mask[again] & (states == WRITTEN) & (tokens == info.token_ids[again])
        return found

    def after_pass(self, table: TokenTable | None) -> Float[np.ndarray, "L E"]:
        """Chance that the next pass activates each expert, when this one is over.

        A token that was just written counts by its entry in the table instead of its routes, if it has one.
        """
        info = self._info
        if self._before is None or info is None:
            return self.opening.copy()
        ids, tokens, states = self._before
        real = info.token_mask[own_tokens(info.folds, info.token_mask.size)]
        shares = np.eye(3)[states] * real[:, None]
        named = np.zeros(self.opening.shape)
        if table is not None:
            written = np.flatnonzero(real & (states == WRITTEN))
            written = written[table.knows(tokens[written])]
            shares[written] = 0.0
            named = table.log_absent(tokens[written])
        logs = np.log1p(-(shares @ self.kept))
        absent = np.bincount((ids + self._offsets).ravel(), logs.ravel(), self.opening.size)
        likely: np.ndarray = -np.expm1(absent.reshape(self.opening.shape) + named)
        return likely


class ExpectedReuse(Retention):
    """Score = chance of use in the next pass + LASTING_SHARE * V, V the value of `LastingValue`.

    When a pass is over, the chance is that of `StateReuse.after_pass`.

    Args:
      table: learns from the passes, too; None: routes of written tokens are expected to stay as far as they do.
      as_shares: scores are divided by their sum over the activated experts while a layer runs, as rules that weigh
        reuse against time expect.

    Attributes:
      likely: the chances behind the scores after a pass, [L, E].
      activated: what this pass activates, [L, E], as far as it has come.
    """

    def __init__(self, context: PolicyContext, table: TokenTable | None, *, as_shares: bool) -> None:
        super().__init__(context)
        L, E = context.num_layers, context.num_experts
        self.table = table
        self.as_shares = as_shares
        self.states = StateReuse(context)
        self.lasting = LastingValue(L, E)
        self.likely = np.zeros((L, E))
        self._scores = np.zeros((L, E))
        self._rows = list(self._scores)
        self.activated = np.zeros((L, E), bool)
        self._info: PassInfo | None = None

    @property
    def parts(self) -> Sequence[StateReuse | LastingValue | TokenTable]:
        """What learns."""
        return (self.states, self.lasting) if self.table is None else (self.states, self.lasting, self.table)

    def begin_iteration(self, info: PassInfo) -> None:
        self._info = info
        self.states.begin_pass(info)

    def observe(self, routing: LayerRouting) -> None:
        states, lasting = self.states, self.lasting
        opening_share = 0.0 if routing.info.kind in ADAPTING_PASSES else OPENING_SHARE
        score_reuse(
            routing.layer,
            routing.expert_ids,
            routing.loads,
            states.absent,
            states.opening,
            opening_share,
            lasting.active,
            lasting.idle,
            LASTING_SHARE,
            self.as_shares,
            states.ids,
            self.activated,
            self._scores,
        )

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        return self._rows[layer]

    def end_iteration(self, outcome: IterationOutcome) -> None:
        info = self._info
        if info is None:
            raise RuntimeError("a pass ended that had not begun")
        if self.table is not None:
            text = self.states.new_text()
            self.table.learn(info.token_ids[text], self.states.ids[:, text])
        self.states.end_pass(outcome, self.activated)
        self.lasting.end_pass(self.activated)
        self.likely = self.states.after_pass(self.table)
        np.add(self.likely, LASTING_SHARE * self.lasting.idle, out=self._scores)


@native.compiled
def score_reuse(
    layer: int,
    expert_ids: Int32[np.ndarray, "N K"],
    loads: Int[np.ndarray, " E"],
    absent: Float[np.ndarray, "L N K"],
    opening: Float[np.ndarray, "L E"],
    opening_share: float,
    active: Float[np.ndarray, "L E"],
    idle: Float[np.ndarray, "L E"],
    lasting_share: float,
    as_shares: bool,
    kept_ids: Int32[np.ndarray, "L N K"],
    activated: Bool[np.ndarray, "L E"],
    scores: Float[np.ndarray, "L E"],
) -> None:
    """Writes a layer's scores while a pass runs, a copy of its routes, and what it activates.

    The chance of use is that of tokens that keep their routes independently; products run in the order of tokens.
    """
    kept_ids[layer] = expert_ids
    used = np.greater(loads, 0, out=activated[layer])
    nobody = np.ones(loads.size)
    np.multiply.at(nobody, expert_ids.ravel(), absent[layer].ravel())
    likely = 1.0 - nobody
    if opening_share > 0.0:
        likely = (1.0 - opening_share) * likely + opening_share * opening[layer]
    row = scores[layer]
    row[:] = lasting_share * np.where(used, active[layer], idle[layer]) + likely
    if as_shares and np.count_nonzero(used):
        total = row[used].cumsum()[-1]
        row /= total if total > 0.0 else 1.0
