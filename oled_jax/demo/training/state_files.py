"""Training states on disk: safetensors files small enough to travel, a JSON file, and the tokenizer.

Float32 weights are always there. The optimiser's moments triple the size and may be left out: a run that goes
on without them warms up again.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer

from oled_jax.demo.training.step import BIAS, StepSettings, TrainState, new_state, optimiser, parameter_shapes
from oled_jax.errors import UsageError

MAX_FILE_BYTES = 14 << 20
STATE_FILE, TOKENIZER_FILE = "state.json", "tokenizer.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedState:
    """What a state directory holds.

    record: of the run so far (steps, tokens, seconds, log, scores): JSON values.
    """

    state: TrainState
    has_moments: bool
    tokenizer: Tokenizer
    raw_config: dict[str, Any]
    record: dict[str, Any]


def save_state(
    directory: Path,
    state: TrainState,
    *,
    moments: bool,
    tokenizer: Tokenizer,
    raw_config: Mapping[str, Any],
    record: Mapping[str, Any],
) -> None:
    """Writes a state over an older one. `state.json` comes last, so that it never names files that are not there."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / STATE_FILE).unlink(missing_ok=True)
    for old in directory.glob("state-*.safetensors"):
        old.unlink()
    arrays = {name: np.asarray(value) for name, value in state.params.items()}
    arrays[BIAS] = np.asarray(state.bias)
    if moments:
        leaves = jax.tree_util.tree_leaves(state.moments)
        arrays |= {f"moments.{number:05d}": np.asarray(leaf) for number, leaf in enumerate(leaves)}
    files = []
    for number, part in enumerate(_parts(arrays)):
        files.append(f"state-{number:03d}.safetensors")
        save_file(part, directory / files[-1])
    tokenizer.save(str(directory / TOKENIZER_FILE), pretty=False)
    described = {
        "step": int(state.step),
        "moments": moments,
        "files": files,
        "config": dict(raw_config),
        "record": dict(record),
    }
    (directory / STATE_FILE).write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


def _parts(arrays: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The arrays in order, cut into groups of at most MAX_FILE_BYTES (a single larger array is alone)."""
    parts: list[dict[str, np.ndarray]] = [{}]
    for name, array in arrays.items():
        if parts[-1] and sum(a.nbytes for a in parts[-1].values()) + array.nbytes > MAX_FILE_BYTES:
            parts.append({})
        parts[-1][name] = np.asarray(array, order="C")  # ascontiguousarray would make a scalar an array of one
    return parts


def read_described(directory: Path) -> dict[str, Any]:
    """`state.json`. Raises UsageError if it is not there or damaged."""
    try:
        described = json.loads((directory / STATE_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{directory} holds no finished training state: {STATE_FILE} cannot be read") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{directory / STATE_FILE} is damaged: {error.msg}") from error
    return described


def load_state(directory: Path, settings: StepSettings) -> SavedState:
    """Reads a state for a model of this shape.

    Raises:
      UsageError: no state, a damaged one, or one of a model of another shape.
    """
    described = read_described(directory)
    arrays: dict[str, np.ndarray] = {}
    for name in described["files"]:
        try:
            arrays |= load_file(directory / name)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"training state {directory / name} cannot be read: {error}") from error
    shapes = parameter_shapes(settings.config)
    for name, shape in shapes.items():
        if name not in arrays or arrays[name].shape != shape:
            raise UsageError(f"training state {directory}: {name} is missing or not {list(shape)}")
    state = new_state(settings, {name: arrays[name] for name in shapes}, arrays[BIAS])
    state = state._replace(step=jnp.asarray(described["step"], jnp.int32))
    if described["moments"]:
        treedef = jax.tree_util.tree_structure(optimiser(settings).init(state.params))
        leaves = [jnp.asarray(arrays[name]) for name in sorted(arrays) if name.startswith("moments.")]
        state = state._replace(moments=jax.tree_util.tree_unflatten(treedef, leaves))
    return SavedState(
        state=state,
        has_moments=described["moments"],
        tokenizer=Tokenizer.from_file(str(directory / TOKENIZER_FILE)),
        raw_config=described["config"],
        record=described["record"],
    )
