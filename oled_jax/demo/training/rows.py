"""Training rows: items packed into rows of whole blocks, made by worker processes ahead of the training loop.

Chunk n of a seed is the same whatever the number of workers. NumPy only, no JAX: workers start quickly.
"""

import collections
import dataclasses
import itertools
import multiprocessing
import random
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import NamedTuple

import numpy as np
from jaxtyping import Int8, Int16
from tokenizers import Tokenizer

from oled_jax.demo.families import DEMO_FAMILIES, training_items
from oled_jax.demo.training.vocabulary import EOS_ID, encode_item

FAMILY_NUMBER = {family.name: number for number, family in enumerate(DEMO_FAMILIES)}
PROMPT, ANSWER, PADDING = 0, 1, 2


class Rows(NamedTuple):
    """Packed rows; T is a multiple of the block length.

    tokens: clean ids. part: PROMPT, ANSWER (its first eos included) or PADDING (further eos up to the end of
    the block) of each position. segment: number of the item within its row, by block. family: its family, by
    block.
    """

    tokens: Int16[np.ndarray, "R T"]
    part: Int8[np.ndarray, "R T"]
    segment: Int16[np.ndarray, "R blocks"]
    family: Int8[np.ndarray, "R blocks"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowShape:
    """Rows of `length` positions in blocks of `block_length`; `chunk` rows are made at a time."""

    length: int
    block_length: int
    chunk: int


class _Row:
    """A row that is being filled. An item takes whole blocks: its block grid starts with its prompt."""

    def __init__(self, shape: RowShape) -> None:
        self.shape = shape
        self.used = 0
        self.segments = 0
        self.tokens = np.full(shape.length, EOS_ID, np.int16)
        self.part = np.full(shape.length, PROMPT, np.int8)
        blocks = shape.length // shape.block_length
        self.segment = np.full(blocks, -1, np.int16)
        self.family = np.zeros(blocks, np.int8)

    def add(self, prompt: list[int], answer: list[int], family: int) -> None:
        L, start = self.shape.block_length, self.used
        ids = [*prompt, *answer, EOS_ID]
        end = start + -(-len(ids) // L) * L
        self.tokens[start : start + len(ids)] = ids
        self.part[start + len(prompt) : start + len(ids)] = ANSWER
        self.part[start + len(ids) : end] = PADDING
        self.segment[start // L : end // L] = self.segments
        self.family[start // L : end // L] = family
        self.used, self.segments = end, self.segments + 1


def make_rows(tokenizer: Tokenizer, shape: RowShape, seed: int, chunk: int) -> Rows:
    """Chunk number `chunk` of a seed: a first-fit packing of fresh items into `shape.chunk` rows."""
    items = training_items(random.Random(f"{seed}/{chunk}"))
    rows, full = [_Row(shape) for _ in range(shape.chunk)], 0
    misfits = 0
    # An item that fits nowhere is dropped; once eight in a row did, what is left is too small to matter.
    while misfits < 8 and full < shape.chunk:
        item = next(items)
        prompt, answer = encode_item(tokenizer, item)
        needed = -(-(len(prompt) + len(answer) + 1) // shape.block_length) * shape.block_length
        target = next((row for row in rows[full:] if row.used + needed <= shape.length), None)
        if target is None:
            misfits += 1
            continue
        misfits = 0
        target.add(prompt, answer, FAMILY_NUMBER[item.family])
        while full < shape.chunk and rows[full].used == shape.length:
            full += 1
    names = ("tokens", "part", "segment", "family")
    return Rows(*(np.stack([getattr(row, name) for row in rows]) for name in names))


class Packing(NamedTuple):
    """What a batch was packed into, for the log. tokens: positions of items. answers: positions that are learnt."""

    tokens: int
    answers: int


def packing(rows: Rows) -> Packing:
    """Counts over a batch."""
    per_block = rows.tokens.shape[1] // rows.segment.shape[1]
    return Packing(int((rows.segment >= 0).sum()) * per_block, int((rows.part == ANSWER).sum()))


_worker: dict[str, Tokenizer] = {}


def _start_worker(tokenizer_json: str) -> None:
    _worker["tokenizer"] = Tokenizer.from_str(tokenizer_json)


def _work(shape: RowShape, seed: int, chunk: int) -> Rows:
    return make_rows(_worker["tokenizer"], shape, seed, chunk)


def stream_rows(
    tokenizer: Tokenizer, shape: RowShape, *, seed: int, first_chunk: int, workers: int, ahead: int
) -> Generator[Rows, None, None]:
    """Endless chunks in order, beginning with `first_chunk`.

    Args:
      workers: processes that make them; 0 makes them in this process.
      ahead: chunks that are made before they are asked for.
    """
    if workers == 0:
        for chunk in itertools.count(first_chunk):
            yield make_rows(tokenizer, shape, seed, chunk)
    # Spawned, not forked: JAX runs threads in the parent.
    context = multiprocessing.get_context("spawn")
    arguments = (tokenizer.to_str(),)
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=arguments) as pool:
        waiting: collections.deque[Future[Rows]] = collections.deque()
        try:
            for chunk in itertools.count(first_chunk):
                waiting.append(pool.submit(_work, shape, seed, chunk))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
