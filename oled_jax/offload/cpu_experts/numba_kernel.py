"""The arithmetic of the numba backend: one expert, or a slice of its width, in one call without the GIL.

Weights arrive as stored: the integer type of an array says its format (uint16: bfloat16, int16: float16),
float32 as itself. They are widened in registers, so a page is read once from memory and never written.
"""

import math
from typing import Any, no_type_check

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Sums may be reordered, which is what makes them vectors; NaN and infinity must survive to be reported.
FAST = {"reassoc", "contract", "nsz"}


@intrinsic
@no_type_check
def _widen(context: Any, bits: Any) -> Any:
    """One stored weight as float32."""

    def bfloat16(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(wide, ir.Constant(ir.IntType(32), 16)), ir.FloatType())

    def float16(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    def float32(_: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    formats = {types.uint16: bfloat16, types.int16: float16, types.float32: float32}
    return types.float32(bits), formats[bits]


def _compiled(function: Any) -> Any:
    """Compiled when it is called, or found where an earlier process has left it: compiling takes seconds."""
    try:
        return njit(nogil=True, fastmath=FAST, cache=True)(function)
    except RuntimeError:  # neither beside this file nor in the user's cache directory can anything be written
        return njit(nogil=True, fastmath=FAST)(function)


# Two weight rows against four or two tokens: each value loaded is used in two or more products.


@_compiled
@no_type_check  # numba compiles the plain function, not one wrapped in shape checks
def _dots4(v: Any, w: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    va = vb = vc = vd = wa = wb = wc = wd = np.float32(0)
    for i in range(len(v)):
        p, q = _widen(v[i]), _widen(w[i])
        va += p * a[i]
        vb += p * b[i]
        vc += p * c[i]
        vd += p * d[i]
        wa += q * a[i]
        wb += q * b[i]
        wc += q * c[i]
        wd += q * d[i]
    return (va, vb, vc, vd), (wa, wb, wc, wd)


@_compiled
@no_type_check
def _dots2(v: Any, w: Any, a: Any, b: Any) -> Any:
    va = vb = wa = wb = np.float32(0)
    for i in range(len(v)):
        p, q = _widen(v[i]), _widen(w[i])
        va += p * a[i]
        vb += p * b[i]
        wa += q * a[i]
        wb += q * b[i]
    return (va, vb), (wa, wb)


@_compiled
@no_type_check
def _two_rows(v: Any, w: Any, x: Any, out_v: Any, out_w: Any) -> None:
    """out_v[k] = v . x[k] and out_w[k] = w . x[k] for an even number of tokens."""
    n = len(x)
    k = 0
    while k + 4 <= n:
        of_v, of_w = _dots4(v, w, x[k], x[k + 1], x[k + 2], x[k + 3])
        for j in range(4):
            out_v[k + j] = of_v[j]
            out_w[k + j] = of_w[j]
        k += 4
    if k < n:
        (out_v[k], out_v[k + 1]), (out_w[k], out_w[k + 1]) = _dots2(v, w, x[k], x[k + 1])


@_compiled
@no_type_check
def expert(gate_up: Any, down: Any, x: Any, first: int, width: int) -> Any:
    """down[:, s] @ (silu(gate @ x) * (up @ x))[s], s = first : first + width.

    gate_up [2F, D], down [D, F] stored weights; x [n, D] float32, n even. Returns float32 [n, D].
    """
    n = len(x)
    D, F = down.shape
    gate = np.empty(n, np.float32)
    up = np.empty(n, np.float32)
    hidden = np.empty((n, width), np.float32)
    for f in range(width):
        _two_rows(gate_up[first + f], gate_up[F + first + f], x, gate, up)
        for k in range(n):
            hidden[k, f] = gate[k] / (np.float32(1) + math.exp(-gate[k])) * up[k]
    out = np.empty((n, D), np.float32)
    for d in range(0, D, 2):
        e = min(d + 1, D - 1)  # an odd last row is paired with itself
        _two_rows(down[d, first : first + width], down[e, first : first + width], hidden, out[:, d], out[:, e])
    return out
