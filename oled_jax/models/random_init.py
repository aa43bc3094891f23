"""Random weights that behave like trained ones where it matters, for benches and tests.

Fast at full size: normal numbers are drawn once and reused from random offsets. Rows of one matrix still
differ, because the number of drawn values shares no factor with the length of a row.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from oled_jax.models.family import StatePath, TrunkTensor

DRAWN = 4_194_301  # a prime
HEAD_GAIN = 4.0  # logits of standard deviation 4: top-1 probabilities spread over (0, 1) at small vocabularies


def draw_normal(rng: np.random.Generator) -> Float32[np.ndarray, " M"]:
    """The numbers that `tile_normal` repeats: standard normal, a prime count of them."""
    return rng.standard_normal(DRAWN, dtype=np.float32)


def tile_normal(
    rng: np.random.Generator,
    array: np.ndarray,
    deviation: float,
    drawn: Float32[np.ndarray, " M"],
    mean: float = 0.0,
) -> None:
    """Fills `array` (C-contiguous, any float dtype) in place with normal numbers, at the speed of a copy.

    Args:
      rng: gives the offset in `drawn` where the array begins.
      deviation, mean: of the numbers.
      drawn: of `draw_normal`; only as much of it is scaled and cast as the array needs.
    """
    if not array.flags.c_contiguous:
        raise ValueError("the array to fill is not contiguous")
    flat = array.reshape(-1)
    offset = int(rng.integers(drawn.size))
    count = min(flat.size, drawn.size)
    first = min(count, drawn.size - offset)
    for start, part in ((0, drawn[offset : offset + first]), (first, drawn[: count - first])):
        flat[start : start + part.size] = mean + deviation * part
    while count < flat.size:
        # Always the first period: it stays in the processor's cache, so that memory is only written.
        step = min(drawn.size, flat.size - count)
        flat[count : count + step] = flat[:step]
        count += step


def random_arrays(tensors: Iterable[TrunkTensor], dtype: str, seed: int) -> dict[StatePath, np.ndarray]:
    """An array for every tensor, in `dtype` (float32 where the tensor asks for it).

    Norm weights lie near 1; projections have variance 1 / inputs, so that hidden states keep unit scale; the
    router's bias is small against its scores, but larger than their ties.
    """
    rng = np.random.default_rng(seed)
    drawn = draw_normal(rng)
    arrays = {}
    for tensor in tensors:
        mean, deviation = _moments(tensor)
        array = np.empty(tensor.shape, np.float32 if tensor.float32 else jnp.dtype(dtype))
        tile_normal(rng, array, deviation, drawn, mean)
        arrays[tensor.path] = array
    return arrays


def _moments(tensor: TrunkTensor) -> tuple[float, float]:
    """Mean and standard deviation of a tensor, by its role."""
    if len(tensor.shape) == 1:
        norm = tensor.path[-1] == "weight"
        return (1.0, 0.1) if norm else (0.0, 0.05)
    if "word_embeddings" in tensor.path or "embed_tokens" in tensor.path:
        return 0.0, 1.0
    gain = HEAD_GAIN if "lm_head" in tensor.path else 1.0
    return 0.0, gain / max(tensor.shape[1], 1) ** 0.5
