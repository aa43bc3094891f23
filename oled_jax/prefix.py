"""Keys and values that outlive a run: those of the blocks with which the next prompt begins, too.

A conversation owns a `KeptPrefix`. A run takes the KV cache out and gives it back when it ends, so a run that broke
leaves none. Attention is causal between blocks: whole blocks of equal tokens have equal keys and values, and the first
block that differs ends what can be kept. They were computed in passes of other shapes, so they equal those of a fresh
start up to rounding.
"""

import numpy as np
from jaxtyping import Int32

from oled_jax.config import ModelConfig
from oled_jax.models.kv_cache import KVCache

LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary types whose angles depend on the length of the whole sequence


class KeptPrefix:
    """The KV cache of one sequence between runs.

    Args:
      config: the model's.
      positions: capacity of the cache, a chunk more than the longest text, or two blocks where commits are folded.
      chunk: positions of a prefill pass, whole blocks.
      block_length: of every run.

    Attributes:
      reused: positions of the last prompt that were there already.
    """

    def __init__(self, config: ModelConfig, positions: int, chunk: int, block_length: int) -> None:
        scaling = config.rope_scaling
        self.positions = positions
        self.block_length = block_length
        self.chunk = chunk
        self.reused = 0
        self._keeps = scaling is None or scaling.rope_type not in LENGTH_DEPENDENT
        self._cache: KVCache | None = None
        self._tokens: list[int] = []  # whose keys and values are final
        self._block: list[int] = []  # the one that follows, as the last pass saw it

    def take(self) -> KVCache | None:
        """The cache of the last run, for a run that begins; None if there is none."""
        cache, self._cache = self._cache, None
        if cache is None or not self._keeps:
            self._tokens = []
            return None
        return cache

    def begin(self, prompt: Int32[np.ndarray, " P"]) -> int:
        """The run's whole prompt blocks. Returns how many positions of them need no pass."""
        L, held = self.block_length, np.asarray(self._tokens, np.int32)
        shared = min(prompt.size, held.size) // L * L
        differs = np.flatnonzero(prompt[:shared] != held[:shared])
        same = int(differs[0]) // L * L if differs.size else shared
        passes = -(-(prompt.size - same) // self.chunk)
        if same + passes * self.chunk > self.positions:
            same = 0
        self._tokens, self._block, self.reused = self._tokens[:same], [], same
        return same

    def prefilled(self, prompt: Int32[np.ndarray, " P"]) -> None:
        """These are in the cache now."""
        self._tokens = prompt.tolist()

    def saw(self, start: int, block: Int32[np.ndarray, " T"]) -> None:
        """A pass over the block at `start` ran. If it is a new one, the pass before saw the old one's final tokens."""
        if start == len(self._tokens) + self.block_length:
            self._tokens += self._block
        self._block = block.tolist()

    def give_back(self, cache: KVCache) -> None:
        """The run has ended."""
        broken = any(array.is_deleted() for array in cache.keys)
        self._cache = None if broken else cache
        if broken:
            self._tokens = []
