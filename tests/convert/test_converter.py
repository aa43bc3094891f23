"""Conversion and back: bit-exact for every golden checkpoint, readable by plain Orbax, the same logits."""

import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from engines import GREEDY, build, run
from safetensors import safe_open
from safetensors.numpy import load_file

from oled_jax import loading
from oled_jax.convert.__main__ import main
from oled_jax.convert.checkpoint import ConvertedCheckpoint, open_checkpoint
from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.weights import StoredWeights

VARIANTS = [
    "base-float32", "dense-bias", "eps-large", "first-k-dense-0", "first-k-dense-2", "first-k-dense-3",
    "head-dim-16", "head-dim-absent", "merged-experts", "mha", "minimal-keys", "mqa", "n-group-1",
    "n-group-2-of-2", "negative-bias", "no-qk-norm", "norm-topk-false", "qkv-bias", "rope-dynamic",
    "rope-linear", "rope-linear-type-key", "rope-llama3", "rope-longrope", "rope-longrope-long", "rope-yarn",
    "rotary-absent", "rotary-full", "rotary-quarter", "scaling-1", "shared-0", "shared-2", "shared-null",
    "tied", "tied-head-in-file", "top-1", "topk-group-1", "weights-bf16", "weights-bf16-bias-bf16",
    "weights-float16",
]  # fmt: skip

# Their files hold tensors of the same names, shapes and dtypes as base-float32 or head-dim-16: only the configuration,
# which is copied, says something else.
SAME_TENSORS = {
    "eps-large", "n-group-1", "n-group-2-of-2", "negative-bias", "norm-topk-false", "rope-dynamic", "rope-linear",
    "rope-linear-type-key", "rope-llama3", "rope-longrope", "rope-longrope-long", "rope-yarn", "rotary-absent",
    "rotary-full", "rotary-quarter", "scaling-1", "top-1", "topk-group-1",
}  # fmt: skip
OWN_TENSORS = [name for name in VARIANTS if name not in SAME_TENSORS]
ROUND_TRIPS = [
    *OWN_TENSORS[::2],
    *(pytest.param(name, marks=pytest.mark.slow) for name in OWN_TENSORS[1::2]),
    *(pytest.param(name, marks=pytest.mark.exhaustive) for name in sorted(SAME_TENSORS)),
]
TINY = ["llada2-tiny", "sdar-tiny", "rnd1-tiny"]


def convert(*words: object) -> None:
    assert main([str(word) for word in words]) == 0


def pages(weights: StoredWeights, layer: int, dtype) -> tuple[np.ndarray, np.ndarray]:
    config = weights.config
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    gate_up, down = np.empty((E, 2 * F, D), dtype), np.empty((E, D, F), dtype)
    weights.read_pages(layer, gate_up, down)
    return gate_up, down


def assert_same_weights(a: StoredWeights, b: StoredWeights, dtype) -> None:
    left, right = a.read_trunk(np.dtype(dtype)), b.read_trunk(np.dtype(dtype))
    assert left.keys() == right.keys()
    for path in left:
        assert left[path].dtype == right[path].dtype
        assert left[path].tobytes() == right[path].tobytes(), path
    for layer in range(a.config.num_moe_layers):
        for x, y in zip(pages(a, layer, dtype), pages(b, layer, dtype), strict=True):
            assert x.tobytes() == y.tobytes(), layer
    b.check_finite()


