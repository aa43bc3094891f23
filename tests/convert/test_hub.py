"""Model names become directories: paths, and hub ids from a cache that the test lays out, without network."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.hub import resolve_model
from oled_jax.errors import UsageError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def lay_out_cache(home: Path, source: Path, model: str) -> Path:
    """`source` as a snapshot in the hub cache under `home`: blobs, and links to them by file name."""
    folder = home / "hub" / f"models--{model.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    for path in (folder / "blobs", folder / "refs", snapshot):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for i, file in enumerate(sorted(source.iterdir())):
        (folder / "blobs" / f"{i:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    return snapshot


def resolve_in_child(model: str, home: Path) -> subprocess.CompletedProcess[str]:
    """huggingface_hub reads its environment when it is imported, so each test needs a process of its own."""
    code = (
        "import sys\n"
        "from oled_jax.convert.hub import resolve_model\n"
        "from oled_jax.errors import UsageError\n"
        "try:\n    print(resolve_model(sys.argv[1]))\n"
        "except UsageError as error:\n    sys.exit(str(error))\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    environment = kept | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", code, model]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_directory(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


def test_directory_in_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert resolve_model("~/model") == tmp_path / "model"


def test_directory_comes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model("org/name") == Path("org/name")


def test_file_instead_of_directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"config\.json is a file: give the directory"):
        resolve_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("model", ["/no/such", "./no/such", "../x", "name", "", "a/b/c", "org/", "org/na me", "-x/y"])
def test_neither_path_nor_hub_id(model):
    with pytest.raises(UsageError, match=r"neither a directory nor a hub id \(org/name\)"):
        resolve_model(model)


def test_cached_model_offline(golden, tmp_path):
    snapshot = lay_out_cache(tmp_path, golden / "llada2-tiny", "some-org/tiny-1.0")
    run = resolve_in_child("some-org/tiny-1.0", tmp_path)
    assert run.returncode == 0, run.stderr
    found = Path(run.stdout.strip())
    assert found.resolve() == snapshot.resolve()
    assert HfCheckpoint.open(found).total_bytes == 1_509_120


def test_offline_and_not_cached(tmp_path):
    run = resolve_in_child("some-org/other", tmp_path)
    assert run.returncode == 1
    assert run.stderr.count("\n") == 1
    assert "model some-org/other is no directory here" in run.stderr
    assert str(tmp_path / "hub") in run.stderr
    assert "HF_HUB_OFFLINE is set: unset it to download" in run.stderr


def hub_that_raises(monkeypatch, error: Exception) -> None:
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


def bare(kind: type[Exception]) -> Exception:
    """An error of the hub's without the HTTP response that its constructor asks for."""
    return kind.__new__(kind, "404 Client Error")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (bare(errors.GatedRepoError), "is gated: accept its terms"),
        (bare(errors.RepositoryNotFoundError), "not on the hub: check the name"),
        (errors.LocalEntryNotFoundError("no"), "the hub cannot be reached: check the network"),
        (
            TimeoutError("timed out\nlong story"),
            r"could not be fetched from the hub \(TimeoutError: timed out\)",
        ),
    ],
)
def test_hub_errors_say_what_to_do(monkeypatch, error, said):
    hub_that_raises(monkeypatch, error)
    with pytest.raises(UsageError, match=said) as caught:
        resolve_model("org/name")
    assert "model org/name" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_the_needed_files_are_asked_for(tmp_path, monkeypatch):
    asked = {}

    def download(model: str, **options: object) -> str:
        asked.update(options, model=model)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path
    names = [
        "config.json",
        "model-1.safetensors",
        "pytorch_model.bin",
        "tokenizer.model",
        "onnx/model.safetensors",
    ]
    names += ["chat_template.jinja", "merges.txt", "model.safetensors.index.json", "modeling.py"]
    patterns = {key: asked[f"{key}_patterns"] for key in ("allow", "ignore")}
    kept = huggingface_hub.utils.filter_repo_objects(
        names, allow_patterns=patterns["allow"], ignore_patterns=patterns["ignore"]
    )
    assert set(kept) == set(names) - {"pytorch_model.bin", "onnx/model.safetensors", "modeling.py"}
