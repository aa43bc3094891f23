"""The statistics object: its schema, and that its figures fit together."""

import json
import re
from pathlib import Path

import jax
import jsonschema
import pytest
from statistics_schema import SCHEMA

from oled_jax.config import DecodingConfig
from oled_jax.decoding_options import effective_settings
from oled_jax.errors import UsageError
from oled_jax.loading import CacheOptions, RunShape, load_engine, open_model, plan_run
from oled_jax.report import (
    GROUPS,
    Request,
    cache_line,
    check_json_target,
    request_line,
    statistics_object,
    write_json,
)

DECODING = DecodingConfig(
    mask_id=511, eos_id=-1, gen_length=24, block_length=8, steps=8, threshold=0.3, fold_commits=False
)
PROMPT = list(range(20))
DOCUMENT = Path(__file__).parent.parent / "docs" / "statistics.md"


def run(directory, policy, expert_cache):
    """The statistics object of one small run on the tiny model, and its request."""
    model = open_model(str(directory))
    cache = CacheOptions.parse(policy, expert_cache, None)
    plan = plan_run(model, cache, RunShape.of([len(PROMPT)], DECODING), jax.local_devices()[0])
    engine, _ = load_engine(model, cache, plan)
    (result,) = engine.generate([PROMPT], DECODING)
    request = Request(prompt_tokens=len(PROMPT), result=result, text=None)
    statistics = statistics_object(
        engine, model="m", policy=policy, settings=effective_settings(DECODING), requests=[request]
    )
    return statistics, request


@pytest.fixture(scope="module")
def paged(tiny_model):
    return run(tiny_model, "oled", "6")


@pytest.fixture(scope="module")
def resident(tiny_model):
    return run(tiny_model, "all", None)


def test_matches_the_schema(paged, resident):
    settings = SCHEMA["properties"]["settings"]["properties"]
    for statistics, _ in (paged, resident):
        decoding_only = {name: settings[name] for name in statistics["settings"]}
        schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "settings": {"properties": decoding_only}}}
        jsonschema.validate(statistics, schema)
        assert json.loads(json.dumps(statistics, allow_nan=False)) == statistics


def test_figures_fit_together(paged):
    statistics, _ = paged
    page = 3 * 32 * 64 * 4
    for name in GROUPS:
        cache = statistics[name]
        assert cache["passes"] > 0
        assert cache["misses"] == cache["to_gpu"] + cache["to_cpu"]
        assert cache["bytes_h2d"] == (cache["to_gpu"] + cache["prefetched"]) * page
        activated = cache["hits"] + cache["misses"]
        assert cache["hit_rate"] == cache["hits"] / activated
        assert cache["activation_ratio"] == pytest.approx(activated / (cache["passes"] * 2 * 32))
        assert sum(cache["capacities"]) == 2 * cache["capacity"] == 12
        parts = cache["planning_us"]
        assert parts["total"] == pytest.approx(sum(parts.values()) - parts["total"] - parts["accounting"])
    assert statistics["cache"]["bytes_per_token"] == statistics["cache"]["bytes_h2d"] / 24
    assert statistics["cache_prefill"]["bytes_per_token"] is None
    assert statistics["memory"]["store_bytes"] == 2 * 32 * page
    assert statistics["memory"]["pool_bytes"] == (12 + 32) * page


def test_passes_are_those_of_the_requests(paged):
    statistics, _ = paged
    passes = statistics["requests"][0]["passes"]
    assert statistics["cache"]["passes"] == passes["denoise"] + passes["edit"]
    assert statistics["cache_commit"]["passes"] == passes["commit"]
    assert statistics["requests"][0]["tpot_s"] == pytest.approx(statistics["requests"][0]["decode_s"] / 24)


def test_everything_resident(resident, paged):
    statistics, request = resident
    cache = statistics["cache"]
    assert request.result.output_ids == paged[1].result.output_ids
    assert (cache["capacity"], cache["misses"], cache["bytes_h2d"], cache["hit_rate"]) == (32, 0, 0, 1.0)
    assert cache["effective_transfer_ratio"] is None
    assert statistics["memory"]["store_bytes"] is None


def test_lines_for_people_carry_the_objects_figures(paged):
    statistics, request = paged
    line = cache_line(statistics["cache"], 32)
    assert line.startswith("cache: oled, capacity 6 of 32, hit rate ")
    assert f"utilization {statistics['cache']['utilization']:.1%}" in line
    assert "generated 24 tokens (length)" in request_line(request)
    assert "1 prefill" in request_line(request)


def test_every_field_is_documented():
    named = set(re.findall(r"`(\w+)`", DOCUMENT.read_text(encoding="utf-8")))

    def names(schema):
        for key, value in schema.get("properties", {}).items():
            yield key
            for inner in (value, value.get("items", {}), *value.get("anyOf", ())):
                yield from names(inner)

    assert set(names(SCHEMA)) <= named


def test_json_targets(tmp_path, capsys):
    write_json({"a": 1}, str(tmp_path / "out.json"))
    write_json({"a": 1}, "-")
    assert json.loads((tmp_path / "out.json").read_text()) == json.loads(capsys.readouterr().out) == {"a": 1}
    with pytest.raises(UsageError, match="no directory"):
        check_json_target(str(tmp_path / "none" / "out.json"))
    with pytest.raises(UsageError, match="is a directory"):
        check_json_target(str(tmp_path))
    with pytest.raises(ValueError, match="JSON"):
        write_json({"a": float("nan")}, "-")
