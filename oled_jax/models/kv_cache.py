"""Keys and values of earlier passes: a value that a pass takes, updates and returns. The engine owns it.

Keys are stored after norm and rotary, with absolute positions. Every pass writes its chunk; what a denoise
pass leaves is stale as soon as its tokens change, and is overwritten by the block's commit pass, or by the first pass
over the next block, before a mask shows it to a later block (REFERENCE section 5: keys must come from a pass over
final tokens).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from oled_jax.config import ModelConfig


class KVCache(NamedTuple):
    """One array of keys and one of values for each layer, [B, Nk, S, Hd], S = capacity in positions.

    One array per layer, heads before positions: XLA then updates each in place when it is donated and reads
    it without a transposed copy. One array for all layers costs a slice copy per layer, positions before
    heads a transposition.
    """

    keys: tuple[Float[Array, "B Nk S Hd"], ...]
    values: tuple[Float[Array, "B Nk S Hd"], ...]

    @property
    def capacity(self) -> int:
        return self.keys[0].shape[2]


def _shape(config: ModelConfig, batch: int, capacity: int) -> tuple[int, int, int, int]:
    return batch, config.num_key_value_heads, capacity, config.head_dim


def init_kv_cache(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype | str | None = None) -> KVCache:
    """An empty cache for `capacity` positions of `batch` sequences, in `dtype` (default: the model's)."""
    shape, dtype = _shape(config, batch, capacity), jnp.dtype(dtype or config.dtype)
    layers = range(config.num_hidden_layers)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in layers),
        values=tuple(jnp.zeros(shape, dtype) for _ in layers),
    )


def kv_bytes(config: ModelConfig, batch: int, capacity: int, dtype: jnp.dtype | str | None = None) -> int:
    """Bytes that `init_kv_cache` with the same arguments allocates."""
    B, Nk, S, Hd = _shape(config, batch, capacity)
    return 2 * config.num_hidden_layers * B * Nk * S * Hd * jnp.dtype(dtype or config.dtype).itemsize


def write_chunk(
    cached: Float[Array, "B Nk S Hd"], chunk: Float[Array, "B Nk T Hd"], starts: Int[Array, " B"]
) -> Float[Array, "B Nk S Hd"]:
    """`cached` with row b of `chunk` at positions starts[b] to starts[b] + T - 1.

    The caller keeps starts[b] + T within the capacity: XLA would shift a chunk that overhangs to fit,
    silently.
    """
    # One slice update for each row: a vmapped one becomes a scatter, a loop over rows on the CPU.
    for row in range(chunk.shape[0]):
        update = chunk[row : row + 1].astype(cached.dtype)
        cached = jax.lax.dynamic_update_slice(cached, update, (row, 0, starts[row], 0))
    return cached
