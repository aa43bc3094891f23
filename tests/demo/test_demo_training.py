"""A training run learns, resumes and exports; the script runs end to end."""

import dataclasses
import json
import runpy
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import CONFIG, RAW, SETTINGS, SHAPE, random_state

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.demo.families import DEMO_FAMILIES, held_out_items
from oled_jax.demo.training import sizes
from oled_jax.demo.training.export import export_checkpoint
from oled_jax.demo.training.loop import Budget, Schedule, train
from oled_jax.demo.training.rows import stream_rows
from oled_jax.demo.training.state_files import load_state, save_state
from oled_jax.demo.training.step import loss_fn, train_step
from oled_jax.demo.training.vocabulary import EOS_ID, MASK_ID, encode_item, write_tokenizer
from oled_jax.errors import UsageError
from oled_jax.text import TextCodec

SCRIPT = Path(__file__).parents[2] / "scripts" / "train_demo.py"


@pytest.mark.exhaustive
def test_a_step_lowers_the_loss_and_moves_the_bias_against_the_load(rows):
    state = random_state()
    key, rate = jax.random.key(0), jnp.float32(3e-3)
    before, (_, loads) = jax.jit(loss_fn, static_argnums=4)(state.params, state.bias, rows, key, SETTINGS)
    old_bias = np.asarray(state.bias)
    state, metrics = train_step(state, rows, jax.random.key(9), rate, jnp.float32(1e-2), SETTINGS)
    after, _ = jax.jit(loss_fn, static_argnums=4)(state.params, state.bias, rows, key, SETTINGS)
    assert after < before
    assert float(metrics.gradient_norm) > 0
    moved = np.asarray(state.bias) - old_bias
    assert moved.shape == loads.shape
    assert moved[0][int(np.argmax(loads[0]))] < 0 or float(metrics.imbalance) <= 1.0
    assert int(state.step) == 1


def run(tokenizer, state, until, first=0, warm_from=0):
    batches = stream_rows(tokenizer, SHAPE, seed=0, first_chunk=first, workers=0, ahead=0)
    losses = []

    def report(line):
        losses.append(float(line.split(" loss ")[1].split()[0]))

    budget = Budget(steps=6, until_step=until)
    schedule = Schedule(warmup_steps=2)
    state, progress = train(
        state, batches, SETTINGS, schedule, budget, seed=0, warm_from=warm_from, log_every=1, report=report
    )
    return state, progress, losses


def save(directory, state, tokenizer, moments=True):
    record = {"steps": 3}
    save_state(directory, state, moments=moments, tokenizer=tokenizer, raw_config=RAW, record=record)


@pytest.mark.slow
def test_a_resumed_run_continues_as_if_never_interrupted(tokenizer, tmp_path):
    whole, _, losses = run(tokenizer, random_state(), until=6)
    half, progress, first = run(tokenizer, random_state(), until=3)
    assert progress.steps == 3
    save(tmp_path, half, tokenizer)
    loaded = load_state(tmp_path, SETTINGS)
    assert loaded.has_moments
    assert loaded.record == {"steps": 3}
    assert [leaf.shape for leaf in jax.tree.leaves(loaded.state)] == [leaf.shape for leaf in jax.tree.leaves(half)]
    resumed, _, second = run(loaded.tokenizer, loaded.state, until=6, first=int(loaded.state.step))
    assert first + second == losses
    for name, value in whole.params.items():
        np.testing.assert_allclose(resumed.params[name], value, atol=1e-6)


def test_a_state_without_moments_keeps_the_weights(tokenizer, tmp_path):
    state = random_state()
    save(tmp_path, state, tokenizer, moments=False)
    loaded = load_state(tmp_path, SETTINGS)
    assert not loaded.has_moments
    assert np.array_equal(loaded.state.bias, state.bias)
    for name, value in state.params.items():
        assert np.array_equal(loaded.state.params[name], value)


