"""What a decoding run reports while it runs, and the result of one row. Values only, made by `row.py`.

A `PassEvent` carries what the golden traces of the reference record for each forward call. The tokens of a
row's `BlockEvent`s, joined, are its `Result.output_ids`.
"""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Float32, Int32

from oled_jax.passes import CacheShare, PassKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassEvent:
    """One pass of one row.

    Attributes:
      row: index of the prompt.
      kind: of this row (the pass as a whole may be of another kind, see `PassOutcome.kind`).
      block: index of the block, counted from the start of the sequence, prompt included.
      step: passes over this block before this one; 0 for a commit.
      post_steps: passes over this block that began without masks, this one included; 0 for a commit.
      tokens_before: the block as the model saw it.
      tokens_after: the block after the accepted tokens were written.
      predicted, confidence: the model's token and its probability for every position; None for a commit.
      mask_transfer, edit_transfer: offsets in the block that got the predicted token.
      num_to_transfer: least number of masks the rule wanted to fill; 0 for a commit.
    """

    row: int
    kind: PassKind
    block: int
    step: int
    post_steps: int
    tokens_before: Int32[np.ndarray, " T"]
    tokens_after: Int32[np.ndarray, " T"]
    predicted: Int32[np.ndarray, " T"] | None
    confidence: Float32[np.ndarray, " T"] | None
    mask_transfer: tuple[int, ...]
    edit_transfer: tuple[int, ...]
    num_to_transfer: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockEvent:
    """A finished block. `tokens`: what it adds to the output (no prompt, none beyond eos or gen_length)."""

    row: int
    block: int
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One finished row.

    Attributes:
      output_ids: generated tokens up to gen_length, cut after the first eos (eos included), no mask tokens.
      canvas: the whole working sequence, prompt included. Holds masks where an eos made decoding stop.
      finish: "eos" if the output ends with eos, else "length".
      passes: passes this row took part in, by kind. PREFILL counts the prompt pass as one.
      waited_s: start of the run to the row's entering the batch.
      ttft_prefill_s: entering the batch to the end of the prompt pass.
      ttft_block_s: entering the batch to the first finished block; None if there is none.
      decode_s: end of the prompt pass to the end of this row.
      tpot_s: decode_s / number of output tokens, eos included; None for an empty output.
        Times leave out what the consumer of the events spends between them.
      share: what of the expert cache's figures is this row's; None where no engine counted.
    """

    output_ids: tuple[int, ...]
    canvas: Int32[np.ndarray, " S"]
    finish: Literal["eos", "length"]
    passes: dict[PassKind, int]
    waited_s: float = 0.0
    ttft_prefill_s: float
    ttft_block_s: float | None
    decode_s: float
    tpot_s: float | None
    share: CacheShare | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinishEvent:
    """The last event of a row."""

    row: int
    result: Result


Event = PassEvent | BlockEvent | FinishEvent
