"""Decoding a text as one: the block loop over a single block that holds prompt, answer and the end (RND1).

The model's attention goes both ways over all of it, so there is nothing to prefill, to commit or to cache between
passes. Behind the answer stands `DecodingConfig.end_id`, which the model sees in every pass.
"""

import dataclasses
import math
from collections.abc import Sequence

from oled_jax.config import DecodingConfig
from oled_jax.errors import UsageError

NEEDS_A_TOKEN = "but this model predicts each token from the one before it: give it a first token"


def one_block(prompts: Sequence[Sequence[int]], config: DecodingConfig) -> DecodingConfig:
    """`config` with a block that holds the longest text of a batch.

    Raises:
      UsageError: a prompt is empty or begins with the mask token.
    """
    for row, prompt in enumerate(prompts):
        if len(prompt) > 0 and prompt[0] == config.mask_id:
            raise UsageError(f"prompt {row} begins with the mask token, {NEEDS_A_TOKEN}")
    return dataclasses.replace(config, block_length=text_capacity([len(prompt) for prompt in prompts], config))


def text_capacity(prompt_lengths: Sequence[int], config: DecodingConfig) -> int:
    """Positions of a pass: prompt, answer and end of the longest text, rounded up to few different values."""
    return rounded_up(max(text_lengths(prompt_lengths, config), default=1))


def text_lengths(prompt_lengths: Sequence[int], config: DecodingConfig) -> list[int]:
    """Positions of every text: prompt, answer and one token behind it. Raises UsageError for an empty prompt."""
    for row, length in enumerate(prompt_lengths):
        if length == 0:
            raise UsageError(f"prompt {row} is empty, {NEEDS_A_TOKEN}")
    return [length + config.gen_length + 1 for length in prompt_lengths]


def rounded_up(positions: int) -> int:
    """A multiple of 64 that is at least `positions`, by a quarter at most, so that lengths share programs."""
    step = max(64, 1 << max(0, positions.bit_length() - 3))
    return math.ceil(positions / step) * step
