"""`bench accuracy` over a toy checkpoint: flags, counting, JSON, the same answers under a small cache."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from oled_jax.bench.__main__ import main
from oled_jax.bench.accuracy import Answer, scores, summarise
from oled_jax.decode.events import Result
from oled_jax.demo.families import BY_NAME, held_out_items
from oled_jax.demo.training import sizes
from oled_jax.demo.training.export import export_checkpoint
from oled_jax.demo.training.step import StepSettings, init_params, new_state
from oled_jax.demo.training.vocabulary import train_tokenizer
from oled_jax.models.registry import config_from_hf
from oled_jax.passes import PassKind

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")

RAW = {**sizes.SMOKE, "dtype": "float32"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("toy")
    settings = StepSettings(config=config_from_hf(RAW), block_length=16)
    state = new_state(settings, init_params(settings.config, 0))
    generation = {**sizes.GENERATION, "gen_length": 16}
    export_checkpoint(directory, jax.device_get(state), train_tokenizer(512, 50, 0), RAW, generation)
    return directory


def result(tokens: int, denoise: int) -> Result:
    passes = {PassKind.PREFILL: 1, PassKind.DENOISE: denoise, PassKind.COMMIT: 1}
    return Result(
        output_ids=tuple(range(tokens)), canvas=np.zeros(1, np.int32), finish="eos", passes=passes,
        ttft_prefill_s=0.0, ttft_block_s=None, decode_s=0.0, tpot_s=None,
    )  # fmt: skip


def test_scores_count_right_answers_and_tokens_per_pass():
    math, qa = held_out_items(BY_NAME["math"], 1)[0], held_out_items(BY_NAME["qa"], 2)
    answers = [
        Answer(item=math, text="", result=result(20, 5), right=True),
        Answer(item=qa[0], text="", result=result(10, 2), right=False),
        Answer(item=qa[1], text="", result=result(6, 3), right=True),
    ]
    summary = summarise(answers)
    assert list(summary) == ["math", "qa", "qa choice", "all"]
    assert summary["math"]["accuracy"] == 1.0
    assert summary["qa"]["accuracy"] == 0.5
    assert summary["qa choice"]["items"] == 1
    assert summary["all"]["tokens_per_pass"] == pytest.approx(36 / 10)
    assert summary["all"]["tokens_per_forward"] == pytest.approx(36 / 13)
    assert scores([])["accuracy"] is None


def run(checkpoint, capsys, *flags):
    words = ["accuracy", "--model", str(checkpoint), "--limit", "2", "--batch", "2", "--dtype", "float32"]
    code = main([*words, "--families", "qa,math", "--json", "-", *flags])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.exhaustive
def test_answers_repeat_and_do_not_depend_on_the_cache(checkpoint, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    reference = run(checkpoint, capsys, "--policy", "all")
    cached = run(checkpoint, capsys, "--policy", "lru", "--expert-cache", "4")
    assert [a["prompt"] for a in reference["answers"]] == [a["prompt"] for a in cached["answers"]]
    assert [a["text"] for a in reference["answers"]] == [a["text"] for a in cached["answers"]]
    assert reference["scores"] == cached["scores"]
    assert cached["cache"]["misses"] > 0
    assert cached["machine"]["platform"] == jax.default_backend()
    assert cached["date"] >= "2026"
    assert reference["scores"]["all"]["items"] == 4
    assert set(reference["scores"]) == {"qa", "math", "qa choice", "all"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "there is no bench 'nothing'"),
        (["accuracy", "--families", "poems"], "no family 'poems'"),
        (["accuracy", "--limit", "0"], "--limit"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_model_without_a_chat_template_is_refused(checkpoint, tmp_path, capsys):
    copy = tmp_path / "plain"
    shutil.copytree(checkpoint, copy)
    described = json.loads((copy / "tokenizer_config.json").read_text())
    del described["chat_template"]
    (copy / "tokenizer_config.json").write_text(json.dumps(described))
    assert main(["accuracy", "--model", str(copy)]) == 2
    assert "has no chat template" in capsys.readouterr().err


def test_help_lists_the_benches(capsys):
    assert main([]) == 0
    assert "accuracy" in capsys.readouterr().out
