"""What confidence, state and identity say about the routes that a token keeps: figures and plots of docs/reuse.md.

    python scripts/plot_reuse.py TRACE --out docs/images

TRACE is a recorded trace of one request at a time (scripts/record_demo_traces.py). Prints the figures, and draws
reuse-confidence.png, reuse-state.png and reuse-identity.png.
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from oled_jax.figures import legend_below, new_figure, save_figure
from oled_jax.passes import PassKind
from oled_jax.policies.token_table import TokenTable
from oled_jax.traces.files import open_trace
from oled_jax.traces.trace import Trace, TracePass

STATES = ("decoded earlier", "still masked", "just written")
EDGES = np.array([0.0, 0.2, 0.4, 0.6, 0.8, 0.9, 1.0 + 1e-9])  # of confidence
FEW = 20  # tokens; a mean over no more is not shown
WIDTHS = (1, 2)  # of a prediction, in units of K
OCCURRENCES = (0, 1, 2, 4, 8, 16)  # where a group of earlier occurrences of a token begins


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """Tokens that a pass and the next one over the same block share.

    kept [n, L, K]: the k-th route of a token is one of its next routes. state [n], confidence [n] of the pass.
    """

    kept: np.ndarray
    state: np.ndarray
    confidence: np.ndarray
    confidence_before: np.ndarray


def steps(trace: Trace) -> Iterator[Step]:
    """One for each two passes over a block that follow each other."""
    before: TracePass | None = None
    for step in trace:
        if before is not None and _same_block(before, step):
            same = step.info.token_mask & (before.outcome.token_ids == step.info.token_ids)
            kept = (before.expert_ids[..., :, None] == step.expert_ids[..., None, :]).any(3)
            outcome = before.outcome
            state = np.where(outcome.written, 2, np.where(outcome.masked, 1, 0))
            yield Step(
                kept=kept.transpose(1, 0, 2)[same],
                state=state[same],
                confidence=outcome.confidence[same],
                confidence_before=before.info.confidence[same],
            )
        before = step if step.info.kind in (PassKind.DENOISE, PassKind.EDIT) else None


def _same_block(before: TracePass, step: TracePass) -> bool:
    return (
        np.array_equal(before.block_starts, step.block_starts)
        and np.array_equal(before.request_ids, step.request_ids)
        and before.info.token_ids.size == step.info.token_ids.size  # else commits are folded: another block begins
    )


def gather(trace: Trace) -> Step:
    """All steps as one."""
    parts = list(steps(trace))
    return Step(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Step)})


class Identity:
    """Recall of the first routes of tokens just written, by predictor [tokens, L], and how often they were seen before.

    A predictor of width w names w experts in each layer; its recall is the share of a token's K routes among them. The
    predictors learn on the way and are asked before they are told.
    """

    def __init__(self, trace: Trace) -> None:
        header = trace.header
        self._K = header.top_k
        self._table = TokenTable(
            num_layers=header.num_layers, num_experts=header.num_experts, top_k=header.top_k, tokens=1 << 14
        )
        self._popular = np.zeros((header.num_layers, header.num_experts))
        recall: dict[str, list[np.ndarray]] = {}
        seen: list[int] = []
        before: TracePass | None = None
        for step in trace:
            if step.info.kind is PassKind.PREFILL:
                self._learn(step, np.flatnonzero(step.info.token_mask))
            elif before is not None and _same_block(before, step):
                written = before.outcome.written & (before.outcome.token_ids == step.info.token_ids)
                for position in np.flatnonzero(written):
                    seen.append(self._table.occurrences(int(step.info.token_ids[position])))
                    for name, named in self._predictions(before, step, position).items():
                        recall.setdefault(name, []).append(_recall(named, step.expert_ids[:, position]))
                self._learn(step, np.flatnonzero(written))
            before = step if step.info.kind in (PassKind.DENOISE, PassKind.EDIT) else None
        self.recall = {name: np.array(values) for name, values in recall.items()}
        self.seen = np.array(seen)

    def _predictions(self, before: TracePass, step: TracePass, position: int) -> dict[str, np.ndarray]:
        token = int(step.info.token_ids[position])
        best = np.argsort(-self._popular, axis=1, kind="stable")
        widths = [width * self._K for width in WIDTHS]
        return {
            "current": before.expert_ids[:, position],
            **{f"table top-{width}": self._table.likeliest(token, width) for width in widths},
            **{f"popular top-{width}": best[:, :width] for width in widths},
        }

    def _learn(self, step: TracePass, positions: np.ndarray) -> None:
        self._table.learn(step.info.token_ids[positions], step.expert_ids[:, positions])
        for layer, ids in enumerate(step.expert_ids[:, positions]):
            self._popular[layer] += np.bincount(ids.ravel(), minlength=self._popular.shape[1])


def _recall(predicted: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Share of each layer's routes [L, K] among the predicted experts [L, w]."""
    return (routes[:, :, None] == predicted[:, None, :]).any(2).mean(1)