def tensors(directory: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor of a directory: dtype code, shape, bytes."""
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as reader:
            for name in reader.keys():  # noqa: SIM118
                part = reader.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()), reader.get_tensor(name).tobytes())
    return found


def test_every_variant_is_listed(golden):
    assert sorted(path.name for path in (golden / "variants").iterdir() if path.is_dir()) == VARIANTS


@pytest.mark.parametrize("name", [*ROUND_TRIPS, *TINY])
def test_round_trip(golden, tmp_path, name):
    source = golden / name if name in TINY else golden / "variants" / name
    there, back = tmp_path / "there", tmp_path / "back"
    convert(source, there)
    convert("--to-hf", there, back)
    hf, converted = HfCheckpoint.open(source), ConvertedCheckpoint.open(there)
    assert (hf.raw_config, hf.generation_config) == (converted.raw_config, converted.generation_config)
    assert hf.config == converted.config
    assert hf.total_bytes == converted.total_bytes
    assert_same_weights(hf, converted, np.float32)
    assert_same_weights(hf, converted, ml_dtypes.bfloat16)
    assert tensors(back) == tensors(source)
    for file in source.glob("*.safetensors"):
        # The golden files were written by the safetensors library: even order and header come back.
        assert (back / file.name).read_bytes() == file.read_bytes()
    assert (back / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("policy", ["all", "oled"])
def test_logits_are_identical(golden, tmp_path, policy):
    original = golden / "variants" / "base-float32"
    decoding = dataclasses.replace(GREEDY, mask_id=95, eos_id=-1)
    convert(original, tmp_path / "there")
    recorded = []
    for directory in (original, tmp_path / "there"):
        weights = open_checkpoint(directory)
        engine = build(weights.config, weights, policy, capacity=6)
        (result,) = run(engine, [[5, 6, 7, 8, 9]], decoding)
        recorded.append((result.output_ids, engine.recorded))
    (ids, passes), (same_ids, same_passes) = recorded
    assert ids == same_ids
    assert len(passes) == len(same_passes) > 3
    for (kind, logits), (same_kind, same_logits) in zip(passes, same_passes, strict=True):
        assert kind == same_kind
        np.testing.assert_array_equal(logits, same_logits)


def test_plain_orbax_restores_it(source, tmp_path, expected_pages):
    tiny = source("llada2-tiny")
    convert(tiny.write(tmp_path / "hf"), tmp_path / "there")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        trunk = checkpointer.restore(tmp_path / "there" / "trunk")
        layers = [checkpointer.restore(tmp_path / "there" / "experts" / f"layer_{i:03d}") for i in range(3)]
    embedding = trunk["word_embeddings"]["weight"]
    assert embedding.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(embedding, tiny.tensors["model.word_embeddings.weight"])
    bias = trunk["layers"]["2"]["mlp"]["gate"]["expert_bias"]
    np.testing.assert_array_equal(bias, tiny.tensors["model.layers.2.mlp.gate.expert_bias"])
    for i, layer in enumerate(layers):
        gate_up, down = expected_pages(tiny.tensors, tiny.config, i + 1, ml_dtypes.bfloat16)
        np.testing.assert_array_equal(layer["gate_up"], gate_up)
        np.testing.assert_array_equal(layer["down"], down)


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_shards_in_any_order(source, tmp_path, shards):
    tiny = source("variants/merged-experts")
    original = tiny.write_shuffled(tmp_path / "hf", shards)
    convert(original, tmp_path / "there", "--verify")
    convert("--to-hf", tmp_path / "there", tmp_path / "back", "--verify")
    assert tensors(tmp_path / "back") == tensors(original)
    index = "model.safetensors.index.json"
    placed, original_placed = (
        json.loads((folder / index).read_text())["weight_map"] for folder in (tmp_path / "back", original)
    )
    assert placed == original_placed
    assert_same_weights(HfCheckpoint.open(original), HfCheckpoint.open(tmp_path / "back"), np.float32)


def test_tied_model_keeps_a_redundant_head_as_it_is(golden, source, tmp_path):
    tied = source("variants/tied")
    tied.tensors["lm_head.weight"] = np.array([[1, np.nan], [3, 4]])  # float64, of no use, and kept
    original = tied.write(tmp_path / "hf")
    convert(original, tmp_path / "there", "--dtype", "bfloat16")
    convert("--to-hf", tmp_path / "there", tmp_path / "back")
    assert tensors(tmp_path / "back")["lm_head.weight"] == tensors(original)["lm_head.weight"]
    assert tensors(tmp_path / "back")["model.norm.weight"][0] == "BF16"


def test_experts_of_several_dtypes(source, tmp_path):
    mixed = source("variants/base-float32")
    for e, dtype in ((0, np.float16), (1, ml_dtypes.bfloat16)):
        for layer in (1, 2):
            name = f"model.layers.{layer}.mlp.experts.{e}.up_proj.weight"
            mixed.tensors[name] = mixed.tensors[name].astype(dtype)
    original = mixed.write(tmp_path / "hf")
    convert(original, tmp_path / "there")
    convert("--to-hf", tmp_path / "there", tmp_path / "back", "--verify")
    assert tensors(tmp_path / "back") == tensors(original)
    assert_same_weights(HfCheckpoint.open(original), ConvertedCheckpoint.open(tmp_path / "there"), np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cast(golden, tmp_path, capsys, dtype):
    source = golden / "llada2-tiny"
    convert(source, tmp_path / "there", "--dtype", dtype, "--verify")
    converted = ConvertedCheckpoint.open(tmp_path / "there")
    assert converted.config.dtype == converted.raw_config["dtype"] == dtype
    assert_same_weights(HfCheckpoint.open(source), converted, np.dtype(converted.config.dtype))
    capsys.readouterr()
    convert("--to-hf", tmp_path / "there", tmp_path / "back")
    assert f"writing {dtype}: the checkpoint was converted with --dtype {dtype}" in capsys.readouterr().err
    back = HfCheckpoint.open(tmp_path / "back")
    assert back.config.dtype == dtype
    assert_same_weights(converted, back, np.dtype(dtype))
    codes = {name: code for name, (code, _, _) in tensors(tmp_path / "back").items()}
    bias = [name for name in codes if name.endswith("expert_bias")]
    assert {codes.pop(name) for name in bias} == {"F32"}
    assert set(codes.values()) == {{"bfloat16": "BF16", "float16": "F16", "float32": "F32"}[dtype]}


def test_companion_files_go_along(golden, tmp_path):
    original = tmp_path / "hf"
    shutil.copytree(golden / "llada2-tiny", original)
    kept = {
        "tokenizer.json": "{}", "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}", "LICENSE": "mine",
        "generation_config.json": '{"eos_token_id": 508}', "modeling.py": "pass", "merges.txt": "a b",
    }  # fmt: skip
    for name, text in kept.items():
        (original / name).write_text(text)
    (original / "additional_chat_templates").mkdir()
    (original / "additional_chat_templates" / "tool.jinja").write_text("{{ y }}")
    for name in ("pytorch_model.bin", ".gitattributes", "pytorch_model.bin.index.json"):
        (original / name).write_text("no")
    convert(original, tmp_path / "there")
    convert("--to-hf", tmp_path / "there", tmp_path / "back")
    for folder in (tmp_path / "there", tmp_path / "back"):
        found = {path.name: path.read_text() for path in folder.iterdir() if path.name in kept}
        assert found == kept
        assert (folder / "additional_chat_templates" / "tool.jinja").read_text() == "{{ y }}"
        assert not list(folder.glob("pytorch*"))
        assert not (folder / ".gitattributes").exists()
    assert ConvertedCheckpoint.open(tmp_path / "there").generation_config == {"eos_token_id": 508}


def test_open_model_takes_either(golden, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    convert(golden / "llada2-tiny", tmp_path / "there", "--dtype", "float16")
    opened = loading.open_model(str(tmp_path / "there"))
    assert opened.config.dtype == "float16"
    assert isinstance(opened.weights, ConvertedCheckpoint)
    assert loading.open_model(str(tmp_path / "there"), "float32").config.dtype == "float32"


def test_checksums_are_those_of_the_source_files(golden, tmp_path):
    import zlib

    convert(golden / "variants" / "merged-experts", tmp_path / "there")
    stored = load_file(golden / "variants" / "merged-experts" / "model.safetensors")
    entries = ConvertedCheckpoint.open(tmp_path / "there").manifest.entries
    assert {entry.name: entry.crc32 for entry in entries} == {
        name: f"{zlib.crc32(tensor.tobytes()):08x}" for name, tensor in stored.items()
    }
