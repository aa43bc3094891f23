"""What can go wrong while converting or with a converted checkpoint: one clear line, exit 2, nothing lost."""

import errno
import fcntl
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from oled_jax.convert import arrays, staging
from oled_jax.convert.__main__ import main
from oled_jax.convert.checkpoint import ConvertedCheckpoint, open_checkpoint
from oled_jax.convert.manifest import MANIFEST_NAME
from oled_jax.errors import CheckpointError

EXPERT = "model.layers.2.mlp.experts.5.up_proj.weight"


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code and the last line of standard error."""

    def run(*words: object) -> tuple[int, str]:
        code = main([str(word) for word in words])
        lines = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
        assert len(lines) == (1 if code else 0), lines
        return code, lines[0] if lines else ""

    return run


@pytest.fixture
def small(golden) -> Path:
    return golden / "variants" / "base-float32"


@pytest.fixture
def converted(small, tmp_path, run) -> Path:
    assert run(small, tmp_path / "made")[0] == 0
    return tmp_path / "made"


def refusal(run, *words: object) -> str:
    code, line = run(*words)
    assert code == 2
    return line


def flip_byte(directory: Path, name: str, within: int = 5) -> None:
    (entry,) = [e for e in ConvertedCheckpoint.open(directory).manifest.entries if e.name == name]
    with (directory / entry.file).open("r+b") as stream:
        stream.seek(entry.offset + within)
        (byte,) = stream.read(1)
        stream.seek(entry.offset + within)
        stream.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("name", [EXPERT, "model.norm.weight", "model.layers.1.mlp.experts.7.down_proj.weight"])
def test_a_flipped_byte_is_named(converted, tmp_path, run, name):
    assert run("--verify", converted)[0] == 0
    flip_byte(converted, name)
    said = refusal(run, "--verify", converted)
    assert f"{name} is damaged" in said
    assert said.count("is damaged") == 1
    assert f"{name} is damaged" in refusal(run, "--to-hf", converted, tmp_path / "back")
    assert not list(tmp_path.glob("back*"))


def test_a_flipped_byte_in_merged_experts_is_named(golden, tmp_path, run):
    assert run(golden / "variants" / "merged-experts", tmp_path / "made")[0] == 0
    flip_byte(tmp_path / "made", "model.layers.2.mlp.experts.up_proj")
    said = refusal(run, "--verify", tmp_path / "made")
    assert said.endswith("model.layers.2.mlp.experts.up_proj is damaged: its bytes differ from those that were written")


def test_an_edited_configuration_is_named(converted, run):
    (converted / "config.json").write_text((converted / "config.json").read_text() + " ")
    assert "config.json differs from the file that was written" in refusal(run, "--verify", converted)
    ConvertedCheckpoint.open(converted)  # and can be used: a user may have had a reason


def test_truncated_and_missing_arrays(converted, run):
    with (converted / "experts/layer_001/down/0.0.0").open("r+b") as stream:
        stream.truncate(1000)
    shutil.rmtree(converted / "trunk" / "norm.weight")
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(converted)
    assert sorted(caught.value.problems) == [
        "the array experts/layer_001/down/0.0.0 is truncated: 1000 bytes instead of 16384",
        "the array trunk/norm.weight/0 is missing",
    ]
    assert "is truncated" in refusal(run, "--verify", converted)


def test_missing_manifest(converted, run):
    (converted / MANIFEST_NAME).unlink()
    for words in (["--verify", converted], ["--inspect", converted], ["--to-hf", converted, "x"]):
        assert f"there is no {MANIFEST_NAME}: the conversion did not finish" in refusal(run, *words)


def edit_manifest(directory: Path, **changes: object) -> None:
    manifest = json.loads((directory / MANIFEST_NAME).read_text())
    (directory / MANIFEST_NAME).write_text(json.dumps(manifest | changes))


def test_manifest_of_another_version(converted, run):
    edit_manifest(converted, format_version=7, converter_version="9.1", news=1)
    said = refusal(run, "--verify", converted)
    assert "is of format version 7, written by oled_jax 9.1; this oled_jax reads version 1: convert again" in said


@pytest.mark.parametrize(
    "changes",
    [
        {"trunk": None}, {"files": [{"name": "x"}]}, {"extra": 1}, {"dtype": 3},
        {"files": [{"name": "../x", "nbytes": 1, "crc32": "0"}]}, {"experts": [1]},
    ],
)  # fmt: skip
def test_damaged_manifest(converted, run, changes):
    edit_manifest(converted, **changes)
    assert f"{MANIFEST_NAME} is damaged" in refusal(run, "--verify", converted)


@pytest.mark.parametrize("change", [{"file": "../../etc"}, {"offset": -4}, {"nbytes": 12}, {"shape": [-1]}])
def test_damaged_entry(converted, run, change):
    manifest = json.loads((converted / MANIFEST_NAME).read_text())
    manifest["experts"][0][3] |= change
    (converted / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert f"{MANIFEST_NAME} is damaged" in refusal(run, "--verify", converted)


def test_manifest_that_is_no_json(converted, run):
    (converted / MANIFEST_NAME).write_text("{")
    assert f"{MANIFEST_NAME} is not valid JSON" in refusal(run, "--verify", converted)


def test_lost_tensor_and_other_configuration(converted, run):
    manifest = json.loads((converted / MANIFEST_NAME).read_text())
    edit_manifest(converted, experts=[manifest["experts"][0][1:], manifest["experts"][1]])
    assert f"{manifest['experts'][0][0]['name']} is missing" in refusal(run, "--verify", converted)


def test_existing_targets(small, converted, tmp_path, run):
    before = (converted / MANIFEST_NAME).stat().st_mtime_ns
    assert "made exists: give another target, or --overwrite" in refusal(run, small, converted)
    assert (converted / MANIFEST_NAME).stat().st_mtime_ns == before
    (converted / "mark").touch()
    assert run(small, converted, "--overwrite")[0] == 0
    assert not (converted / "mark").exists()
    (tmp_path / "empty").mkdir()
    assert run(small, tmp_path / "empty")[0] == 0
    (tmp_path / "file").touch()
    assert "file exists and is no directory" in refusal(run, small, tmp_path / "file", "--overwrite")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "made"]


def test_only_checkpoints_are_replaced(small, converted, tmp_path, run):
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.txt").touch()
    assert "not a checkpoint of the kind to be written" in refusal(run, small, home, "--overwrite")
    assert "not a checkpoint of the kind" in refusal(run, "--to-hf", converted, home, "--overwrite")
    copy = tmp_path / "copy"
    shutil.copytree(small, copy)
    assert "not a checkpoint of the kind" in refusal(run, small, copy, "--overwrite")
    assert "is, or holds, the source" in refusal(run, copy, tmp_path, "--overwrite")
    assert "is, or holds, the source" in refusal(run, copy, copy, "--overwrite")
    assert run("--to-hf", converted, copy, "--overwrite")[0] == 0
    (tmp_path / "new.incomplete").mkdir()
    (tmp_path / "new.incomplete" / "thesis.txt").touch()
    assert "new.incomplete is needed while writing and holds something else" in refusal(run, small, tmp_path / "new")
    assert (tmp_path / "new.incomplete" / "thesis.txt").exists()


def test_target_behind_a_link(small, converted, tmp_path, run):
    (tmp_path / "link").symlink_to(converted)
    assert run(small, tmp_path / "link", "--overwrite")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert run("--verify", converted)[0] == 0


def test_two_at_a_time(small, tmp_path, run):
    (tmp_path / "made.incomplete").mkdir()
    descriptor = os.open(tmp_path / "made.incomplete", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    assert "another process is writing" in refusal(run, small, tmp_path / "made")
    os.close(descriptor)
    assert run(small, tmp_path / "made")[0] == 0


def test_disk_too_small_is_seen_before(small, tmp_path, run, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=64_000_000)
    monkeypatch.setattr(staging.shutil, "disk_usage", lambda _: usage)
    said = refusal(run, small, tmp_path / "made")
    assert "of disk, 64.0 MB are free there" in said
    assert not (tmp_path / "made").exists()


@contextmanager
def files_of_at_most(limit: int) -> Iterator[None]:
    """The system refuses to write more into a file, as it does where a disk is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.slow
