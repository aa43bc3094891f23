"""The store: every page of the model, in host memory, one copy only.

On a GPU the arrays are pinned (page-locked) so that transfers run at the link's speed; on the CPU platform they are
ordinary memory. The loader and the CPU expert backends use NumPy views of the same bytes.
"""

import ctypes
import math
import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.offload.pool import Pool

ALIGNMENT = 64  # XLA-CPU copies operands that are not aligned to this many bytes
PINNED_LIMIT_VARIABLE = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class PageStore:
    """Two arrays per MoE layer, [E, 2F, D] and [E, D, F].

    Writing through `views` is allowed until the first pass uses the store, and never after.
    """

    def __init__(self, layers: Sequence[Pool], *, pinned: bool) -> None:
        self.layers = tuple(layers)
        self.pinned = pinned

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer)

    def views(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """NumPy views of one layer's bytes. They live as long as the store."""
        gate_up, down = self.layers[layer]
        return host_view(gate_up), host_view(down)


def allocate_store(num_layers: int, num_experts: int, hidden: int, width: int, dtype: np.dtype) -> PageStore:
    """A store of unspecified content. hidden: D, width: F.

    Warns and goes on with pageable memory if the driver refuses to pin that much.
    """
    shapes = (num_experts, 2 * width, hidden), (num_experts, hidden, width)
    device = jax.local_devices()[0]
    kinds = ["device"] if device.platform == "cpu" else ["pinned_host", "unpinned_host"]
    for kind in kinds:
        try:
            layers = [Pool(*(_host_array(shape, dtype, device, kind) for shape in shapes)) for _ in range(num_layers)]
        except jax.errors.JaxRuntimeError as error:
            if kind == kinds[-1]:
                raise
            total_gb = num_layers * sum(math.prod(shape) for shape in shapes) * np.dtype(dtype).itemsize / 1e9
            warnings.warn(
                f"cannot pin {total_gb:.1f} GB of host memory ({str(error).splitlines()[0]}); going on with pageable "
                f"memory, transfers will be slower ({PINNED_LIMIT_VARIABLE} raises the limit)",
                stacklevel=2,
            )
        else:
            return PageStore(layers, pinned=kind == "pinned_host")
    raise RuntimeError("unreachable: the last memory kind either returned or raised")


def _host_array(shape: tuple[int, ...], dtype: np.dtype, device: jax.Device, kind: str) -> jax.Array:
    """An uninitialised array. The source is never written, so it occupies no memory of its own while it is copied."""
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
    array = jax.device_put(aligned_empty(shape, dtype), sharding, may_alias=True)
    return jax.block_until_ready(array)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """np.empty at an address that is a multiple of `ALIGNMENT`."""
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes].view(dtype).reshape(shape)


def host_view(array: jax.Array) -> np.ndarray:
    """A writable NumPy view of a host array's own bytes (np.asarray and dlpack copy pinned arrays).

    jax.Array is immutable by contract: the caller must not write once a program has used it.
    """
    pointer = array.unsafe_buffer_pointer()
    raw = (ctypes.c_uint8 * array.nbytes).from_address(pointer)
    return np.ctypeslib.as_array(raw).view(jnp.dtype(array.dtype)).reshape(array.shape)
