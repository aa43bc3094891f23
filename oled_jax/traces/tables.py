"""The locality of traces side by side, and a synthetic trace's targets, as text for a terminal."""

from collections.abc import Callable, Iterator, Sequence

from oled_jax.passes import PassKind
from oled_jax.traces.locality import GAPS, STATES, Locality, confidence_groups
from oled_jax.traces.synthetic import Outcome

Row = Sequence[str]
STATE_NAMES = dict(zip(STATES, ("decoded earlier", "still masked", "just written"), strict=True))


def aligned(rows: Sequence[Row]) -> str:
    """Columns of equal width: the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def locality_table(names: Sequence[str], found: Sequence[Locality]) -> str:
    """Every figure of docs/locality.md, a column for each trace."""
    blocks = (_traces, _overlaps, _cosines, _stability, _costs, _layers)
    empty = ("", *("" for _ in names))
    rows = [("", *names), *(row for block in blocks for row in (empty, *block(found)))]
    return aligned(rows)


def targets_table(outcomes: Sequence[Outcome]) -> str:
    """What a synthetic trace should show and what it shows."""
    rows = [(each.name.replace("_", " "), _plain(each.wanted), _plain(each.achieved)) for each in outcomes]
    return aligned([("target", "wanted", "achieved"), *rows])


def _traces(found: Sequence[Locality]) -> Iterator[Row]:
    yield _row("source", found, _source)
    yield _row("MoE layers x experts, top-k", found, _shape)
    yield _row("block length", found, _block_length)
    for kind in PassKind:
        yield (f"{kind.value} passes", *(str(each.passes[kind]) for each in found))
    yield _row("generated tokens", found, _generated)
    yield ("distinct experts per iteration", *(_plain(each.distinct.mean()) for each in found))
    yield ("activation ratio", *(_plain(each.activation_ratio.mean()) for each in found))
    yield ("    its spread between layers", *(_plain(each.heterogeneity) for each in found))


def _overlaps(found: Sequence[Locality]) -> Iterator[Row]:
    yield _heading("expert overlap", found)
    for gap in range(GAPS):
        yield (_apart(gap + 1), *(_plain(each.overlap[gap].mean()) for each in found))
    yield ("    across a block boundary", *(_plain(each.boundary.mean()) for each in found))


def _cosines(found: Sequence[Locality]) -> Iterator[Row]:
    yield _heading("cosine of layer inputs", found)
    for gap in range(GAPS):
        yield (_apart(gap + 1), *(_plain(each.cosine[gap].mean()) for each in found))


def _stability(found: Sequence[Locality]) -> Iterator[Row]:
    yield _heading("kept routes, by token state and confidence (tokens)", found)
    for s, state in enumerate(STATES):
        yield (f"    {STATE_NAMES[state]}", *(_kept(each.kept_by_state[state], each.tokens[s].sum()) for each in found))
        for g, group in enumerate(confidence_groups()):
            yield (f"        {group}", *(_kept(each.kept[s, g], each.tokens[s, g]) for each in found))
    yield _heading("correlation of confidence and kept routes", found)
    for name in found[0].correlation:
        label = {**STATE_NAMES, "unwritten": "the first two", "all": "all"}[name]
        yield (f"    {label}", *(_plain(each.correlation[name]) for each in found))


def _costs(found: Sequence[Locality]) -> Iterator[Row]:
    costs = [each.cost for each in found]
    yield _heading("experts activated by a pass, MB", found)
    yield ("    block decoding", *(_millions(cost.pass_bytes) for cost in costs))
    yield ("    one token at a time", *(_millions(cost.single_bytes) for cost in costs))
    yield _heading("experts activated per generated token, MB", found)
    yield ("    block decoding", *(_millions(cost.token_bytes) for cost in costs))
    yield ("    one token at a time", *(_millions(cost.single_bytes) for cost in costs))
    yield _heading("routed experts per generated token, MFLOP", found)
    yield ("    block decoding", *(_millions(cost.token_flops) for cost in costs))
    yield ("    one token at a time", *(_millions(cost.single_flops) for cost in costs))


def _layers(found: Sequence[Locality]) -> Iterator[Row]:
    yield _heading("activation ratio by MoE layer", found)
    for layer in range(max(each.header.num_layers for each in found)):
        ratios = [each.activation_ratio for each in found]
        yield (f"    {layer}", *(_plain(ratio[layer]) if layer < len(ratio) else "" for ratio in ratios))


def _apart(gap: int) -> str:
    return f"    {gap} iteration{'s' if gap > 1 else ''} apart"


def _heading(text: str, found: Sequence[Locality]) -> Row:
    return (text, *("" for _ in found))


def _row(label: str, found: Sequence[Locality], cell: Callable[[Locality], str]) -> Row:
    return (label, *map(cell, found))


def _source(found: Locality) -> str:
    return found.header.source


def _shape(found: Locality) -> str:
    return f"{found.header.num_layers} x {found.header.num_experts}, top-{found.header.top_k}"


def _block_length(found: Locality) -> str:
    return str(found.header.block_length)


def _generated(found: Locality) -> str:
    return str(found.generated)


def _kept(share: float, tokens: int) -> str:
    return f"{_plain(share)} ({tokens})"


def _plain(value: float) -> str:
    return "-" if value != value else f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _millions(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:.3g}" if value < 1e9 else f"{value / 1e6:.0f}"
