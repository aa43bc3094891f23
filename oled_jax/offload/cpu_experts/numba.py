"""The numba backend: a compiled kernel that reads pages as stored. numba is an optional extra."""

import importlib
from types import ModuleType

import numpy as np
from jaxtyping import Float

from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts.workers import ThreadedCpuExperts


def _load_kernel() -> ModuleType:
    try:
        return importlib.import_module("oled_jax.offload.cpu_experts.numba_kernel")
    except ImportError as error:
        raise UsageError(
            f"CPU experts: numba cannot be imported ({error}); install oled_jax[numba] or choose xla or numpy"
        ) from error


class NumbaExperts(ThreadedCpuExperts):
    """Row dot products, weights widened in registers. Building it compiles for the pages' dtype (seconds)."""

    name = "numba"

    def _prepare(self) -> None:
        self._kernel = _load_kernel()
        # numba has no bfloat16 and little float16: an integer type of the same width names the format.
        dtype = self.pages[0][0].dtype
        stored = np.float32 if dtype == np.float32 else np.int16 if dtype == np.float16 else np.uint16
        self._stored = [(gate_up.view(stored), down.view(stored)) for gate_up, down in self.pages]
        self._compute(0, 0, slice(0, 1), np.zeros((1, self.pages[0][0].shape[2]), dtype))

    def _compute(
        self, layer: int, expert: int, columns: slice, x: Float[np.ndarray, "n D"]
    ) -> Float[np.ndarray, "n D"]:
        gate_up, down = self._stored[layer]
        even = np.zeros((len(x) + len(x) % 2, x.shape[1]), np.float32)
        even[: len(x)] = x
        out = self._kernel.expert(gate_up[expert], down[expert], even, columns.start, columns.stop - columns.start)
        return out[: len(x)]
