"""Files of a checkpoint that are no weights: which ones there are, and copies of them."""

import json
import os
import zlib
from pathlib import Path
from typing import Any

from oled_jax.convert.manifest import MANIFEST_NAME, CopiedFile
from oled_jax.convert.pieces import format_crc
from oled_jax.convert.shards import INDEX_NAME
from oled_jax.convert.staging import JOB_NAME
from oled_jax.errors import CheckpointError

WEIGHT_ENDINGS = (
    ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".npz", ".onnx", ".index.json", ".incomplete",
)  # fmt: skip
TEMPLATE_FOLDER = "additional_chat_templates"  # transformers reads named templates from it
LARGEST_BYTES = 200_000_000  # vocabularies reach 20 MB; beyond this a file is weights under another name


def companion_files(directory: Path) -> list[str]:
    """Configuration, tokenizer, templates, code, licence, model card: relative names, sorted."""
    folders = [directory, directory / TEMPLATE_FOLDER]
    found = []
    for path in sorted(path for folder in folders if folder.is_dir() for path in folder.iterdir()):
        hidden = path.name.startswith(".") or path.name in (INDEX_NAME, MANIFEST_NAME, JOB_NAME)
        if hidden or path.name.endswith(WEIGHT_ENDINGS) or not path.is_file():
            continue
        if path.stat().st_size <= LARGEST_BYTES:
            found.append(str(path.relative_to(directory)))
    return found


def copy_file(source: Path, target: Path, name: str) -> CopiedFile:
    """Copies one companion file.

    Raises:
      CheckpointError: the source cannot be read.
      OSError: the target cannot be written.
    """
    try:
        content = (source / name).read_bytes()
    except OSError as error:
        raise CheckpointError(str(source / name), [f"cannot be read ({error.strerror})"]) from error
    return write_file(target, name, content)


def write_file(target: Path, name: str, content: bytes) -> CopiedFile:
    """Writes one companion file, on the disk when this returns."""
    path = target / name
    path.parent.mkdir(exist_ok=True)
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    return CopiedFile(name=name, nbytes=len(content), crc32=format_crc(zlib.crc32(content)))


def config_with_dtype(raw: dict[str, Any], dtype: str) -> bytes:
    """`config.json` that names another dtype, under the key that it uses."""
    key = "torch_dtype" if "torch_dtype" in raw and "dtype" not in raw else "dtype"
    return (json.dumps(raw | {key: dtype}, indent=2, ensure_ascii=False) + "\n").encode()
