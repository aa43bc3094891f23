"""The reference CPU backend: NumPy, nothing else. Slow beside the compiled ones, and it runs everywhere."""

import threading

import numpy as np
from jaxtyping import Float

from oled_jax.offload.cpu_experts.workers import ThreadedCpuExperts

TILE_BYTES = 512 * 1024  # a tile of widened weights stays in a core's second-level cache


class NumpyExperts(ThreadedCpuExperts):
    """Widens weights tile by tile into a reused float32 buffer of each thread, then takes row dot products.

    `np.vecdot`, not `np.matmul`: a product large enough wakes the threads of the BLAS library, and those
    fight with these workers (two workers on two cores: 50 ms a page instead of 2). The dot product of one row
    stays in its thread.
    """

    name = "numpy"

    def _prepare(self) -> None:
        self._local = threading.local()

    def _compute(
        self, layer: int, expert: int, columns: slice, x: Float[np.ndarray, "n D"]
    ) -> Float[np.ndarray, "n D"]:
        gate_up, down = self.pages[layer][0][expert], self.pages[layer][1][expert]
        F = down.shape[1]
        x = x.astype(np.float32)
        gate = self._project(gate_up[:F][columns], x)
        up = self._project(gate_up[F:][columns], x)
        return self._project(down[:, columns], gate / (1 + np.exp(-gate)) * up)

    def _project(self, weights: Float[np.ndarray, "r c"], x: Float[np.ndarray, "n c"]) -> Float[np.ndarray, "n r"]:
        """x @ weights.T in float32."""
        rows, width = weights.shape
        out = np.empty((len(x), rows), np.float32)
        if weights.dtype == np.float32:
            return np.vecdot(x[:, None], weights, out=out)
        tile = max(1, TILE_BYTES // (4 * width))
        buffer = self._buffer(min(tile, rows) * width)
        for start in range(0, rows, tile):
            part = weights[start : start + tile]
            wide = buffer[: part.size].reshape(part.shape)
            np.copyto(wide, part)
            np.vecdot(x[:, None], wide, out=out[:, start : start + tile])
        return out

    def _buffer(self, size: int) -> Float[np.ndarray, " size"]:
        buffer = getattr(self._local, "buffer", None)
        if buffer is None or buffer.size < size:
            buffer = self._local.buffer = np.empty(size, np.float32)
        return buffer
