"""Where the trained model lies inside the installed package, and whether its files are whole."""

import importlib.resources
import json
from pathlib import Path

from oled_jax.convert.hf import HfCheckpoint
from oled_jax.errors import CheckpointError, UsageError

LABEL = "demo"
PROMPT = "Tell me a story about a fox and a kite."
NOTICE = "no --model was given: this is the small trained model inside the package (stories, sums, functions, facts)"
NEEDED = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
REINSTALL = "reinstall the package: pip install --force-reinstall --no-deps oled_jax"


def demo_model_dir() -> Path:
    """The directory of the shipped model, its files present and in order (headers are read, weights are not).

    Raises:
      UsageError: names the file that is missing or damaged, and how to get it back.
    """
    return check_model_dir(Path(str(importlib.resources.files("oled_jax.demo") / "model")))


def check_model_dir(directory: Path) -> Path:
    """The directory, once all files of the shipped model are found whole in it. Raises as `demo_model_dir`."""
    for name in NEEDED:
        path = directory / name
        if not path.is_file():
            raise UsageError(f"the shipped model lacks {path}: {REINSTALL}")
        if path.suffix == ".json":
            _check_json(path)
    try:
        HfCheckpoint.open(directory)
    except CheckpointError as error:
        weights = directory / "model.safetensors"
        raise UsageError(f"the shipped model {weights} is damaged ({error}): {REINSTALL}") from error
    return directory


def _check_json(path: Path) -> None:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"the shipped model's {path} is damaged ({error}): {REINSTALL}") from error
