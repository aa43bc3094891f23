"""Conversions that end early, in child processes: nothing looks finished, and the next run completes the work."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from oled_jax.convert.__main__ import main
from oled_jax.convert.checkpoint import open_checkpoint
from oled_jax.errors import CheckpointError

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "oled_jax.convert"]
PATIENCE_S = 60.0  # a child that has not got that far by then never will
WIDTH = 1024
# Orbax's directory while it writes the second layer.
WRITING = "experts/layer_001.orbax-checkpoint-tmp*"


@pytest.fixture
def wide(source, tmp_path) -> Path:
    """A model whose layers take Orbax long enough to be met at it: 3 layers of 25 MB."""
    model = source("variants/first-k-dense-0")
    model.config |= {"moe_intermediate_size": WIDTH, "num_shared_experts": None, "num_experts": 64}
    width, hidden = WIDTH, model.config["hidden_size"]
    drop = [name for name in model.tensors if ".experts." in name or "shared_experts" in name or "mlp.gate." in name]
    for name in drop:
        del model.tensors[name]
    rng = np.random.default_rng(0)
    for layer in range(model.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}.mlp"
        model.tensors[f"{prefix}.gate.weight"] = np.zeros((64, hidden), np.float32)
        model.tensors[f"{prefix}.gate.expert_bias"] = np.zeros(64, np.float32)
        for projection, shape in (("gate", (width, hidden)), ("up", (width, hidden)), ("down", (hidden, width))):
            stacked = rng.standard_normal((64, *shape), dtype=np.float32)
            model.tensors[f"{prefix}.experts.{projection}_proj"] = stacked
    return model.write(tmp_path / "hf")


def stop_while_writing(words: list[str], growing: Path, pattern: str, number: signal.Signals) -> tuple[int, str]:
    """Starts the command, sends it a signal once `pattern` exists, and returns its exit code and last words."""
    child = subprocess.Popen([*COMMAND, *words], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + PATIENCE_S
    while not list(growing.glob(pattern)):
        assert child.poll() is None, "the child ended before it got there"
        assert time.monotonic() < deadline, "the child never got there"
        time.sleep(0.001)
    child.send_signal(number)
    _, said = child.communicate(timeout=PATIENCE_S)
    return child.returncode, said


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_interrupted_conversion(wide, tmp_path, capsys, number, code):
    made, growing = tmp_path / "made", tmp_path / "made.incomplete"
    returned, said = stop_while_writing([str(wide), str(made)], growing, WRITING, number)
    assert returned == code
    assert "Traceback" not in said
    if number == signal.SIGINT:
        assert "the same command goes on where this one was" in said
    assert not made.exists()
    with pytest.raises(CheckpointError, match="unfinished conversion"):
        open_checkpoint(growing)
    first = growing / "experts/layer_000/down/0.0.0"
    written = first.stat().st_mtime_ns

    assert main([str(wide), str(made), "--verify"]) == 0
    assert not growing.exists()
    assert (made / "experts/layer_000/down/0.0.0").stat().st_mtime_ns == written  # taken over
    assert not list(made.glob("**/*orbax-checkpoint-tmp*"))
    names = {path.name for path in made.iterdir()}
    assert names == {"trunk", "experts", "config.json", "oled_manifest.json"}
    capsys.readouterr()


def test_another_source_starts_over(wide, tmp_path, capsys):
    made, growing = tmp_path / "made", tmp_path / "made.incomplete"
    stop_while_writing([str(wide), str(made)], growing, WRITING, signal.SIGKILL)
    first = growing / "experts/layer_000/down/0.0.0"
    written = first.stat().st_mtime_ns
    (wide / "model.safetensors").touch()
    assert main([str(wide), str(made), "--verify"]) == 0
    assert (made / "experts/layer_000/down/0.0.0").stat().st_mtime_ns != written
    capsys.readouterr()


def test_old_checkpoint_stays_until_the_new_one_is_complete(wide, tmp_path, capsys, golden):
    made, growing = tmp_path / "made", tmp_path / "made.incomplete"
    assert main([str(golden / "llada2-tiny"), str(made)]) == 0
    words = [str(wide), str(made), "--overwrite"]
    stop_while_writing(words, growing, WRITING, signal.SIGKILL)
    assert main(["--verify", str(made)]) == 0
    assert open_checkpoint(made).config.num_hidden_layers == 4
    assert main([*words, "--verify"]) == 0
    assert open_checkpoint(made).config.moe_intermediate_size == WIDTH
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "made"]
    capsys.readouterr()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_way_back(wide, tmp_path, capsys, number):
    made, back = tmp_path / "made", tmp_path / "back"
    assert main([str(wide), str(made)]) == 0
    growing = tmp_path / "back.incomplete"
    stop_while_writing(["--to-hf", str(made), str(back)], growing, "model.safetensors", number)
    assert not back.exists()
    assert not (growing / "config.json").exists()  # so nothing takes it for a checkpoint
    (growing / "left.safetensors").touch()
    assert main(["--to-hf", str(made), str(back), "--verify"]) == 0
    original, returned = load_file(wide / "model.safetensors"), load_file(back / "model.safetensors")
    assert {name: tensor.tobytes() for name, tensor in original.items()} == {
        name: tensor.tobytes() for name, tensor in returned.items()
    }
    assert not (back / "left.safetensors").exists()
    assert json.loads((back / "config.json").read_text())["num_experts"] == 64
    capsys.readouterr()
