"""Fixtures of the demo's tests: a tokenizer and a batch of training rows of the toy model."""

import pytest
from toy import CONFIG, SHAPE

from oled_jax.demo.training.rows import make_rows
from oled_jax.demo.training.step import Batch
from oled_jax.demo.training.vocabulary import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return train_tokenizer(CONFIG.vocab_size, 300, seed=0)


@pytest.fixture(scope="session")
def rows(tokenizer):
    return Batch.of(make_rows(tokenizer, SHAPE, 0, 0))
