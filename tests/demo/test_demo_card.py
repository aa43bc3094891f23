"""The model card: no folder of the machine that trained, scores with and without paging side by side, locality."""

import copy
import json

import pytest

from oled_jax.demo.shipped import demo_model_dir
from oled_jax.demo.training import sizes
from oled_jax.demo.training.card import model_card, without_paths
from oled_jax.traces.locality import STATES, confidence_groups

RECORD = {
    "date": "2026-01-02", "command": ["python scripts/train_demo.py --state /root/a --minutes 9"], "steps": 10,
    "tokens": 2e6, "answers": 1e6, "seconds": 60.0, "device": "a device",
}  # fmt: skip


def score(items, accuracy):
    return {"items": items, "accuracy": accuracy, "tokens_per_pass": 2.5}


def bench(policy, capacity, misses):
    return {
        "machine": {"platform": "cpu", "cpu_cores": 2, "jax": "0.0"},
        "date": "2026-01-03",
        "settings": {"dtype": "bfloat16", "batch": 16},
        "cache": {"policy": policy, "capacity": capacity, "misses": misses, "hit_rate": 0.25, "bytes_per_token": 2e6},
        "scores": {"math": score(4, 0.75), "qa": score(4, 1.0), "all": score(8, 0.875)},
        "answers": [{"text": "a"}, {"text": "b"}],
    }


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("python scripts/train_demo.py --minutes 9.1 --state /root/out/demo --full-state /tmp/full",
         "python scripts/train_demo.py --minutes 9.1 --state STATE_DIR --full-state FULL_STATE_DIR"),
        ("python /home/a/scripts/train_demo.py --resume=../old --state here --moments",
         "python scripts/train_demo.py --resume=RESUME_DIR --state here --moments"),
        ("python scripts/train_demo.py --scores '/a b/one.json' /c/two.json",
         "python scripts/train_demo.py --scores SCORES_DIR SCORES_DIR"),
    ],
)  # fmt: skip
def test_paths_of_a_command_become_placeholders(command, shown):
    assert without_paths(command) == shown


def test_scores_with_and_without_paging_stand_side_by_side():
    benches = [bench("all", 128.0, 0), bench("oled", 32.0, 5)]
    benches[1]["scores"]["math"] = score(4, 0.5)
    benches[1]["answers"][1] = {"text": "c"}
    card = model_card(sizes.DEMO, 13_300_000, record={**RECORD, "scores": {"all": score(6, 1.0)}}, benches=benches)
    assert "| math | 4 | 75.0% | 2.50 | 50.0% | 2.50 |" in card
    assert "`python -m oled_jax.bench accuracy --limit 4 --policy all`, cpu platform, 2 cores" in card
    assert "--policy oled --expert-cache 32`" in card
    assert card.count("hit rate 25.0%") == 1
    assert "1 of 2 answers are the same text" in card
    assert "on a device, 2026-01-02: 100.0% of 6" in card
    assert "/root" not in card


def test_locality_is_compared_only_as_far_as_the_figures_go():
    groups = {name: {"tokens": 3, "kept": 0.5} for name in confidence_groups()}
    groups["below 0.3"] = {"tokens": 0, "kept": None}
    locality = {
        "iterations": 9, "distinct_experts": 40.04, "adjacent_overlap": 0.9, "boundary_overlap": 0.5,
        "kept_routes": dict.fromkeys(STATES, 0.7), "kept_by_confidence": dict.fromkeys(STATES, groups),
    }  # fmt: skip
    card = model_card(sizes.DEMO, 1, record={**RECORD, "locality": locality})
    assert "| overlap of adjacent passes over a block | 0.90 | 0.79 |" in card
    assert "| 0.3 to 0.6 | 0.50 (3) | 0.50 (3) | 0.50 (3) |" in card
    assert "not measured (0)" in card
    assert "both overlaps are higher" in card
    lower = copy.deepcopy(locality) | {"boundary_overlap": 0.2}
    assert "both overlaps are higher" not in model_card(sizes.DEMO, 1, record={**RECORD, "locality": lower})


def test_the_shipped_card_describes_the_shipped_model():
    card = (demo_model_dir() / "README.md").read_text(encoding="utf-8")
    config = json.loads((demo_model_dir() / "config.json").read_text(encoding="utf-8"))
    assert f"{config['num_experts']} of width {config['moe_intermediate_size']}" in card
    for heading in ("Model", "Data", "Training", "Scores", "Routing locality"):
        assert f"## {heading}\n" in card
    assert "/root" not in card
    assert "/tmp" not in card
