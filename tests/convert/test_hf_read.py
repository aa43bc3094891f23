"""Values read from intact checkpoints, in every layout and dtype."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.errors import CheckpointError
from oled_jax.models.registry import family_of

BF16 = np.dtype(ml_dtypes.bfloat16)
VARIANTS = (
    "base-float32", "weights-bf16", "weights-bf16-bias-bf16", "weights-float16", "tied", "tied-head-in-file",
    "shared-null", "shared-0", "shared-2", "qkv-bias", "dense-bias", "no-qk-norm", "first-k-dense-0",
    "first-k-dense-3", "minimal-keys",
)  # fmt: skip


def read_pages(checkpoint: HfCheckpoint, moe_layer: int, dtype):
    config = checkpoint.config
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    gate_up, down = np.full((E, 2 * F, D), np.nan, dtype), np.full((E, D, F), np.nan, dtype)
    checkpoint.read_pages(moe_layer, gate_up, down)
    return gate_up, down


def assert_reads_as(directory: Path, source, expected_pages, dtype=np.float32) -> None:
    """Everything in `directory` equals the tensors of `source`, cast to `dtype`."""
    checkpoint = HfCheckpoint.open(directory)
    trunk = checkpoint.read_trunk(np.dtype(dtype))
    needed = checkpoint.family.trunk_tensors(checkpoint.config)
    assert set(trunk) == {tuple(t.path) for t in needed}
    for tensor in needed:
        array = trunk[tuple(tensor.path)]
        assert array.flags.owndata
        assert array.dtype == (np.float32 if tensor.float32 else dtype), tensor.name
        np.testing.assert_array_equal(array, source.tensors[tensor.name].astype(array.dtype), err_msg=tensor.name)
    for i, layer in enumerate(checkpoint.family.moe_layers(checkpoint.config)):
        wanted = expected_pages(source.tensors, source.config, layer, dtype)
        for got, want in zip(read_pages(checkpoint, i, dtype), wanted, strict=True):
            np.testing.assert_array_equal(got, want)
    checkpoint.check_finite()


@pytest.mark.parametrize("name", VARIANTS)
def test_golden_variants(golden, source, expected_pages, name):
    assert_reads_as(golden / "variants" / name, source(f"variants/{name}"), expected_pages)


@pytest.mark.parametrize("stored", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("kept", [np.float32, np.float16, BF16])
def test_every_pair_of_dtypes(tmp_path, source, expected_pages, stored, kept):
    base = source("variants/base-float32")
    base.tensors = {n: t if n.endswith("expert_bias") else t.astype(stored) for n, t in base.tensors.items()}
    assert_reads_as(base.write(tmp_path), base, expected_pages, kept)


def test_expert_bias_keeps_float32_values_that_bfloat16_cannot_hold(golden, source):
    checkpoint = HfCheckpoint.open(golden / "llada2-tiny")
    trunk = checkpoint.read_trunk(BF16)
    biases = [t for t in checkpoint.family.trunk_tensors(checkpoint.config) if t.name.endswith("expert_bias")]
    assert len(biases) == 3
    for tensor in biases:
        stored = source("llada2-tiny").tensors[tensor.name]
        assert (stored != stored.astype(BF16).astype(np.float32)).any()
        np.testing.assert_array_equal(trunk[tuple(tensor.path)], stored)


@pytest.mark.parametrize("count", [1, 4, 11])
def test_tensors_spread_over_shards_at_random(tmp_path, source, expected_pages, count):
    tiny = source("llada2-tiny")
    assert_reads_as(tiny.write_shuffled(tmp_path, count, seed=count), tiny, expected_pages, BF16)


def test_shards_without_index(tmp_path, source, expected_pages):
    tiny = source("llada2-tiny")
    (tiny.write_shuffled(tmp_path, 3) / "model.safetensors.index.json").unlink()
    assert_reads_as(tmp_path, tiny, expected_pages, BF16)


def test_index_decides_between_two_copies(tmp_path, source, expected_pages):
    """Each of the two shards holds everything; what the index does not place in it is wrong there."""
    base = source("variants/base-float32")
    shards = [list(base.tensors)[::2], list(base.tensors)[1::2]]
    base.write(tmp_path, shards)
    for i, mine in enumerate(shards):
        tensors = {name: tensor + (name not in mine) for name, tensor in base.tensors.items()}
        save_file(tensors, tmp_path / f"model-{i + 1:05}-of-00002.safetensors")
    assert_reads_as(tmp_path, base, expected_pages)


@pytest.mark.parametrize("shards", [None, 3])
def test_merged_experts(golden, tmp_path, source, expected_pages, shards):
    merged = source("variants/merged-experts")
    directory = golden / "variants/merged-experts" if shards is None else merged.write_shuffled(tmp_path, shards)
    base = source("variants/base-float32")
    base.config = merged.config
    assert_reads_as(directory, base, expected_pages)


def test_one_layer_merged_and_the_others_not(tmp_path, source, expected_pages):
    base = source("variants/base-float32")
    mixed = source("variants/base-float32")
    for projection in ("gate_proj", "up_proj", "down_proj"):
        stem = "model.layers.2.mlp.experts"
        single = [mixed.tensors.pop(f"{stem}.{e}.{projection}.weight") for e in range(8)]
        mixed.tensors[f"{stem}.{projection}"] = np.stack(single)
    assert_reads_as(mixed.write(tmp_path), base, expected_pages, BF16)


def test_total_bytes_counts_what_the_model_uses(golden):
    assert HfCheckpoint.open(golden / "llada2-tiny").total_bytes == 1_509_120
    tied, redundant = (HfCheckpoint.open(golden / "variants" / n) for n in ("tied", "tied-head-in-file"))
    assert tied.total_bytes == redundant.total_bytes


def test_pages_are_filled_in_place_in_parts_of_larger_buffers(golden, source, expected_pages):
    checkpoint = HfCheckpoint.open(golden / "llada2-tiny")
    buffer = np.full((34, 64, 64), 7, BF16)
    down = np.full((34, 64, 32), 7, BF16)
    checkpoint.read_pages(2, buffer[1:33], down[1:33])
    tiny = source("llada2-tiny")
    for got, want in zip((buffer, down), expected_pages(tiny.tensors, tiny.config, 3, BF16), strict=True):
        np.testing.assert_array_equal(got[1:33], want)
        assert (got[[0, 33]] == 7).all()


def test_pages_of_another_shape_are_refused(golden):
    checkpoint = HfCheckpoint.open(golden / "llada2-tiny")
    with pytest.raises(ValueError, match=r"\(32, 64, 64\)"):
        checkpoint.read_pages(0, np.empty((31, 64, 64), BF16), np.empty((31, 64, 32), BF16))


def test_tensors_longer_than_a_chunk(tmp_path, source, expected_pages, monkeypatch):
    monkeypatch.setattr("oled_jax.convert.tensors.CHUNK_BYTES", 100)
    tiny = source("llada2-tiny")
    assert_reads_as(tiny.write_shuffled(tmp_path, 2), tiny, expected_pages, BF16)
    assert_reads_as(tmp_path, tiny, expected_pages, np.float32)


def test_file_cut_after_opening(tmp_path, source):
    checkpoint = HfCheckpoint.open(source("llada2-tiny").write(tmp_path))
    with (tmp_path / "model.safetensors").open("r+b") as stream:
        stream.truncate(100_000)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends before the data of"):
        checkpoint.read_trunk(BF16)


PEAK_CHECK = """
import sys
from pathlib import Path
import ml_dtypes, numpy as np
from oled_jax.convert.hf import HfCheckpoint

