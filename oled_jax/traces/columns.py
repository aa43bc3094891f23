"""A chunk of passes as named arrays, and back: the columns of the file format (docs/traces.md).

Passes differ in rows, tokens and requests. So what belongs to those lies end to end, and offsets say where a pass's
share begins.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from oled_jax.folding import find_folds
from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces.trace import COSINE_GAPS, TraceHeader, TracePass

Columns = dict[str, np.ndarray]

KINDS = tuple(kind.value for kind in PassKind)  # column "kind" counts in this order; the file's header repeats it
DTYPES: Mapping[str, type] = {
    "kind": np.uint8, "new_blocks": np.int32,
    "row_offsets": np.int64, "token_offsets": np.int64, "request_offsets": np.int64,
    "prompt_offsets": np.int64, "prompt_ids": np.int32,
    "request_ids": np.int32, "block_starts": np.int32,
    "token_ids": np.int32, "token_mask": np.bool_, "masked": np.bool_, "confidence": np.float32,
    "token_ids_after": np.int32, "written": np.bool_, "masked_before": np.bool_, "confidence_after": np.float32,
    "gates": np.float32,
}  # fmt: skip
EXPERT_IDS, COSINE = "expert_ids", "cosine"  # in the smallest unsigned type; only where it was recorded
NOT_PER_TOKEN = frozenset(("prompt_ids", "request_ids", "block_starts"))  # of what `_values` gives
REQUIRED = frozenset((*DTYPES, EXPERT_IDS))


def encode(passes: Sequence[TracePass], num_experts: int) -> Columns:
    """The columns of at least one pass.

    Raises:
      ValueError: a pass contradicts itself, or some passes have a cosine and others none.
      TypeError: numbers that would have to be rounded.
    """
    for each in passes:
        _check(each)
    lists = [_values(each) for each in passes]
    columns = {name: np.concatenate([values[name] for values in lists]) for name in lists[0]}
    columns |= {
        "kind": np.array([KINDS.index(each.info.kind) for each in passes]),
        "new_blocks": np.array([each.new_blocks for each in passes]),
        "row_offsets": _offsets(each.request_ids.size for each in passes),
        "token_offsets": _offsets(each.info.token_mask.size for each in passes),
        "request_offsets": _offsets(len(each.prompts) for each in passes),
        "prompt_offsets": _offsets(len(prompt) for each in passes for prompt in each.prompts),
        "gates": np.concatenate([each.gates for each in passes], axis=1),
    }
    columns = {name: _cast(name, values, np.dtype(DTYPES[name])) for name, values in columns.items()}
    ids = np.concatenate([each.expert_ids for each in passes], axis=1)
    columns[EXPERT_IDS] = ids.astype(np.min_scalar_type(num_experts - 1))
    cosines = [each.cosine for each in passes if each.cosine is not None]
    if cosines:
        if len(cosines) < len(passes):
            raise ValueError("either every pass of a trace has a cosine or none has")
        columns[COSINE] = _cast(COSINE, np.stack(cosines), np.dtype(np.float32))
    return columns


def decode(columns: Columns, header: TraceHeader, kinds: Sequence[str]) -> Iterator[TracePass]:
    """The passes of a chunk, as views of its columns; expert ids as int32, so that any arithmetic may follow.

    Args:
      kinds: what the numbers in "kind" mean.

    Raises:
      ValueError: the columns contradict each other or the header.
    """
    _check_columns(columns, header)
    columns = columns | {EXPERT_IDS: columns[EXPERT_IDS].astype(np.int32)}
    prompts = np.split(columns["prompt_ids"], columns["prompt_offsets"][1:-1]) if columns["request_offsets"][-1] else []
    shares = zip(*(_slices(columns[name]) for name in ("row_offsets", "token_offsets", "request_offsets")), strict=True)
    for number, (kind, (rows, tokens, requests)) in enumerate(zip(columns["kind"].tolist(), shares, strict=True)):
        named = PassKind(kinds[kind])
        yield TracePass(
            prompts=tuple(prompts[requests]),
            new_blocks=int(columns["new_blocks"][number]),
            request_ids=columns["request_ids"][rows],
            block_starts=columns["block_starts"][rows],
            info=PassInfo(
                kind=named,
                token_ids=columns["token_ids"][tokens],
                masked=columns["masked"][tokens],
                token_mask=columns["token_mask"][tokens],
                confidence=columns["confidence"][tokens],
                folds=find_folds(header.block_length, columns["token_mask"][tokens], rows.stop - rows.start, named),
            ),
            expert_ids=columns[EXPERT_IDS][:, tokens],
            gates=columns["gates"][:, tokens],
            outcome=IterationOutcome(
                kind=named,
                token_ids=columns["token_ids_after"][tokens],
                written=columns["written"][tokens],
                masked=columns["masked_before"][tokens],
                confidence=columns["confidence_after"][tokens],
            ),
            cosine=columns[COSINE][number] if COSINE in columns else None,
        )


def _values(each: TracePass) -> Columns:
    """What is concatenated as it is: per row, per token, and the prompts."""
    info, outcome = each.info, each.outcome
    return {
        "prompt_ids": np.concatenate([np.empty(0, np.int32), *each.prompts]),
        "request_ids": each.request_ids,
        "block_starts": each.block_starts,
        "token_ids": info.token_ids,
        "token_mask": info.token_mask,
        "masked": info.masked,
        "confidence": info.confidence,
        "token_ids_after": outcome.token_ids,
        "written": outcome.written,
        "masked_before": outcome.masked,
        "confidence_after": outcome.confidence,
    }


def _slices(offsets: np.ndarray) -> list[slice]:
    """The share of each pass."""
    return [slice(begin, end) for begin, end in itertools.pairwise(offsets.tolist())]


def _offsets(sizes: Iterable[int]) -> np.ndarray:
    return np.cumsum([0, *sizes])


def _cast(name: str, values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Integers may be of any width; a rounded float would make a replay decide otherwise."""
    if dtype.kind == "f" and values.dtype != dtype:
        raise TypeError(f"{name} is {values.dtype}, a trace keeps {dtype}")
    return values.astype(dtype, casting="unsafe" if dtype.kind in "iu" else "safe", copy=False)


