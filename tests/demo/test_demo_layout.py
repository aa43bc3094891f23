"""Rows, noise, grouped experts, router and attention of training: they compute what inference does."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toy import CONFIG, SETTINGS, SHAPE, random_state

from oled_jax.demo.training.experts import GroupedExperts, group, item_rows
from oled_jax.demo.training.forward import Layout, block_numbers, forward
from oled_jax.demo.training.routing import route
from oled_jax.demo.training.rows import ANSWER, PADDING, PROMPT, make_rows, stream_rows
from oled_jax.demo.training.step import Batch, add_noise, build_model, init_params, new_state, train_step
from oled_jax.demo.training.vocabulary import EOS_ID, MASK_ID
from oled_jax.models import moe
from oled_jax.models.trunk import block_mask


def dense(experts: GroupedExperts) -> moe.DenseExperts:
    return moe.DenseExperts(jnp.stack(experts.gate_up), jnp.stack(experts.down))


@pytest.mark.parametrize("crowded", [False, True])
def test_grouping_is_a_bijection_with_one_expert_per_item(crowded):
    E, rows = 8, 4
    ids = np.random.default_rng(0).integers(0, 2 if crowded else E, (37, 2)).astype(np.int32)
    grouping = jax.jit(group, static_argnums=(1, 2))(ids, E, rows)
    pairs = np.asarray(grouping.pair_of_row)
    assert np.array_equal(np.sort(pairs[pairs < ids.size]), np.arange(ids.size))
    row_of_pair = np.asarray(grouping.row_of_pair).ravel()
    assert np.array_equal(pairs[row_of_pair], np.arange(ids.size))
    assert np.array_equal(np.asarray(grouping.owner)[row_of_pair // rows], ids.ravel())


def test_item_rows_waste_little():
    assert item_rows(524288, 128) == 256
    assert item_rows(64, 128) == 1


def test_router_chooses_as_inference_does():
    E, D = CONFIG.num_experts, CONFIG.hidden_size
    rng = np.random.default_rng(0)
    x, weight, bias = (rng.standard_normal(shape, np.float32) for shape in ((64, D), (E, D), E))
    weight, bias = 0.2 * weight, 0.1 * bias
    weight[3] = weight[2]  # a tie
    bias[2:4] = 0.0
    x, weight, bias = map(jnp.asarray, (x, weight, bias))
    inference, training = (jax.jit(function, static_argnums=3) for function in (moe.route, route))
    ids, gates = inference(x, weight, bias, CONFIG)
    chosen = training(x, weight, bias, CONFIG)
    assert np.array_equal(chosen.ids, ids)
    np.testing.assert_allclose(chosen.gates, gates, rtol=1e-6)
    assert np.array_equal(chosen.loads, np.bincount(np.asarray(ids).ravel(), minlength=E))

    def total(function, x, weight):
        _, gates, *_ = function(x, weight, bias, CONFIG)
        return jnp.sum(gates * jnp.arange(gates.size).reshape(gates.shape))

    gradient = jax.jit(jax.grad(total, (1, 2)), static_argnums=0)
    got, want = (gradient(function, x, weight) for function in (route, moe.route))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_grouped_experts_equal_dense_ones_with_their_gradients():
    _, experts = build_model(CONFIG, random_state().params, random_state().bias)
    N, K = 48, CONFIG.num_experts_per_tok
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.standard_normal((N, CONFIG.hidden_size), np.float32))
    ids = jnp.asarray(np.argsort(rng.random((N, CONFIG.num_experts)))[:, :K].astype(np.int32))
    gates = jnp.asarray(rng.random((N, K), np.float32))

    def grouped_loss(x, gates, gate_up, down):
        return jnp.sum(jnp.sin(GroupedExperts((gate_up,), (down,))(0, x, ids, gates, None)[0]))

    def dense_loss(x, gates, gate_up, down):
        return jnp.sum(jnp.sin(moe.DenseExperts(gate_up[None], down[None])(0, x, ids, gates, None)[0]))

    arguments = (x, gates, experts.gate_up[0], experts.down[0])
    got, want = (jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*arguments) for loss in (grouped_loss, dense_loss))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


noised = jax.jit(add_noise, static_argnums=2)


@jax.jit
def plain_pass(params, bias, tokens):
    """The inference network over a canvas, every block seeing itself and what came before."""
    model, experts = build_model(CONFIG, params, bias)
    T = tokens.shape[1]
    positions = jnp.arange(T)[None]
    mask = block_mask(positions, T, SETTINGS.block_length)
    return model(tokens, positions, mask, experts=dense(experts))[0]


@pytest.mark.exhaustive
def test_training_layout_equals_inference_passes(rows):
    """Each noisy block equals that block of a pass over its clean prefix and itself (REFERENCE section 5)."""
    state, L = random_state(), SETTINGS.block_length
    noisy, masked, _ = noised(jax.random.key(0), rows, SETTINGS)
    assert masked.any()
    clean, segment = rows.tokens, rows.segment
    layout = Layout(block=block_numbers(segment), segment=segment, block_length=L)

    @jax.jit
    def trained(params, bias):
        return forward(*build_model(CONFIG, params, bias), noisy, clean, layout).hidden

    hidden = np.asarray(trained(state.params, state.bias))
    noisy, clean, segment, numbers = map(np.asarray, (noisy, clean, segment, layout.block))
    checked = 0
    for row, block in itertools.product(range(SHAPE.chunk), range(SHAPE.length // L)):
        number = numbers[row, block]
        first = block - number
        assert (segment[row, first : block + 1] == segment[row, block]).all()
        tokens = np.zeros((1, SHAPE.length), np.int32)  # blocks to come stay 0: nothing sees them
        tokens[0, : number * L] = clean[row, first * L : block * L]
        tokens[0, number * L : (number + 1) * L] = noisy[row, block * L : (block + 1) * L]
        want = plain_pass(state.params, state.bias, tokens)[0, number * L : (number + 1) * L]
        np.testing.assert_allclose(hidden[row, block * L : (block + 1) * L], want, atol=5e-5)
        checked += number > 0
    assert checked > 0


def test_only_router_products_are_float32_in_a_bfloat16_step(rows):
    """A float32 array that leaks into the residual stream would cost most of the speed, silently."""
    settings = dataclasses.replace(SETTINGS, config=dataclasses.replace(CONFIG, dtype="bfloat16"))
    state, rate = new_state(settings, init_params(CONFIG, 0)), jnp.float32(1e-3)
    lowered = train_step.lower(state, rows, jax.random.key(0), rate, rate, settings).as_text()
    products = [line for line in lowered.splitlines() if "dot_general" in line]
    operands = [re.findall(r"x(f32|bf16)>", line.split(" : ")[-1].split("->")[0]) for line in products]
    # Of each MoE layer: the router's product and its two gradients.
    assert sum("f32" in pair for pair in operands) == 3 * CONFIG.num_moe_layers
    assert len(products) > 20


def test_rows_hold_whole_items(rows, tokenizer):
    tokens, part, segment = (np.asarray(array) for array in (rows.tokens, rows.part, rows.segment))
    blocks = np.repeat(segment, SHAPE.block_length, axis=1)
    text = tokenizer.decode(tokens[0][blocks[0] == 0].tolist(), skip_special_tokens=False)
    assert text.startswith("<|user|>")
    assert text.count("<|user|>") == text.count("<|assistant|>") == 1
    for number in range(segment[0].max() + 1):
        mine = part[0][blocks[0] == number]
        answered = np.flatnonzero(mine == ANSWER)
        assert tokens[0][blocks[0] == number][answered[-1]] == EOS_ID
        assert (mine[: answered[0]] == PROMPT).all()
        assert (mine[answered[-1] + 1 :] == PADDING).all()


def test_noise_spares_prompts_and_masks_some_blocks_entirely(tokenizer):
    rows = Batch.of(make_rows(tokenizer, dataclasses.replace(SHAPE, chunk=16), 0, 1))
    noisy, masked, noise = map(np.asarray, noised(jax.random.key(3), rows, SETTINGS))
    part = np.asarray(rows.part)
    assert not (masked & (part == PROMPT)).any()
    assert np.array_equal(noisy == MASK_ID, masked)
    full = (noise == 1.0).mean()
    assert 0.05 < full < 0.35
    assert masked[(noise == 1.0) & (part != PROMPT)].all()


def test_workers_make_the_same_rows_in_the_same_order(tokenizer):
    def first_three(workers):
        stream = stream_rows(tokenizer, SHAPE, seed=5, first_chunk=2, workers=workers, ahead=2)
        return [next(stream) for _ in range(3)]

    for mine, theirs in zip(first_three(0), first_three(1), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert np.array_equal(a, b)
