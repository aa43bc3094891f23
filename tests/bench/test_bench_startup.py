"""`bench startup` with a tiny model in the place of the published one."""

import json
import subprocess
from types import SimpleNamespace

import pytest
from tiny_model import RAW_CONFIG

from oled_jax.bench import startup
from oled_jax.errors import UsageError
from oled_jax.machine import process_age_s


@pytest.fixture
def tiny_size(monkeypatch):
    monkeypatch.setattr(startup, "prepare_runtime", lambda store_bytes: None)
    monkeypatch.setitem(startup.PUBLISHED, "llada2-mini", RAW_CONFIG | {"vocab_size": 157_184})


def test_steps_add_up_to_the_age_of_the_process(tiny_size, tmp_path):
    before = process_age_s()
    argv = ["--once", "--prompt-tokens", "8", "--block-length", "8", "--expert-cache", "4", "--json"]
    startup.command([*argv, str(tmp_path / "startup.json")])
    (start,) = json.loads((tmp_path / "startup.json").read_text())["starts"]
    steps = [start[f"{step}_s"] for step in startup.STEPS]
    assert min(steps) >= 0
    assert start["imports_s"] >= before
    assert before < sum(steps) <= process_age_s()
    assert start["without_weights_s"] == pytest.approx(sum(steps) - start["weights_s"])
    assert start["programs_found"] + start["compiled"] > 0


@pytest.mark.parametrize("safe", [False, True])
def test_its_processes_look_for_the_package_where_it_did(monkeypatch, safe):
    """`python -P` keeps sources in the working directory from standing before the installed package."""
    environments = []

    def run(words, env, **_):
        environments.append(env)
        return subprocess.CompletedProcess(words, 2, "")

    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr(startup, "sys", SimpleNamespace(executable="python", flags=SimpleNamespace(safe_path=safe)))
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(UsageError):
        startup.command([])
    assert [env.get("PYTHONSAFEPATH") for env in environments] == ["1" if safe else None]


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 2, ""))
    with pytest.raises(UsageError, match="ended with code 2"):
        startup.command(["--layers", "2"])
