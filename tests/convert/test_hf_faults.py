"""Every fault of a checkpoint is found on opening or while reading, and one message tells them all."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.problems import SPELLED_OUT
from oled_jax.errors import CheckpointError

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.1.mlp.experts.{}.{}_proj.weight"


def problems_of(directory: Path) -> list[str]:
    with pytest.raises(CheckpointError) as caught:
        HfCheckpoint.open(directory)
    message = str(caught.value)
    assert message.startswith(str(directory))
    assert "\n" not in message
    assert all(problem in message for problem in caught.value.problems)
    return caught.value.problems


def only_problem(directory: Path) -> str:
    problems = problems_of(directory)
    assert len(problems) == 1, problems
    return problems[0]


@pytest.fixture
def base(source):
    return source("variants/base-float32")


def edit_header(file: Path, change) -> None:
    """Rewrites the header of a safetensors file, data untouched."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def test_several_faults_are_all_listed(tmp_path, base):
    base.tensors.pop("model.norm.weight")
    base.tensors[EXPERT.format(3, "up")] = np.zeros((3, 4), np.float32)
    base.tensors["model.layers.1.mlp.gate.weight"] = np.zeros((8, 32), np.int32)
    base.tensors["model.layers.9.surprise"] = np.zeros(2, np.float32)
    names = list(base.tensors)
    cut = [name for name in names if name.startswith("model.layers.2.")]
    base.write(tmp_path, [[n for n in names if n not in cut], cut[:20], cut[20:]])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with (tmp_path / "model-00003-of-00003.safetensors").open("r+b") as stream:
        stream.truncate((tmp_path / "model-00003-of-00003.safetensors").stat().st_size - 5)
    (tmp_path / "generation_config.json").write_text("{,}")
    problems = problems_of(tmp_path)
    fragments = (
        "model.norm.weight is missing",
        f"{EXPERT.format(3, 'up')} has shape [3, 4], the configuration needs [16, 32]",
        "model.layers.1.mlp.gate.weight is stored as I32", "model.layers.9.surprise belongs to no part",
        "shard model-00002-of-00003.safetensors is missing", "model-00003-of-00003.safetensors is truncated",
        "generation_config.json is not valid JSON (line 1, column 2",
    )  # fmt: skip
    for fragment in fragments:
        assert sum(fragment in problem for problem in problems) == 1, (fragment, problems)
    assert len(problems) == len(fragments)


def test_many_of_a_kind_are_counted(tmp_path, base):
    for e in range(8):
        for projection in ("gate", "up", "down"):
            base.tensors.pop(EXPERT.format(e, projection))
            base.tensors[f"model.layers.1.mlp.experts.{e}.{projection}.weight_scale"] = np.zeros(1, np.float32)
    for i in range(SPELLED_OUT + 12):
        base.tensors[f"other.{i}.weight"] = np.zeros(1, np.float32)
    problems = problems_of(base.write(tmp_path))
    assert sum("is missing" in p for p in problems) == 24
    assert sum("weight_scale belongs" in p for p in problems) == 24
    assert "and 12 more: extra tensors like other.*.weight" in problems


@pytest.mark.parametrize("size", [0, 4, 8, 500])
def test_file_cut_inside_its_header(tmp_path, base, size):
    with (base.write(tmp_path) / "model.safetensors").open("r+b") as stream:
        stream.truncate(size)
    assert only_problem(tmp_path) == f"model.safetensors is truncated: its {size} bytes do not hold its header"


def test_cut_data_counts_the_tensors(tmp_path, base):
    with (base.write(tmp_path) / "model.safetensors").open("r+b") as stream:
        stream.truncate((tmp_path / "model.safetensors").stat().st_size - 1)
    assert "1 tensors are cut off or missing" in only_problem(tmp_path)


def test_git_lfs_pointer(tmp_path, base):
    (base.write(tmp_path) / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )
    assert "git lfs pull" in only_problem(tmp_path)


