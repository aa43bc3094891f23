"""What confidence, state and token identity say about which routes a token keeps: the figures and plots of docs/reuse.md.

    python scripts/plot_reuse.py TRACE --out docs/images

TRACE is a recorded trace of one request at a time (scripts/record_demo_traces.py). Prints the figures, and draws
reuse-confidence.png, reuse-state.png and reuse-identity.png.
"""

import argparse
import dataclasses
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
    return np.array_equal(before.block_starts, step.block_starts) and np.array_equal(
        before.request_ids, step.request_ids
    )


def gather(trace: Trace) -> Step:
    """All steps as one."""
    parts = list(steps(trace))
    return Step(**{f.name: np.concatenate([getattr(part, f.name) for part in parts]) for f in dataclasses.fields(Step)})


def identity(trace: Trace) -> dict[str, np.ndarray]:
    """Recall of the first routes of tokens just written, [layers] or by earlier occurrences [groups].

    A predictor of width w names w experts; its recall is the share of a token's K routes among them. The table learns
    on the way and is asked before it is told.
    """
    header = trace.header
    L, E, K = header.num_layers, header.num_experts, header.top_k
    table = TokenTable(num_layers=L, num_experts=E, top_k=K, tokens=1 << 14)
    popular = np.zeros((L, E))
    found: dict[str, list[np.ndarray]] = {
        "current": [],
        **{f"{n} top-{w * K}": [] for w in WIDTHS for n in ("table", "popular")},
    }
    seen: list[int] = []
    before: TracePass | None = None
    for step in trace:
        if step.info.kind is PassKind.PREFILL:
            real = step.info.token_mask
            table.learn(step.info.token_ids[real], step.expert_ids[:, real])
        elif before is not None and _same_block(before, step):
            written = np.flatnonzero(before.outcome.written & (before.outcome.token_ids == step.info.token_ids))
            for position in written:
                routes, token = step.expert_ids[:, position], int(step.info.token_ids[position])
                place = table._place.get(token)
                seen.append(0 if place is None else int(table.count[place]))
                weights = table.weights[place] if place is not None else np.zeros((L, 2 * K))
                experts = table.experts[place] if place is not None else np.full((L, 2 * K), -1)
                order = np.argsort(-weights, axis=1, kind="stable")
                ranked = np.take_along_axis(np.where(weights > 0, experts, -1), order, 1)
                best = np.argsort(-popular, axis=1, kind="stable")
                for w in WIDTHS:
                    found[f"table top-{w * K}"].append(_recall(ranked[:, : w * K], routes))
                    found[f"popular top-{w * K}"].append(_recall(best[:, : w * K], routes))
                found["current"].append(_recall(before.expert_ids[:, position], routes))
            table.learn(step.info.token_ids[written], step.expert_ids[:, written])
            for position in written:
                np.put_along_axis(
                    popular,
                    step.expert_ids[:, position],
                    np.take_along_axis(popular, step.expert_ids[:, position], 1) + 1,
                    1,
                )
        before = step if step.info.kind in (PassKind.DENOISE, PassKind.EDIT, PassKind.COMMIT) else None
    return {name: np.array(values) for name, values in found.items()} | {"seen": np.array(seen)}


def _recall(predicted: np.ndarray, routes: np.ndarray) -> np.ndarray:
    """Share of each layer's routes [L, K] among the predicted experts [L, w]."""
    return (routes[:, :, None] == predicted[:, None, :]).any(2).mean(1)


def report(found: Step, named: dict[str, np.ndarray]) -> None:
    share = found.kept.mean((1, 2))
    for state, name in enumerate(STATES):
        chosen = found.state == state
        corr = np.corrcoef(found.confidence[chosen], share[chosen])[0, 1]
        print(
            f"{name}: {chosen.sum()} tokens, keep {share[chosen].mean():.3f}, correlation with confidence {corr:+.2f}"
        )
        print(
            "   by rank",
            np.round(found.kept[chosen].mean((0, 1)), 2),
            " by layer",
            np.round(found.kept[chosen].mean((0, 2)), 2),
        )
        print(
            "   by confidence",
            [f"{share[chosen & g].mean():.2f} ({(chosen & g).sum()})" for g in _groups(found.confidence)],
        )
    print("all tokens: correlation", f"{np.corrcoef(found.confidence, share)[0, 1]:+.2f}")
    masked = found.state != 0
    for label, confidence in (("this pass's", found.confidence), ("the pass before's", found.confidence_before)):
        print(
            f"written, of masked tokens, by {label} confidence",
            [f"{(found.state[masked & g] == 2).mean():.2f}" for g in _groups(confidence)],
        )
    for name, values in named.items():
        if name != "seen":
            print(f"{name}: recall {values.mean():.3f}, by layer {np.round(values.mean(0), 2)}")
    for low, chosen in _by_occurrence(named["seen"]):
        print(
            f"  seen {low}+: {chosen.sum()} tokens,",
            ", ".join(f"{n} {v[chosen].mean():.2f}" for n, v in named.items() if n != "seen"),
        )


