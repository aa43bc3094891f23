"""Parts that every family builds its trunk from: linear, norm, embedding, gated feed-forward, attention.

Pure functions do the arithmetic, modules hold the weights. Weights keep Hugging Face's orientation [out, in]
and names, so that a checkpoint tensor fills a state leaf as it stands. No module knows which layer it belongs
to.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from oled_jax.models.kv_cache import write_chunk

# The keys and values of one layer in a KV cache.
LayerCache = tuple[Float[Array, "B Nk S Hd"], Float[Array, "B Nk S Hd"]]


def matmul_precision(dtype: jnp.dtype) -> jax.lax.Precision | None:
    """Full precision for float32, which a GPU or TPU would otherwise round to TF32 or bfloat16."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None


def linear(x: Float[Array, "*N I"], weight: Float[Array, "O I"]) -> Float[Array, "*N O"]:
    """x Wᵀ in x's dtype."""
    return jnp.einsum("...i,oi->...o", x, weight, precision=matmul_precision(x.dtype))


def head_logits(hidden: Float[Array, "*N D"], weight: Float[Array, "V D"]) -> Float[Array, "*N V"]:
    """The head in the working dtype, then cast up to float32."""
    return linear(hidden, weight).astype(jnp.float32)


@functools.partial(jax.jit, static_argnames="eps")
def rms_norm(x: Float[Array, "*N D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*N D"]:
    """x over its root mean square in float32, cast to x's dtype, only then times the weight (REFERENCE 4)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


@jax.jit
def swiglu(
    x: Float[Array, "*N D"], gate: Float[Array, "F D"], up: Float[Array, "F D"], down: Float[Array, "D F"]
) -> Float[Array, "*N D"]:
    """down(silu(gate(x)) · up(x)), each step in x's dtype; silu is evaluated in float32 and rounded once."""
    activated = jax.nn.silu(linear(x, gate).astype(jnp.float32)).astype(x.dtype)
    return linear(activated * linear(x, up), down)


@jax.jit
def attend(
    queries: Float[Array, "B T Nq Hd"],
    keys: Float[Array, "B Nk S Hd"],
    values: Float[Array, "B Nk S Hd"],
    mask: Bool[Array, "B T S"],
) -> Float[Array, "B T Nq Hd"]:
    """Grouped-query attention: query head q uses key/value head q div (Nq/Nk).

    Scores and softmax are float32. Hidden scores become the most negative finite number, not -inf: a row that
    sees nothing (padding) then averages instead of turning into NaN. The result has the queries' dtype.
    """
    B, T, Nq, Hd = queries.shape
    Nk = keys.shape[1]
    precision = matmul_precision(queries.dtype)
    grouped = queries.reshape(B, T, Nk, Nq // Nk, Hd)
    scores = jnp.einsum("btngh,bnsh->bngts", grouped, keys, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None], scores * Hd**-0.5, jnp.finfo(jnp.float32).min)
    # Weights are rounded to the values' dtype before they are normalised, as fused attention kernels do.
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    context = jnp.einsum(
        "bngts,bnsh->bngth",
        weights.astype(values.dtype),
        values,
        precision=precision,
        preferred_element_type=jnp.float32,
    )
    context = context / jnp.sum(weights, axis=-1, keepdims=True)
    context = context.transpose(0, 3, 1, 2, 4)
    return context.reshape(B, T, Nq, Hd).astype(queries.dtype)


class Linear(nnx.Module):
    """Weight [out, in] and, where asked for, a bias [out]."""

    def __init__(self, inputs: int, outputs: int, *, dtype: jnp.dtype, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype)) if bias else None

    def __call__(self, x: Float[Array, "*N I"]) -> Float[Array, "*N O"]:
        y = linear(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Weight [V, D]."""

    def __init__(self, rows: int, width: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.zeros((rows, width), dtype))

    def __call__(self, token_ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return jnp.take(self.weight[...], token_ids, axis=0, mode="clip")


class RMSNorm(nnx.Module):
    """Weight [D]; see `rms_norm`."""

    def __init__(self, width: int, *, eps: float, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((width,), dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        return rms_norm(x, self.weight[...], self.eps)


class MLP(nnx.Module):
    """Gated feed-forward of the given inner width (0 is legal and adds zero); see `swiglu`."""

    def __init__(self, hidden: int, width: int, *, dtype: jnp.dtype):
        self.gate_proj = Linear(hidden, width, dtype=dtype)
        self.up_proj = Linear(hidden, width, dtype=dtype)
        self.down_proj = Linear(width, hidden, dtype=dtype)

    def __call__(self, x: Float[Array, "*N D"]) -> Float[Array, "*N D"]:
        weights = (self.gate_proj.weight[...], self.up_proj.weight[...], self.down_proj.weight[...])
        return swiglu(x, *weights)


class Attention(nnx.Module):
    """Grouped-query attention, with a KV cache or without. A family's subclass holds the weights."""

    def project(
        self, x: Float[Array, "B T D"], tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]]
    ) -> tuple[Float[Array, "B T Nq Hd"], Float[Array, "B T Nk Hd"], Float[Array, "B T Nk Hd"]]:
        """Queries, keys and values as attention takes them: norm first, then rotary; values get neither."""
        raise NotImplementedError

    def output(self, context: Float[Array, "B T H"]) -> Float[Array, "B T D"]:
        """The projection of the merged heads, H = Nq · Hd."""
        raise NotImplementedError

    def __call__(
        self,
        x: Float[Array, "B T D"],
        tables: tuple[Float[Array, "B T R"], Float[Array, "B T R"]],
        mask: Bool[Array, "B T S"],
        cache: LayerCache | None = None,
        starts: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T D"], LayerCache | None]:
        """Attention over the chunk's own keys, or over the cache after this chunk was written into it."""
        B, T, _ = x.shape
        queries, keys, values = self.project(x, tables)
        keys, values = keys.swapaxes(1, 2), values.swapaxes(1, 2)
        if cache is not None:
            if starts is None:
                raise RuntimeError("a pass with a KV cache needs the start position of every row")
            cache = (write_chunk(cache[0], keys, starts), write_chunk(cache[1], values, starts))
            keys, values = cache
        return self.output(attend(queries, keys, values, mask).reshape(B, T, -1)), cache