def test_write_refused_by_the_system(golden, tmp_path, run):
    """The trunk's arrays are below the limit, the pages above: what was done is used by the next run."""
    tiny, made = golden / "llada2-tiny", tmp_path / "made"
    with files_of_at_most(150_000):
        # In a process of its own, which inherits the limit: threads of TensorStore may die of it later.
        command = [sys.executable, "-m", "oled_jax.convert", str(tiny), str(made)]
        refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    # Such a thread may add that its event loop is gone; the command's own word is one line.
    (line,) = [line for line in refused.stderr.splitlines() if "oled_jax.convert: error: " in line]
    assert f"{made} cannot be written: the file is larger than allowed; what is done so far is kept in" in line
    assert not made.exists()
    trunk = tmp_path / "made.incomplete" / "trunk" / "norm.weight" / "0"
    written = trunk.stat().st_mtime_ns
    assert "unfinished conversion" in refusal(run, "--verify", tmp_path / "made.incomplete")
    assert run(tiny, made, "--verify")[0] == 0
    assert (made / "trunk" / "norm.weight" / "0").stat().st_mtime_ns == written
    with files_of_at_most(150_000):
        assert "File too large" in refusal(run, "--to-hf", made, tmp_path / "back")
    assert run("--to-hf", made, tmp_path / "back")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "made"]


