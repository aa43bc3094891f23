"""`python -m oled_jax.profile`, and the profile that `python -m oled_jax.generate` measures, saves and loads."""

import json

import jsonschema
import pytest
from profile_schema import SCHEMA

from oled_jax import generate, loading, profile
from oled_jax.cost import lookup, measure
from oled_jax.cost.profile import profile_from_json
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE

CPU = ["--cpu-experts", "numpy", "--cpu-threads", "1"]


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    short = measure.Budget(transfer_s=0.01, cpu_alone_s=0.05, together_s=0.05)
    monkeypatch.setattr(measure, "FULL", short)
    for name in ("THREADS_S", "FFN_S", "READ_S"):
        monkeypatch.setattr(measure, name, 0.01)


@pytest.fixture
def run(capsys):
    def run(command, *argv: str):
        code = command.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def model(golden):
    return ["--model", golden / "llada2-tiny", "--dtype", "float32"]


@pytest.fixture
def generation(model):
    return [*model, "--prompt-ids", "5,6,7", "--gen-length", "8", "--block-length", "8", "--mask-id", "511",
            "--expert-cache", "4", "--policy", "oled"]  # fmt: skip


def test_the_command_prints_a_table_and_saves_the_profile(run, model, generation, monkeypatch, tmp_path):
    code, out, err = run(profile, *model, *CPU, "--json", tmp_path / "p.json")
    assert code == 0
    assert "transfer of one page (T_H2D)" in out
    assert "expert FFN on the device" in out
    assert "saved for --cpu-experts numpy" in err
    written = json.loads((tmp_path / "p.json").read_text())
    jsonschema.validate(written, SCHEMA)
    assert not profile_from_json(written).quick

    monkeypatch.setattr(lookup, "measure_quick", lambda _: pytest.fail("measured although it was saved"))
    code, _, err = run(generate, *generation, *CPU)
    assert code == 0
    assert "hardware profile, saved" in err
    assert "by python -m oled_jax.profile" in err


def test_standard_output_holds_the_object_alone(run, model):
    code, out, _ = run(profile, *model, *CPU, "--json", "-")
    assert code == 0
    jsonschema.validate(json.loads(out), SCHEMA)


def test_auto_is_saved_under_the_backend_that_it_chose_too(run, model):
    code, out, err = run(profile, *model, "--cpu-threads", "1")
    assert code == 0
    assert "the fastest of those measured" in out
    assert err.count("saved for --cpu-experts") == 2
    assert "saved for --cpu-experts auto" in err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--size", "llada2-mini", "--model", "x"], "not allowed with"),
        (["--size", "huge"], "choose from"),
        (["--model", "no/such/dir/anywhere"], "neither a directory nor a hub id"),
        (["--cpu-threads", "0"], "at least 1"),
        (["--cpu-experts", "off"], "choose from"),
        (["--json", "/none/such/file"], "no directory"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(run, monkeypatch, flags, words):
    monkeypatch.setattr(profile, "measure_full", lambda *_: pytest.fail("something was measured"))
    code, out, err = run(profile, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("oled_jax.profile: error: ")
    assert words in err


def test_generate_measures_once_and_says_so(run, generation, monkeypatch):
    code, first, err = run(generate, *generation, *CPU)
    assert code == 0
    assert "hardware profile, measured in" in err
    assert "numpy with 1 thread" in err
    monkeypatch.setattr(lookup, "measure_quick", lambda _: pytest.fail("measured twice"))
    code, second, err = run(generate, *generation, *CPU)
    assert (code, second) == (0, first)
    assert "by a quick measurement" in err


@pytest.mark.parametrize("flags", [["--cpu-experts", "off"], ["--policy", "oled:dispatch=gpu"], []])
def test_nothing_is_measured_where_every_miss_is_transferred(run, generation, monkeypatch, flags):
    monkeypatch.setattr(lookup, "measure_quick", lambda _: pytest.fail("measured for nothing"))
    code, _, err = run(generate, *generation, *flags)
    assert code == 0
    assert "hardware profile" not in err


def test_policies_get_the_measured_costs(run, generation, monkeypatch):
    seen = []
    make_policy = loading.make_policy

    def record(spec, context):
        seen.append(context.costs)
        return make_policy(spec, context)

    monkeypatch.setattr(loading, "make_policy", record)
    monkeypatch.setattr(lookup, "save_profile", lambda saved: seen.append(saved.costs))
    assert run(generate, *generation, *CPU)[0] == 0
    assert len(seen) == 3
    assert seen[2] == seen[1] != seen[0]