@pytest.mark.parametrize("content", [b"\xff" * 64, struct.pack("<Q", 4) + b"[1] ", struct.pack("<Q", 4) + b"{]}}"])
def test_not_a_safetensors_file(tmp_path, base, content):
    (base.write(tmp_path) / "model.safetensors").write_bytes(content)
    assert "is not a safetensors file" in only_problem(tmp_path)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        "text",
        {"dtype": "F32", "shape": [32], "data_offsets": [0]},
        {"dtype": "F32", "shape": [32], "data_offsets": [8, 0]},
        {"dtype": "F32", "shape": [-32], "data_offsets": [0, 128]},
        {"dtype": "F32", "shape": [31], "data_offsets": [0, 128]},
        {"dtype": 3, "shape": [32], "data_offsets": [0, 128]},
    ],
)
def test_damaged_header_entry(tmp_path, base, entry):
    base.write(tmp_path)
    edit_header(tmp_path / "model.safetensors", lambda header: header.update({"model.norm.weight": entry}))
    assert any("the header entry of model.norm.weight is damaged" in problem for problem in problems_of(tmp_path))


def test_overlapping_tensors(tmp_path, base):
    base.write(tmp_path)

    def overlap(header):
        first = next(name for name, entry in header.items() if entry.get("data_offsets", [1])[0] == 0)
        twin = next(n for n, e in header.items() if n != first and e.get("shape") == header[first]["shape"])
        header[twin] = header[first]

    edit_header(tmp_path / "model.safetensors", overlap)
    assert "overlaps another tensor" in only_problem(tmp_path)


def test_index_that_misplaces_tensors(tmp_path, base):
    base.write_shuffled(tmp_path, 2)
    index = json.loads((tmp_path / INDEX).read_text())
    for name, file in (
        ("model.norm.weight", "../elsewhere.safetensors"),
        ("lm_head.weight", 7),
        ("ghost", "?"),
    ):
        index["weight_map"][name] = file
    index["weight_map"]["phantom"] = "model-00001-of-00002.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    problems = problems_of(tmp_path)
    assert f"{INDEX} places model.norm.weight in '../elsewhere.safetensors', not a file here" in problems
    assert f"{INDEX} places lm_head.weight in 7, not a file here" in problems
    assert f"shard ? is missing ({INDEX} places 1 tensors in it)" in problems
    assert f"{INDEX} places phantom in model-00001-of-00002.safetensors, which does not hold it" in problems
    assert len(problems) == 4


@pytest.mark.parametrize(
    ("content", "said"),
    [("{", "is not valid JSON"), ("[]", "holds a JSON list"), ('{"metadata": {}}', "has no weight_map")],
)
def test_bad_index(tmp_path, base, content, said):
    (base.write_shuffled(tmp_path, 2) / INDEX).write_text(content)
    assert only_problem(tmp_path).startswith(f"{INDEX} {said}")


def test_same_tensor_in_two_shards_without_index(tmp_path, base):
    names = list(base.tensors)
    base.write(tmp_path, [names, names[:2]])
    (tmp_path / INDEX).unlink()
    assert len([p for p in problems_of(tmp_path) if "is in both model-00001" in p]) == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "config.json is not valid JSON (line 1, column 2"),
        ("[]", "config.json holds a JSON list"),
        ("\udcff", "config.json is not valid JSON (not UTF-8"),
        ("{}", "model_type"),
        ('{"model_type": "llama"}', "llama"),
    ],
)
def test_bad_config(tmp_path, base, content, said):
    (base.write(tmp_path) / "config.json").write_text(content, errors="surrogateescape")
    assert said in only_problem(tmp_path)


def test_config_faults_come_with_the_shard_faults(tmp_path, base):
    base.config |= {"n_group": 3, "topk_group": 9}
    names = list(base.tensors)
    base.write(tmp_path, [names[::2], names[1::2]])
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    problems = problems_of(tmp_path)
    assert any("n_group 3 does not divide num_experts 8" in p for p in problems)
    assert any("model-00001-of-00002.safetensors is missing" in p for p in problems)


