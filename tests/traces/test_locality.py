"""Locality: exact on passes made by hand, in bounded memory, and over what a real engine recorded."""

import json
import weakref

import engines
import numpy as np
import pytest

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces.files import open_trace
from oled_jax.traces.locality import confidence_groups
from oled_jax.traces.locality_meter import measure_locality
from oled_jax.traces.trace import COSINE_GAPS, MemoryTrace, TraceHeader, TracePass

T = 3
HEADER = TraceHeader(
    source="synthetic", model="made by hand", num_layers=1, num_experts=16, top_k=2, hidden_size=8,
    moe_intermediate_size=4, dtype="bfloat16", block_length=T,
)  # fmt: skip
PAGE_BYTES, EXPERT_FLOPS = 3 * 8 * 4 * 2, 6 * 8 * 4


def made_pass(
    *rows,
    masked=(1, 1, 1),
    written=(0, 0, 0),
    confidence=(1, 1, 1),
    kind=PassKind.DENOISE,
    start=0,
    requests=(0,),
    active=None,
    cosine=None,
):
    """A pass of one layer. rows: for every row of the batch, the experts of its T tokens; flags are for all rows."""
    N, B = len(rows) * T, len(rows)
    masked, written = (np.resize(np.array(flags, bool), N) for flags in (masked, written))
    confidence = np.resize(np.array(confidence, np.float32), N)
    tokens = np.ones(N, bool) if active is None else np.repeat(np.array(active, bool), T)
    ids = np.zeros(N, np.int32)
    return TracePass(
        request_ids=np.array(requests, np.int32),
        block_starts=np.full(B, start, np.int32),
        info=PassInfo(kind=kind, token_ids=ids, masked=masked, token_mask=tokens, confidence=confidence),
        expert_ids=np.array(rows, np.uint8).reshape(1, N, 2),
        gates=np.full((1, N, 2), 0.5, np.float32),
        outcome=IterationOutcome(kind=kind, token_ids=ids, written=written, masked=masked, confidence=confidence),
        cosine=cosine,
    )


def measure(*passes, header=HEADER):
    return measure_locality(MemoryTrace(header, passes))


def test_overlap_and_kept_routes_of_known_iterations():
    first = made_pass([[0, 1], [2, 3], [4, 5]], masked=[0, 1, 1], written=[0, 1, 0])
    second = made_pass([[0, 1], [2, 9], [8, 9]], masked=[0, 0, 1], written=[0, 0, 1])
    commit = made_pass([[6, 7], [6, 7], [6, 7]], masked=[0, 0, 0], kind=PassKind.COMMIT)
    third = made_pass([[0, 1], [0, 1], [0, 3]], start=T)
    found = measure(first, second, commit, third)
    assert found.iterations == 3
    assert found.distinct == pytest.approx([(6 + 5 + 3) / 3])
    assert found.overlap[0] == pytest.approx([3 / 5])
    assert found.boundary == pytest.approx([2 / 3])
    assert found.kept_by_state == {"decoded": 1.0, "just_written": 0.5, "masked": 0.0}
    assert found.activation_ratio == pytest.approx([14 / 3 / 16])


def test_overlap_against_the_gap_stays_in_the_block_and_the_request():
    routes = [[[0, 1]] * T, [[0, 2]] * T, [[0, 1]] * T, [[0, 3]] * T]
    found = measure(*(made_pass(rows) for rows in routes), made_pass(routes[0], requests=[1]))
    assert found.overlap[:4, 0] == pytest.approx([1 / 2, (1 + 1 / 2) / 2, 1 / 2, np.nan], nan_ok=True)
    assert np.isnan(found.boundary).all()


def test_the_window_reaches_eight_iterations_back():
    rows = [[[number, 15]] * T for number in (0, *range(1, 8), 0, 9)]
    overlap = measure(*map(made_pass, rows)).overlap[:, 0]
    assert overlap.shape == (COSINE_GAPS,)
    assert overlap == pytest.approx([1 / 2] * 7 + [(1 + 1 / 2) / 2])


def test_kept_routes_by_the_confidence_of_the_pass_before():
    state = {"masked": [0, 1, 1], "written": [0, 0, 0]}
    first = made_pass([[0, 1], [2, 3], [4, 5]], **state, confidence=[1, 0.2, 0.35])
    second = made_pass([[0, 1], [2, 9], [4, 5]], **state, confidence=[0.95, 0.1, 0.6])
    third = made_pass([[7, 8], [2, 9], [6, 7]], **state)
    groups = measure(first, second, third).as_json()["kept_by_confidence"]
    assert list(groups["masked"]) == confidence_groups() == ["below 0.3", "0.3 to 0.6", "0.6 to 0.9", "from 0.9"]
    assert groups["masked"]["below 0.3"] == {"tokens": 2, "kept": pytest.approx((0.5 + 1.0) / 2)}
    assert groups["masked"]["0.3 to 0.6"] == {"tokens": 1, "kept": 1.0}
    assert groups["masked"]["0.6 to 0.9"] == {"tokens": 1, "kept": 0.0}  # a group holds its lower bound
    assert groups["masked"]["from 0.9"] == {"tokens": 0, "kept": None}
    assert groups["decoded"]["from 0.9"] == {"tokens": 2, "kept": pytest.approx((1.0 + 0.0) / 2)}
    assert {group["tokens"] for group in groups["just_written"].values()} == {0}


