"""The half of each row that a pass over two blocks is about (`folding.py`)."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped


def own_blocks(folds: Bool[Array, " B"] | None, values: Shaped[Array, "B _ ..."]) -> Shaped[Array, "B _ ..."]:
    """What `folding.place_blocks` got as `own`; all of the values if `folds` is None: the pass is one block wide."""
    if folds is None:
        return values
    first, second = jnp.split(values, 2, axis=1)
    return jnp.where(folds.reshape(-1, *(1,) * (values.ndim - 1)), second, first)