def test_value_of_another_type_in_config(tmp_path, base):
    base.config["hidden_size"] = "thirty-two"
    assert only_problem(base.write(tmp_path)) == "config.json: hidden_size is 'thirty-two', it must be a whole number"


def test_quantised_checkpoint(tmp_path, base):
    base.config["quantization_config"] = {"quant_method": "fp8"}
    assert "quantization_config" in only_problem(base.write(tmp_path))


def test_dtypes_that_hold_no_weights(tmp_path, base):
    for name, dtype in ((EXPERT.format(0, "up"), ml_dtypes.float8_e4m3fn), ("model.norm.weight", np.float64)):
        base.tensors[name] = base.tensors[name].astype(dtype)
    assert problems_of(base.write(tmp_path)) == [
        "model.norm.weight is stored as F64, one of F32, F16, BF16 is needed",
        f"{EXPERT.format(0, 'up')} is stored as F8_E4M3, one of F32, F16, BF16 is needed",
    ]


def test_directories_without_a_model(tmp_path, base):
    assert only_problem(tmp_path / "nowhere") == "there is no such directory"
    empty = problems_of(tmp_path)
    assert "no config.json" in empty[0]
    assert empty[1] == "no safetensors files"
    (tmp_path / "config.json").write_text(json.dumps(base.config))
    (tmp_path / "pytorch_model.bin").touch()
    assert only_problem(tmp_path) == "no safetensors files, only pytorch_model.bin: convert it to safetensors"


def test_head_is_needed_unless_tied(tmp_path, source):
    tied = source("variants/tied")
    tied.config["tie_word_embeddings"] = False
    assert only_problem(tied.write(tmp_path)) == "lm_head.weight is missing"


def test_merged_and_single_experts_at_once(tmp_path, base):
    base.tensors["model.layers.1.mlp.experts.up_proj"] = np.zeros((8, 16, 32), np.float32)
    problems = problems_of(base.write(tmp_path))
    assert [p.split()[0] for p in problems] == [EXPERT.format(e, "up") for e in range(8)]


def read_all(directory: Path, dtype) -> HfCheckpoint:
    checkpoint = HfCheckpoint.open(directory)
    checkpoint.read_trunk(np.dtype(dtype))
    config = checkpoint.config
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    for i in range(config.num_moe_layers):
        checkpoint.read_pages(i, np.empty((E, 2 * F, D), dtype), np.empty((E, D, F), dtype))
    return checkpoint


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kept", [np.float32, ml_dtypes.bfloat16])
def test_nan_and_inf_are_named(tmp_path, base, stored, kept):
    base.tensors = {name: tensor.astype(stored) for name, tensor in base.tensors.items()}
    base.tensors["model.norm.weight"][3] = np.nan
    base.tensors[EXPERT.format(5, "down")][0, :2] = -np.inf
    base.tensors[EXPERT.format(6, "gate")][1, 1:3] = [np.inf, -np.nan]
    checkpoint = read_all(base.write(tmp_path), kept)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.check_finite()
    assert caught.value.problems == [
        f"{EXPERT.format(5, 'down')} holds 2 inf",
        f"{EXPERT.format(6, 'gate')} holds 1 NaN and 1 inf",
        "model.norm.weight holds 1 NaN",
    ]


def test_nan_in_merged_experts(tmp_path, source):
    merged = source("variants/merged-experts")
    merged.tensors["model.layers.2.mlp.experts.down_proj"][7, 31, 15] = np.nan
    checkpoint = read_all(merged.write(tmp_path), np.float32)
    with pytest.raises(CheckpointError, match=r"layers\.2\.mlp\.experts\.down_proj holds 1 NaN"):
        checkpoint.check_finite()


def test_values_too_large_for_the_dtype_are_named(tmp_path, base):
    base.tensors["lm_head.weight"][0, 0] = 1e6
    base.tensors["model.norm.weight"][0] = -65504  # the largest float16
    checkpoint = read_all(base.write(tmp_path), np.float16)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight holds 1 too large for float16$"):
        checkpoint.check_finite()