def report(found: Step, named: Identity) -> None:
    """Prints the figures of states, of confidence and of identity."""
    share = found.kept.mean((1, 2))
    for state, name in enumerate(STATES):
        chosen = found.state == state
        by_rank, by_layer = (np.round(found.kept[chosen].mean((0, axis)), 2) for axis in (1, 2))
        correlation = np.corrcoef(found.confidence[chosen], share[chosen])[0, 1]
        print(f"{name}: {chosen.sum()} tokens, kept {share[chosen].mean():.3f}, by rank {by_rank}, by layer {by_layer}")
        print(
            f"    correlation with confidence {correlation:+.2f}; kept by confidence",
            _means(share, chosen, found.confidence),
        )
    print(f"all tokens: correlation {np.corrcoef(found.confidence, share)[0, 1]:+.2f}")
    for label, confidence in _confidences(found):
        print(f"masked tokens written, by {label}", _means(found.state == 2, found.state != 0, confidence))
    for name, values in named.recall.items():
        print(f"{name}: recall {values.mean():.3f}, by layer {np.round(values.mean(0), 2)}")
    for low, chosen in _by_occurrence(named.seen):
        values = ", ".join(f"{name} {recall[chosen].mean():.2f}" for name, recall in named.recall.items())
        print(f"    seen {low}+: {chosen.sum()} tokens, {values}")


def _confidences(found: Step) -> list[tuple[str, np.ndarray]]:
    return [("confidence of this pass", found.confidence), ("confidence of the pass before", found.confidence_before)]


def _means(values: np.ndarray, chosen: np.ndarray, confidence: np.ndarray) -> list[float]:
    """Means over the chosen tokens by group of confidence; NaN where there are few."""
    groups = [chosen & (confidence >= low) & (confidence < high) for low, high in itertools.pairwise(EDGES)]
    return [round(float(values[group].mean()), 2) if group.sum() > FEW else float("nan") for group in groups]


def _by_occurrence(seen: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for low, high in itertools.pairwise((*OCCURRENCES, np.inf)):
        yield int(low), (seen >= low) & (seen < high)


def draw_confidence(found: Step, path: Path) -> None:
    share, centres = found.kept.mean((1, 2)), (EDGES[:-1] + EDGES[1:]) / 2
    everyone = np.ones(share.shape, bool)
    figure, (left, right) = new_figure(2)
    for state, name in enumerate(STATES):
        values = _means(share, found.state == state, found.confidence)
        left.plot(centres, values, marker="o", color=f"C{state}", label=name)
    left.plot(centres, _means(share, everyone, found.confidence), color="0.4", linestyle="--", label="all tokens")
    left.set(xlabel="confidence", ylabel="share of routes", ylim=(0, 1.02), title="kept by the next pass")
    for label, confidence in _confidences(found):
        right.plot(centres, _means(found.state == 2, found.state != 0, confidence), marker="s", label=label)
    right.set(xlabel="confidence", ylabel="share of masked tokens", ylim=(0, 1.02), title="written in this pass")
    right.legend(frameon=False, fontsize="small")
    legend_below(figure, left, columns=4)
    save_figure(figure, path)


def draw_state(found: Step, path: Path) -> None:
    figure, (left, right) = new_figure(2)
    _, L, K = found.kept.shape
    for state, name in enumerate(STATES):
        chosen = found.kept[found.state == state]
        left.plot(range(L), chosen.mean((0, 2)), marker="o", color=f"C{state}", label=name)
        right.plot(range(1, K + 1), chosen.mean((0, 1)), marker="o", color=f"C{state}")
    left.set(xlabel="MoE layer", ylabel="share of routes kept", ylim=(0, 1), title="by layer", xticks=range(L))
    right.set(xlabel="rank of the route", ylim=(0, 1), title="by rank", xticks=range(1, K + 1))
    legend_below(figure, left, columns=3)
    save_figure(figure, path)


def draw_identity(named: Identity, path: Path) -> None:
    figure, (left, right) = new_figure(2)
    names = list(named.recall)[::-1]
    colours = ["C0" if name.startswith("table") else "0.7" for name in names]
    left.barh(names, [named.recall[name].mean() for name in names], color=colours)
    left.set(xlabel="recall", xlim=(0, 1))
    groups = list(_by_occurrence(named.seen))
    for name, values in named.recall.items():
        right.plot(range(len(groups)), [values[chosen].mean() for _, chosen in groups], marker="o", label=name)
    right.set_xticks(range(len(groups)), [f"{low}" if low < 2 else f"{low}+" for low, _ in groups])
    right.set(xlabel="times the token was seen before", ylabel="recall", ylim=(0, 1))
    figure.suptitle("Next routes of a token just written")
    legend_below(figure, right, columns=3)
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trace = open_trace(options.trace)
    found, named = gather(trace), Identity(trace)
    report(found, named)
    draw_confidence(found, options.out / "reuse-confidence.png")
    draw_state(found, options.out / "reuse-state.png")
    draw_identity(named, options.out / "reuse-identity.png")


if __name__ == "__main__":
    main()
