"""Comparing finds what sorting finds, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oled_jax.ops.top_experts import best_groups, top_experts


def draw(seed, N, E):
    """Rows with ties, zeros of both signs, infinities, and one of equal values."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((N, E)).astype(np.float32)
    values[1] = np.round(values[1])
    values[2] = 0.25
    values[3, ::3] = -np.inf
    values[4] = np.where(rng.random(E) < 0.5, 0.0, -0.0)
    return values


@pytest.mark.parametrize(("N", "E", "K"), [(5, 1, 1), (5, 8, 8), (16, 128, 4), (32, 256, 8), (5, 60, 7)])
def test_the_same_experts_in_the_same_order(N, E, K):
    values, of = draw(0, N, E), draw(1, N, E)
    for given in (None, of):
        found = [
            jax.jit(top_experts, static_argnames=("count", "compare"))(values, K, given, compare=c)
            for c in (False, True)
        ]
        for sorted_, compared in zip(*found, strict=True):
            np.testing.assert_array_equal(sorted_, compared)
            assert sorted_.dtype == compared.dtype


@pytest.mark.parametrize(("G", "M", "passing"), [(2, 2, 1), (8, 32, 4), (8, 16, 4), (4, 3, 3), (3, 5, 3)])
def test_the_same_groups(G, M, passing):
    for seed in range(5):
        grouped = jnp.abs(draw(seed, 16, G * M)).reshape(16, G, M)
        found = [best_groups(grouped, passing, compare=c) for c in (False, True)]
        np.testing.assert_array_equal(*found)
        assert (found[0].sum(-1) == passing).all()


def test_what_is_no_number_is_sorted_alike():
    values = draw(0, 8, 12)
    values[5, [2, 7]], values[6] = np.nan, np.nan
    _, sorted_ = top_experts(jnp.asarray(values), 5, compare=False)
    _, compared = top_experts(jnp.asarray(values), 5, compare=True)
    np.testing.assert_array_equal(sorted_, compared)