def test_bad_states_are_named(tokenizer, tmp_path):
    with pytest.raises(UsageError, match=r"state\.json"):
        load_state(tmp_path, SETTINGS)
    save(tmp_path, random_state(), tokenizer, moments=False)
    other = dataclasses.replace(SETTINGS, config=dataclasses.replace(CONFIG, hidden_size=64))
    with pytest.raises(UsageError, match=r"attention\.dense\.weight is missing or not \[64, 32\]"):
        load_state(tmp_path, other)
    (tmp_path / "state-000.safetensors").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"state-000\.safetensors"):
        load_state(tmp_path, SETTINGS)


def test_export_reads_back(tokenizer, tmp_path):
    state = random_state()
    export_checkpoint(tmp_path, state, tokenizer, RAW, sizes.GENERATION)
    checkpoint = HfCheckpoint.open(tmp_path)
    assert checkpoint.config.dtype == "bfloat16"
    assert checkpoint.config.mask_token_id == MASK_ID
    assert checkpoint.generation_config["block_length"] == 16
    trunk = checkpoint.read_trunk(np.dtype(np.float32))
    bfloat16 = jnp.bfloat16.dtype
    want = np.asarray(state.params["model.word_embeddings.weight"]).astype(bfloat16).astype(np.float32)
    assert np.array_equal(trunk["word_embeddings", "weight"], want)
    assert np.array_equal(trunk["layers", 1, "mlp", "gate", "expert_bias"], np.asarray(state.bias[0]))
    E, F, D = CONFIG.num_experts, CONFIG.moe_intermediate_size, CONFIG.hidden_size
    gate_up, down = np.empty((E, 2 * F, D), np.float32), np.empty((E, D, F), np.float32)
    checkpoint.read_pages(0, gate_up, down)
    for got, name in ((gate_up, "gate_up"), (down, "down")):
        assert np.array_equal(got, np.asarray(state.params[f"experts.0.{name}"]).astype(bfloat16).astype(np.float32))


def test_training_prompts_are_those_of_the_chat_template(tokenizer, tmp_path):
    write_tokenizer(tokenizer, tmp_path)
    codec = TextCodec.open(tmp_path)
    assert (codec.mask_id, codec.eos_id) == (MASK_ID, EOS_ID)
    for family in DEMO_FAMILIES:
        for item in held_out_items(family, 4):
            prompt, answer = encode_item(tokenizer, item)
            assert codec.encode_prompt(item.prompt) == prompt
            assert codec.decode([*answer, EOS_ID]) == item.answer
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert codec.decode(codec.encode_messages(turns), skip_special_tokens=False) == (
        "<|user|>a<|assistant|>b<|eos|><|user|>c<|assistant|>"
    )
    with pytest.raises(UsageError, match="tool"):
        codec.encode_messages([{"role": "tool", "content": "x"}])


def test_schedule_warms_up_decays_and_refines_the_bias():
    schedule = Schedule(peak=1.0, least=0.1, warmup_steps=10, bias_rate=1e-3, fine_bias_rate=1e-4, fine_from=0.5)
    assert schedule.learning_rate(0.0, 0) == pytest.approx(0.1)
    assert schedule.learning_rate(0.0, 20) == pytest.approx(1.0)
    assert schedule.learning_rate(1.0, 20) == pytest.approx(0.1)
    assert (schedule.bias_rate_at(0.4), schedule.bias_rate_at(0.6)) == (1e-3, 1e-4)


@pytest.mark.exhaustive
def test_the_script_runs_end_to_end_at_toy_size(tmp_path, monkeypatch):
    """In this process: it trains with the program that the tests above have compiled."""
    state, out = tmp_path / "state", tmp_path / "model"
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--smoke", "--state", str(state), "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    record = json.loads((state / "state.json").read_text())["record"]
    assert record["steps"] == 6
    assert record["scores"]["all"]["items"] == 8
    card = (out / "README.md").read_text()
    assert "scripts/train_demo.py --smoke --state STATE_DIR --out OUT_DIR\n" in card
    assert "| math | 2 |" in card
    HfCheckpoint.open(out)
