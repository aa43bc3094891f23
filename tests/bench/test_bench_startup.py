"""`bench startup` with a tiny model in the place of the published one."""

import json
import subprocess

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


def test_a_process_that_fails_is_named(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 2, ""))
    with pytest.raises(UsageError, match="ended with code 2"):
        startup.command(["--layers", "2"])
