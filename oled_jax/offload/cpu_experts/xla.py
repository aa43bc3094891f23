"""The XLA-CPU backend: one small compiled program per expert, run from our own worker threads.

Owns JAX arrays that alias the store's pages (XLA copies a page that is not 64-byte aligned, 5 ms instead of
0.2) and one compiled program per row count. The programs run without XLA's intra-op threads: those would spin
beside the workers, and on the CPU platform they are the threads that a model program blocks while its
callback waits here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts.workers import ThreadedCpuExperts

ALIGNMENT = 64
# Rows are padded to one of these; more go in pieces of the last. Not 1: for one row XLA widens the page.
BUCKETS = (2, 4, 8, 16, 32, 64)


@functools.partial(jax.jit, compiler_options={"xla_cpu_multi_thread_eigen": False})
def _expert(gate_up: Float[Array, "F2 D"], down: Float[Array, "D F"], x: Float[Array, "n D"]) -> Float[Array, "n D"]:
    gate, up = jnp.split(jnp.einsum("nd,fd->nf", x, gate_up, preferred_element_type=jnp.float32), 2, axis=1)
    hidden = jax.nn.silu(gate) * up
    if x.dtype != jnp.bfloat16:
        return jnp.einsum("nf,df->nd", hidden, down.astype(jnp.float32), preferred_element_type=jnp.float32)
    # A float32 operand would make XLA widen the page in memory. Two bfloat16 rows carry 16 bits of each value
    # instead, at no cost that shows: the page is read once for both.
    high = hidden.astype(x.dtype)
    low = (hidden - high.astype(jnp.float32)).astype(x.dtype)
    both = jnp.einsum("nf,df->nd", jnp.concatenate([high, low]), down, preferred_element_type=jnp.float32)
    return both[: len(x)] + both[len(x) :]


class XlaExperts(ThreadedCpuExperts):
    """Whole pages only (a slice of down would be copied); float16 pages are widened by XLA on every use."""

    name = "xla"
    max_parts = 1

    def _prepare(self) -> None:
        try:
            self._device = jax.local_devices(backend="cpu")[0]
        except RuntimeError as error:
            raise UsageError(
                "CPU experts: xla needs JAX's CPU platform beside the accelerator's; unset JAX_PLATFORMS "
                f"or add cpu to it ({error})"
            ) from error
        self._aliases: list[list[tuple[jax.Array, jax.Array]] | None] = [
            self._alias(layer) for layer in range(len(self.pages))
        ]
        copied = [layer for layer, aliases in enumerate(self._aliases) if aliases is None]
        if copied:
            self.notes += (
                f"CPU experts: xla copies every page it uses in {len(copied)} MoE layers: their pages are "
                f"not {ALIGNMENT}-byte aligned; this is slow, choose numba or numpy",
            )
        D = self.pages[0][0].shape[2]
        for rows in BUCKETS:  # compiled now: a compilation inside a callback would stall the device
            self._compute(0, 0, slice(None), np.zeros((rows, D), self.pages[0][0].dtype))

    def _alias(self, layer: int) -> list[tuple[jax.Array, jax.Array]] | None:
        """JAX arrays over a layer's pages, or None if XLA would copy them."""
        E = len(self.pages[layer][0])
        views = [(self.pages[layer][0][expert], self.pages[layer][1][expert]) for expert in range(E)]
        # Pages lie equally far apart: the first two tell of all.
        if any(view.ctypes.data % ALIGNMENT for pair in views[:2] for view in pair):
            return None
        aliases = [
            (
                jax.device_put(gate_up, self._device, may_alias=True),
                jax.device_put(down, self._device, may_alias=True),
            )
            for gate_up, down in views
        ]
        for pair, alias in zip(views, aliases, strict=True):
            for view, array in zip(pair, alias, strict=True):
                if array.unsafe_buffer_pointer() != view.ctypes.data:
                    raise RuntimeError(f"CPU experts (xla): XLA copied an aligned page of MoE layer {layer}")
        return aliases

    def _compute(
        self, layer: int, expert: int, columns: slice, x: Float[np.ndarray, "n D"]
    ) -> Float[np.ndarray, "n D"]:
        aliases = self._aliases[layer]
        if aliases is not None:
            gate_up, down = aliases[expert]
        else:
            gate_up, down = (jax.device_put(page[expert], self._device) for page in self.pages[layer])
        out = np.empty(x.shape, np.float32)
        for start in range(0, len(x), BUCKETS[-1]):
            piece = x[start : start + BUCKETS[-1]]
            rows = next(bucket for bucket in BUCKETS if bucket >= len(piece))
            padded = np.zeros((rows, x.shape[1]), x.dtype)
            padded[: len(piece)] = piece
            y = _expert(gate_up, down, padded)  # runs where the page is
            out[start : start + len(piece)] = np.asarray(y)[: len(piece)]
        return out
