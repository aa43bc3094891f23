"""Shapes that a run compiles for: large enough for every position that is written, and few."""

import dataclasses
import itertools

import pytest

from oled_jax.config import DecodingConfig
from oled_jax.session import MAX_CHUNK, kv_capacity, prefill_chunk

LENGTHS = (0, 1, 7, 8, 31, 32, 33, 90, 500, 1023, 1024, 1025, 3000)


def decoding(block_length: int, gen_length: int = 24) -> DecodingConfig:
    return DecodingConfig(mask_id=1, eos_id=2, gen_length=gen_length, block_length=block_length)


@pytest.mark.parametrize("block_length", [1, 4, 8, 32])
def test_a_chunk_is_whole_blocks_and_holds_the_prompt_or_all_that_one_pass_may(block_length):
    for length in LENGTHS:
        chunk = prefill_chunk(length, block_length)
        assert chunk % block_length == 0
        assert min(length, MAX_CHUNK) <= chunk <= max(2 * length, block_length)
        assert chunk <= MAX_CHUNK
    assert len({prefill_chunk(length, block_length) for length in range(2000)}) <= 11


@pytest.mark.parametrize("block_length", [1, 4, 8, 32])
def test_the_cache_holds_the_canvas_and_every_chunk_of_the_prompt(block_length):
    for first, second, gen_length in itertools.product(LENGTHS, (0, 40), (0, 1, 24, 700)):
        capacity = kv_capacity([second, first], decoding(block_length, gen_length))
        longest = max(first, second)
        assert capacity >= longest + gen_length
        whole, chunk = longest // block_length * block_length, prefill_chunk(longest, block_length, 2)
        assert capacity >= max(range(0, whole, chunk), default=-chunk) + chunk
        assert capacity % block_length == 0
        waiting = kv_capacity([second, first, 0], decoding(block_length, gen_length), 2)
        assert waiting >= longest + gen_length + chunk, "idle chunks of a prompt land behind the text"
        folding = dataclasses.replace(decoding(block_length, gen_length), fold_commits=True)
        end = -(-(longest + gen_length) // block_length) * block_length
        for prompts in ([second, first], [second, first, 0]):
            assert kv_capacity(prompts, folding, 2) >= end + block_length, "so do blocks beside folded ones"
        assert kv_capacity([first], folding) == kv_capacity([first], decoding(block_length, gen_length))


def test_the_rows_of_a_batch_divide_a_prefill_pass_between_them():
    assert prefill_chunk(5000, 32, 5) == 128  # a power of two blocks, as every chunk
    assert prefill_chunk(5000, 32, 32) == prefill_chunk(5000, 32, 64) == 32
    assert prefill_chunk(20, 32, 4) == 32


def test_lengths_near_each_other_share_a_capacity():
    assert len({kv_capacity([length], decoding(8)) for length in range(41)}) == 1
    assert len({kv_capacity([length], decoding(8)) for length in range(4000)}) < 30
