"""The reference's recorded forward calls of one checkpoint, stacked, and comparisons with what a model computes.

All cases run as one batch, padded to one length, so that a model is compiled once for them: a mask keeps the padding
out. Each is compared for itself.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from golden_checkpoints import Checkpoint
from safetensors.numpy import load_file

from oled_jax.models.moe import DenseExperts
from oled_jax.models.trunk import full_mask

HIDDEN_TOLERANCE, LOGIT_TOLERANCE, GATE_TOLERANCE = 1e-4, 1e-4, 1e-5
HEADS_FIRST = {"q_normed", "k_normed", "q_rope", "k_rope", "v"}  # [rows, heads, T, head_dim] in the file


class GoldenForward:
    """Tensors of all cases as [rows, T, ...]; `mask` [rows, T, T] says who sees whom."""

    def __init__(self, golden: Path, name: str) -> None:
        self.cases: dict[str, dict[str, np.ndarray]] = {}
        for key, value in load_file(golden / f"{name}-forward.safetensors").items():
            case, _, tensor = key.partition("/")
            heads_first = tensor.rpartition(".")[2] in HEADS_FIRST
            self.cases.setdefault(case, {})[tensor] = value.swapaxes(1, 2) if heads_first else value
        assert set(self.cases) == set(json.loads((golden / f"{name}-forward.json").read_text())["cases"])
        self.T = max(case["input_ids"].shape[1] for case in self.cases.values())
        self.tensors = {
            tensor: np.concatenate([self._pad(case[tensor], 1) for case in self.cases.values()])
            for tensor in next(iter(self.cases.values()))
            if tensor != "attention_mask"
        }
        if "attention_mask" in next(iter(self.cases.values())):
            masks = [self._pad(self._pad(case["attention_mask"][:, 0], 1), 2) for case in self.cases.values()]
            self.mask = np.concatenate(masks).astype(bool)
        else:  # attention goes both ways: the reference takes no mask
            real = [self._pad(np.ones(case["input_ids"].shape, bool), 1) for case in self.cases.values()]
            self.mask = np.asarray(full_mask(jnp.asarray(np.concatenate(real))))

    def _pad(self, array: np.ndarray, axis: int) -> np.ndarray:
        width = [(0, self.T - array.shape[axis] if number == axis else 0) for number in range(array.ndim)]
        return np.pad(array, width)

    def same(self, actual: Any, tensor: str, tolerance: float = HIDDEN_TOLERANCE) -> None:
        """The real positions of every case agree; tolerance 0: exactly."""
        actual = np.asarray(actual).reshape(self.tensors[tensor].shape)
        row = 0
        for name, case in self.cases.items():
            expected = case[tensor]
            found = actual[row : row + len(expected), : expected.shape[1]]
            np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance, err_msg=f"{name}: {tensor}")
            row += len(expected)


class RecordingExperts(NamedTuple):
    """Resident experts whose carry collects what the router chose."""

    experts: DenseExperts

    def __call__(self, layer: int, x: Any, ids: Any, gates: Any, carry: dict[int, Any]) -> tuple[Any, dict[int, Any]]:
        y, _ = self.experts(layer, x, ids, gates, None)
        return y, {**carry, layer: ids}


def check_model(checkpoint: Checkpoint, cases: GoldenForward) -> None:
    """Hidden states, logits and routes of the whole model."""
    assert checkpoint.experts is not None
    inputs = [jnp.asarray(cases.tensors[name], jnp.int32) for name in ("input_ids", "position_ids")]
    experts = RecordingExperts(checkpoint.experts)
    hidden, cache, chosen = checkpoint.forward(*inputs, jnp.asarray(cases.mask), experts=experts, carry={})
    assert cache is None
    cases.same(hidden, "final_norm")
    cases.same(checkpoint.model.logits(hidden), "logits", LOGIT_TOLERANCE)
    layers = checkpoint.family.moe_layers(checkpoint.config)
    assert sorted(chosen) == list(range(len(layers)))
    for moe_layer, layer in enumerate(layers):
        cases.same(chosen[moe_layer], f"layers.{layer}.topk_idx", 0)