def peak_bytes():  # ru_maxrss would start from that of the parent process
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

checkpoint, dtype, before = HfCheckpoint.open(Path(sys.argv[1])), np.dtype(sys.argv[2]), peak_bytes()
c = checkpoint.config
E, F, D = c.num_experts, c.moe_intermediate_size, c.hidden_size
kept = [(np.empty((E, 2 * F, D), dtype), np.empty((E, D, F), dtype)) for _ in range(c.num_moe_layers)]
for i, pages in enumerate(kept):
    checkpoint.read_pages(i, *pages)
trunk = checkpoint.read_trunk(dtype)
weights = sum(a.nbytes for a in trunk.values()) + sum(a.nbytes for pages in kept for a in pages)
print((peak_bytes() - before) / weights)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["bfloat16", "float32"])
def test_peak_memory_is_that_of_the_weights(tmp_path, source, kept):
    """The peak of a process of its own grows by at most 1.15 x the weights, cast or not."""
    tiny = source("llada2-tiny")
    tiny.config |= {
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 3,
    }  # 100 MB in bfloat16
    family = family_of(tiny.config)
    config = family.config_from_hf(tiny.config)
    tiny.tensors = {t.name: np.ones(t.shape, BF16) for t in family.trunk_tensors(config)}
    for layer in family.moe_layers(config):
        for projection in ("gate_proj", "up_proj", "down_proj"):
            for e in range(config.num_experts):
                name = family.expert_name.format(layer=layer, expert=e, projection=projection)
                tiny.tensors[name] = np.ones((512, 512), BF16)
    tiny.write_shuffled(tmp_path, 3)
    command = [sys.executable, "-c", PEAK_CHECK, str(tmp_path), kept]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert 0.9 < float(run.stdout) <= 1.15