def _groups(confidence: np.ndarray) -> Iterator[np.ndarray]:
    for low, high in zip(EDGES[:-1], EDGES[1:], strict=True):
        yield (confidence >= low) & (confidence < high)


def _by_occurrence(seen: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    for low, high in zip(OCCURRENCES, (*OCCURRENCES[1:], np.inf), strict=True):
        yield low, (seen >= low) & (seen < high)


def draw(found: Step, named: dict[str, np.ndarray], top_k: int, directory: Path) -> None:
    share = found.kept.mean((1, 2))
    centres = (EDGES[:-1] + EDGES[1:]) / 2
    figure, (left, right) = new_figure(2)
    for state, name in enumerate(STATES):
        values = [
            share[(found.state == state) & g].mean() if ((found.state == state) & g).sum() > 20 else np.nan
            for g in _groups(found.confidence)
        ]
        left.plot(centres, values, marker="o", color=f"C{state}", label=name)
    left.plot(
        centres, [share[g].mean() for g in _groups(found.confidence)], color="0.4", linestyle="--", label="all tokens"
    )
    left.set(xlabel="confidence", ylabel="share of routes kept", ylim=(0, 1), title="kept by the next pass")
    masked = found.state != 0
    for label, confidence in (("this pass", found.confidence), ("the pass before", found.confidence_before)):
        right.plot(
            centres,
            [(found.state[masked & g] == 2).mean() if (masked & g).sum() > 20 else np.nan for g in _groups(confidence)],
            marker="s",
            label=f"confidence of {label}",
        )
    right.set(xlabel="confidence", ylabel="share of masked tokens", ylim=(0, 1), title="written in this pass")
    right.legend(frameon=False, fontsize="small")
    legend_below(figure, left, columns=4)
    save_figure(figure, directory / "reuse-confidence.png")

    figure, (left, right) = new_figure(2)
    for state, name in enumerate(STATES):
        chosen = found.kept[found.state == state]
        left.plot(range(chosen.shape[1]), chosen.mean((0, 2)), marker="o", color=f"C{state}", label=name)
        right.plot(range(1, top_k + 1), chosen.mean((0, 1)), marker="o", color=f"C{state}")
    left.set(xlabel="MoE layer", ylabel="share of routes kept", ylim=(0, 1), title="by layer")
    right.set(xlabel="rank of the route", ylim=(0, 1), title="by rank")
    for axes, ticks in ((left, range(found.kept.shape[1])), (right, range(1, top_k + 1))):
        axes.set_xticks(list(ticks))
    legend_below(figure, left, columns=3)
    save_figure(figure, directory / "reuse-state.png")

    figure, (left, right) = new_figure(2)
    names = [name for name in named if name != "seen"]
    left.barh(
        names[::-1],
        [named[name].mean() for name in names[::-1]],
        color=["C0" if "table" in n else "0.7" for n in names[::-1]],
    )
    left.set(xlabel="recall", xlim=(0, 1), title="next routes of a token just written")
    groups = list(_by_occurrence(named["seen"]))
    for name in names:
        right.plot(range(len(groups)), [named[name][chosen].mean() for _, chosen in groups], marker="o", label=name)
    right.set_xticks(range(len(groups)), [f"{low}" if low < 2 else f"{low}+" for low, _ in groups])
    right.set(xlabel="times the token was seen before", ylim=(0, 1), title="by what the table has seen")
    legend_below(figure, right, columns=3)
    save_figure(figure, directory / "reuse-identity.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    trace = open_trace(options.trace)
    found, named = gather(trace), identity(trace)
    report(found, named)
    draw(found, named, trace.header.top_k, options.out)


if __name__ == "__main__":
    main()