def test_an_edited_token_is_one_that_was_just_written():
    edit = made_pass([[0, 1]] * T, masked=[0, 0, 0], written=[1, 0, 0], kind=PassKind.EDIT)
    after = made_pass([[0, 9], [0, 1], [0, 1]], masked=[0, 0, 0], kind=PassKind.EDIT)
    assert measure(edit, after).kept_by_state == {
        "decoded": 1.0, "just_written": 0.5, "masked": pytest.approx(np.nan, nan_ok=True),
    }  # fmt: skip


def test_correlation_of_confidence_and_kept_routes():
    before = made_pass([[0, 1], [2, 3], [4, 5]], confidence=[0.0, 0.5, 1.0])
    rising = made_pass([[8, 9], [2, 9], [4, 5]], confidence=[0.0, 0.5, 1.0])
    found = measure(before, rising)
    assert found.correlation["masked"] == found.correlation["unwritten"] == pytest.approx(1.0)
    assert np.isnan(found.correlation["decoded"])
    falling = made_pass([[0, 1], [2, 9], [8, 9]])
    assert measure(before, falling).correlation["all"] == pytest.approx(-1.0)
    assert np.isnan(measure(before, before).correlation["all"])  # all routes kept: no variation


def test_rows_of_a_batch_are_sequences_of_their_own():
    ours, others = [[0, 1]] * T, [[2, 3]] * T
    first = made_pass(ours, others, requests=[4, 5])
    second = made_pass(others, ours, requests=[4, 5])
    found = measure(first, second)
    assert found.overlap[0] == pytest.approx([0.0])  # though the passes activate the same experts
    assert found.distinct == pytest.approx([4.0])
    assert found.iterations == 2


def test_a_finished_row_and_a_row_that_commits_are_no_iterations():
    ours, others = [[0, 1]] * T, [[2, 3]] * T
    masks = {"masked": [1, 1, 1, 0, 0, 0], "requests": [0, 1]}
    committing = measure(made_pass(ours, others, **masks), made_pass(ours, ours, **masks))
    assert committing.overlap[0] == pytest.approx([1.0])  # the first row's alone
    assert committing.tokens.sum() == T
    assert committing.distinct == pytest.approx([(4 + 2) / 2])  # the pass activates for both
    finished = made_pass(ours, others, requests=[0, 1], active=[1, 0])
    found = measure(finished, finished)
    assert found.distinct == pytest.approx([2.0])
    assert found.tokens.sum() == T


def test_cosines_are_means_over_what_was_recorded():
    cosine = np.full((1, COSINE_GAPS), np.nan, np.float32)
    one, two = cosine.copy(), cosine.copy()
    one[0, 0], two[0, :2] = 0.5, (0.9, 0.25)
    rows = [[0, 1]] * T
    found = measure(made_pass(rows, cosine=cosine), made_pass(rows, cosine=one), made_pass(rows, cosine=two))
    assert found.cosine[:3, 0] == pytest.approx([0.7, 0.25, np.nan], nan_ok=True)


def test_cost_of_block_decoding_and_of_one_token_at_a_time():
    prefill = made_pass([[7, 8]] * T, masked=[0, 0, 0], kind=PassKind.PREFILL)
    first = made_pass([[0, 1], [2, 3], [4, 5]], masked=[0, 1, 1], written=[0, 1, 0])
    second = made_pass([[0, 1]] * T, masked=[0, 0, 1], written=[0, 0, 1])
    commit = made_pass([[0, 1], [0, 1], [0, 9]], masked=[0, 0, 0], kind=PassKind.COMMIT)
    found = measure(prefill, first, second, commit)
    assert found.generated == 2
    assert found.cost.pass_bytes == pytest.approx((6 + 2) / 2 * PAGE_BYTES)
    assert found.cost.token_bytes == pytest.approx((6 + 2 + 3) / 2 * PAGE_BYTES)
    assert found.cost.token_flops == pytest.approx(3 * T * 2 * EXPERT_FLOPS / 2)
    assert found.cost.single_bytes == 2 * PAGE_BYTES
    assert found.cost.single_flops == 2 * EXPERT_FLOPS


def test_nothing_measured_is_none_not_zero():
    found = measure(made_pass([[0, 1]] * T, masked=[0, 0, 0], kind=PassKind.PREFILL)).as_json()
    text = json.dumps(found, allow_nan=False)
    for name in ("distinct_experts", "adjacent_overlap", "boundary_overlap", "layer_heterogeneity"):
        assert found[name] is None
    assert found["cost"]["token_bytes"] is None
    assert json.loads(text) == found


def test_few_passes_are_in_memory_at_a_time():
    routes = []

    class Stream:
        header = HEADER

        def __len__(self):
            return 100

        def __iter__(self):
            for number in range(100):
                made = made_pass([[number % 7, 15]] * T, start=number // 4 * T)
                routes.append(weakref.ref(made.expert_ids.base))
                yield made
                del made
                assert sum(array() is not None for array in routes) <= 3

    assert measure_locality(Stream()).iterations == 100


def test_what_a_real_engine_recorded(golden, tmp_path):
    config, checkpoint = engines.open_tiny(golden)
    engine = engines.build(config, checkpoint, "all")
    with engine.record(tmp_path / "trace", engines.GREEDY):
        results = [engine.generate([prompt], engines.GREEDY)[0] for prompt in ([5, 6, 7], [9] * 5)]
    found = measure_locality(open_trace(tmp_path / "trace"))
    for kind in PassKind:
        assert found.passes[kind] == sum(result.passes[kind] for result in results)
    assert found.generated >= sum(len(result.output_ids) for result in results)
    blocks = found.passes[PassKind.COMMIT] + len(results)
    assert found.tokens.sum() == 8 * (found.iterations - blocks)
    assert 0 < found.overlap[0].min() <= found.overlap[0].max() <= 1
