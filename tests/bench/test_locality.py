"""Routing locality: exact on hand-made iterations, and recorded from a real engine."""

import engines
import numpy as np
import pytest

from oled_jax.bench.locality import Iteration, RecordingEngine, measure_locality, summarise_locality


def iteration(routes, *, masked, written, confidence=(1, 1, 1), starts_block=False) -> Iteration:
    return Iteration(
        starts_block=starts_block,
        routes=np.array([routes]),
        masked=np.array(masked, bool),
        written=np.array(written, bool),
        confidence=np.array(confidence, np.float32),
    )


def test_summary_of_known_iterations():
    first = iteration([[0, 1], [2, 3], [4, 5]], masked=[0, 1, 1], written=[0, 1, 0], starts_block=True)
    second = iteration([[0, 1], [2, 9], [8, 9]], masked=[0, 0, 1], written=[0, 0, 1])
    third = iteration([[0, 1], [0, 1], [0, 1]], masked=[1, 1, 1], written=[0, 0, 0], starts_block=True)
    found = summarise_locality([[first, second, third], [first]])
    assert found["iterations"] == 4
    assert found["distinct_experts"] == pytest.approx((6 + 5 + 2 + 6) / 4)
    assert found["adjacent_overlap"] == pytest.approx(3 / 5)
    assert found["boundary_overlap"] == pytest.approx(1.0)
    assert found["kept_routes"] == {"decoded": 1.0, "just_written": 0.5, "masked": 0.0}


def test_kept_routes_by_the_confidence_of_the_pass_before():
    state = {"masked": [0, 1, 1], "written": [0, 0, 0]}
    first = iteration([[0, 1], [2, 3], [4, 5]], **state, confidence=[1, 0.2, 0.35], starts_block=True)
    second = iteration([[0, 1], [2, 9], [4, 5]], **state, confidence=[0.95, 0.1, 0.59])
    third = iteration([[7, 8], [2, 9], [6, 7]], **state)
    found = summarise_locality([[first, second, third]])["kept_by_confidence"]
    assert list(found["masked"]) == ["below 0.3", "0.3 to 0.6", "0.6 to 0.9", "from 0.9"]
    assert found["masked"]["below 0.3"] == {"tokens": 2, "kept": pytest.approx((0.5 + 1.0) / 2)}
    assert found["masked"]["0.3 to 0.6"] == {"tokens": 2, "kept": pytest.approx((1.0 + 0.0) / 2)}
    assert found["masked"]["from 0.9"] == {"tokens": 0, "kept": None}
    assert found["decoded"]["from 0.9"] == {"tokens": 2, "kept": pytest.approx((1.0 + 0.0) / 2)}
    assert {group["tokens"] for group in found["just_written"].values()} == {0}


def test_nothing_recorded_is_none_not_zero():
    assert summarise_locality([])["adjacent_overlap"] is None


def test_a_real_engine_is_recorded_and_answers_as_before(golden):
    config, checkpoint = engines.open_tiny(golden)
    prompts = [[5, 6, 7], [9] * 11]
    want = [engines.run(engines.build(config, checkpoint, "all"), [prompt])[0].output_ids for prompt in prompts]
    recorder = RecordingEngine(engines.build(config, checkpoint, "all"))
    got = [recorder.generate([prompt], engines.GREEDY)[0] for prompt in prompts]
    assert [result.output_ids for result in got] == want
    denoising = sum(count for result in got for kind, count in result.passes.items() if kind == "denoise")
    assert len(recorder.iterations) == denoising
    assert recorder.iterations[0].starts_block
    for found in recorder.iterations:
        assert found.routes.shape == (config.num_moe_layers, 8, config.num_experts_per_tok)
    summary = measure_locality(engines.build(config, checkpoint, "all"), prompts, engines.GREEDY)
    assert summary["iterations"] == denoising
    assert 0 < summary["adjacent_overlap"] <= 1
    counted = sum(group["tokens"] for state in summary["kept_by_confidence"].values() for group in state.values())
    followed = sum(not found.starts_block for found in recorder.iterations)
    assert counted == 8 * followed


def test_a_paging_engine_is_refused(golden):
    config, checkpoint = engines.open_tiny(golden)
    with pytest.raises(RuntimeError, match="every page"):
        RecordingEngine(engines.build(config, checkpoint, "lru", capacity=4))
