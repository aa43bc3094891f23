"""What loops over pages need on every backend."""

from typing import Any, TypeVar

import jax

Operands = TypeVar("Operands", bound=tuple[Any, ...])


def keep_narrow(operands: Operands) -> Operands:
    """The operands of one turn of a loop, kept from being widened as a whole before the loop.

    XLA-CPU of JAX 0.10 computes bfloat16 in float32 and moves the conversion of a loop's constant operands out of it:
    a float32 copy of the whole pool and store, in every pass. A barrier that takes the loop's index stays inside.
    """
    return jax.lax.optimization_barrier(operands) if jax.default_backend() == "cpu" else operands