def _check(each: TracePass) -> None:
    N, B = each.info.token_mask.size, each.request_ids.size
    values = _values(each)
    for name in values.keys() - NOT_PER_TOKEN:
        if values[name].size != N:
            raise ValueError(f"a pass over {N} tokens has {values[name].size} values of {name}")
    if each.block_starts.size != B or B == 0 or N % B:
        raise ValueError(f"a pass over {N} tokens has {B} request ids and {each.block_starts.size} block starts")
    if each.expert_ids.shape != each.gates.shape or each.expert_ids.shape[1] != N:
        raise ValueError(f"a pass over {N} tokens has routes {each.expert_ids.shape} and gates {each.gates.shape}")
    if each.outcome.kind is not each.info.kind:
        raise ValueError(f"a pass begins as {each.info.kind} and ends as {each.outcome.kind}")


def _check_columns(columns: Columns, header: TraceHeader) -> None:
    P, M = columns["kind"].size, columns["token_ids"].size
    routes = (header.num_layers, M, header.top_k)
    if columns[EXPERT_IDS].shape != routes or columns["gates"].shape != routes:
        raise ValueError(f"its routes are not {routes}")
    if M and columns[EXPERT_IDS].max() >= header.num_experts:
        raise ValueError(f"it routes to expert {columns[EXPERT_IDS].max()} of {header.num_experts}")
    if COSINE in columns and columns[COSINE].shape != (P, header.num_layers, COSINE_GAPS):
        raise ValueError("its cosines have another shape")
    sizes = {"row_offsets": columns["request_ids"].size, "token_offsets": M}
    sizes["request_offsets"] = columns["prompt_offsets"].size - 1
    for name, size in sizes.items():
        if columns[name].size != P + 1 or columns[name][-1] != size:
            raise ValueError(f"{name} does not fit the other columns")