def test_full_disk(small, tmp_path, run, monkeypatch):
    """TensorStore's words for a full disk, as a file system of 20 MB provokes them."""
    words = "RESOURCE_EXHAUSTED: Error writing local file: No space left on device [os_error_code='28']"

    def save(*_: object) -> None:
        with arrays._system_errors(tmp_path):
            raise ValueError(words)

    with monkeypatch.context() as patch:
        patch.setattr("oled_jax.convert.writer.save_arrays", save)
        said = refusal(run, small, tmp_path / "made")
    assert f"cannot be written: {os.strerror(errno.ENOSPC)}; what is done so far is kept in" in said
    assert run(small, tmp_path / "made")[0] == 0


def test_read_only_target(small, tmp_path, run):
    said = refusal(run, small, "/proc/made")
    assert "/proc/made cannot be written: " in said
    assert "is kept" not in said


def test_nan_is_refused_and_leaves_nothing(source, tmp_path, run):
    bad = source("variants/base-float32")
    bad.tensors[EXPERT][0, 0] = np.nan
    said = refusal(run, bad.write(tmp_path / "hf"), tmp_path / "made")
    assert f"{EXPERT} holds 1 NaN" in said
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_values_too_large_for_the_dtype(source, tmp_path, run):
    large = source("variants/base-float32")
    large.tensors["model.norm.weight"][0] = 1e6
    said = refusal(run, large.write(tmp_path / "hf"), tmp_path / "made", "--dtype", "float16")
    assert "model.norm.weight holds 1 too large for float16" in said


def test_float8_and_quantised_are_refused(source, tmp_path, run):
    quantised = source("variants/base-float32")
    quantised.tensors[EXPERT] = quantised.tensors[EXPERT].astype(ml_dtypes.float8_e4m3fn)
    said = refusal(run, quantised.write(tmp_path / "float8"), tmp_path / "made")
    assert f"{EXPERT} is stored as F8_E4M3, one of F32, F16, BF16 is needed" in said
    quantised.config["quantization_config"] = {"quant_method": "fp8"}
    assert "quantized checkpoints are not supported" in refusal(run, quantised.write(tmp_path / "q"), tmp_path / "m")


def test_sources_of_the_wrong_kind(small, converted, tmp_path, run):
    assert "is a converted checkpoint already" in refusal(run, converted, tmp_path / "x")
    assert "is a Hugging Face checkpoint, a converted one" in refusal(run, "--to-hf", small, tmp_path / "x")
    assert "is a Hugging Face checkpoint, a converted one" in refusal(run, "--verify", small)
    assert "neither a directory nor a hub id" in refusal(run, tmp_path / "none", tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a"], "OUT_DIR is missing"),
        (["--to-hf", "a"], "OUT_DIR is missing"),
        (["--to-hf", "a", "--verify"], "OUT_DIR is missing"),
        (["--inspect", "a", "b"], "--inspect writes nothing: leave out b"),
        (["--inspect", "--to-hf", "a", "b"], "two things to do"),
        (["--inspect", "--verify", "a"], "--inspect reads no weights"),
        (["--to-hf", "a", "b", "--dtype", "float16"], "--dtype belongs to a conversion"),
        (["--verify", "a", "--overwrite"], "--overwrite needs something to write"),
        (["a", "b", "--dtype", "int8"], "invalid choice: 'int8'"),
        ([], "the following arguments are required: DIR"),
    ],
)
def test_flags(run, words, said):
    assert said in refusal(run, *words)


def test_inspect(small, converted, tmp_path, capsys):
    for directory, kind in ((small, "Hugging Face layout"), (converted, "converted by oled_jax")):
        assert main(["--inspect", str(directory)]) == 0
        out = capsys.readouterr().out
        assert kind in out
        assert "3 layers, 2 of them with 8 experts (top 2), float32" in out
        assert "page 6.1 kB, all pages of a layer 49.2 kB, all pages 98.3 kB" in out
        assert [line.split()[0] for line in out.splitlines()[-5:]] == ["experts", "2", "4", "8", "policy"]
        assert out.splitlines()[-1].endswith("yes")
