"""The model inside the package: what it says, paged and resident; what a user reads where its files are damaged."""

import dataclasses
import functools
import json
import shutil

import engines
import jax
import pytest

from oled_jax import generate, loading
from oled_jax.config import DecodingConfig
from oled_jax.demo.shipped import LABEL, NEEDED, check_model_dir, demo_model_dir
from oled_jax.loading import open_model
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE
from oled_jax.passes import PassKind

CAPACITY = 32  # of 128 experts

# One of each family, at temperature 0 in float32 on the CPU. bfloat16 and JAX 0.11 gave the same texts when taken.
TEXTS = {
    "Ben had 88 eggs. Ben sold 4 of them and later bought 47. How many eggs does Ben have?":
        "First, 88 - 4 = 84. Then 84 + 47 = 131. Answer: 131",
    'Complete the function:\ndef keep_above_40(values):\n    """Keep only values of values above 40."""':
        "def keep_above_40(values):\n    return [x for x in values if x > 40]",
    "Name the capital of Switzerland. Choose one: A) Belgrade B) Dakar C) Bern D) Cairo":
        "The capital of Switzerland is Bern, so the answer is C.",
    "Tell me a story about a fox and a kite.":
        "Long ago, a shy fox named Max lived near the church. In the forest Max found a strange and brown kite. "
        "They talked about the forest and ate soup. Max carried the brown kite quietly to the forest. "
        "And Max cried because the brown kite was safe.",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))


@pytest.fixture(scope="module")
def model():
    return open_model(None, "float32")


@pytest.fixture(scope="module")
def decoding(model):
    """As the checkpoint's own generation_config.json has it."""
    return DecodingConfig(
        mask_id=model.generation_config["mask_token_id"],
        eos_id=model.generation_config["eos_token_id"],
        **{name: model.generation_config[name] for name in ("gen_length", "block_length", "steps", "threshold")},
    )


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices round differently")
def test_fixed_texts_paged_and_resident(model, decoding):
    prompts = [model.codec.encode_prompt(prompt) for prompt in TEXTS]
    for policy in ("oled", "all"):
        engine = engines.build_plain(model.config, model.weights, policy, CAPACITY, spare=32)
        results = engine.generate(prompts, decoding)
        assert [model.codec.decode(result.output_ids) for result in results] == list(TEXTS.values()), policy
        assert {result.finish for result in results} == {"eos"}
        if engine.manager is not None:
            assert engine.statistics.summary(*PassKind).misses > 0
        engine.close()


@pytest.mark.slow
def test_the_command_says_the_same_without_a_flag_on_decoding(capsys, tmp_path):
    prompt, text = next(iter(TEXTS.items()))
    flags = ["--dtype", "float32", "--expert-cache", str(CAPACITY), "--stats-json", str(tmp_path / "s.json")]
    assert generate.main(["--prompt", prompt, *flags]) == 0
    assert capsys.readouterr().out == text + "\n"
    statistics = json.loads((tmp_path / "s.json").read_text())
    settings = statistics["settings"]
    assert statistics["model"] == LABEL
    assert (settings["block_length"], settings["threshold"], settings["temperature"]) == (16, 0.9, 0.0)
    assert settings["chat_template"]


def test_the_wheel_grows_by_less_than_30_mb():
    directory = demo_model_dir()
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert set(files) == {*NEEDED, "README.md"}
    assert sum(files.values()) < 30e6


def test_experts_are_many_and_their_routing_is_limited_to_groups(model):
    config = model.config
    assert (config.num_experts, config.num_moe_layers >= 5, config.num_experts_per_tok >= 4) == (128, True, True)
    assert config.topk_group < config.n_group
    assert dataclasses.replace(config, dtype="bfloat16") == open_model(None).config


@pytest.mark.parametrize("name", NEEDED)
@pytest.mark.parametrize("harm", ["missing", "damaged"])
def test_a_bad_file_is_one_line_with_the_way_back(name, harm, monkeypatch, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(demo_model_dir(), copy)
    path = copy / name
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-40])
    monkeypatch.setattr(loading, "demo_model_dir", functools.partial(check_model_dir, copy))
    assert generate.main(["--prompt", "x"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    assert line.startswith("oled_jax.generate: error: the shipped model")
    assert str(path) in line
    assert "pip install --force-reinstall" in line
