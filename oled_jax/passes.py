"""What a model pass is called and what it left behind: words that decoder, cache manager and policies share.

NumPy only, no JAX. The decoder makes a `PassOutcome`; nobody changes it.
"""

import dataclasses
import enum

import numpy as np
from jaxtyping import Bool, Float32, Int32


class PassKind(enum.StrEnum):
    """Why a pass over the model runs.

    PREFILL: whole prompt blocks. DENOISE: some block holds masks. EDIT: every block is full, tokens may still
    be revised. COMMIT: only stores the keys and values of final tokens.
    """

    PREFILL = "prefill"
    DENOISE = "denoise"
    COMMIT = "commit"
    EDIT = "edit"


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassOutcome:
    """One pass over one block per row, after the acceptance rule ran.

    Attributes:
      kind: kind of the pass as a whole (rows that commit may share a DENOISE or EDIT pass).
      tokens_before: what the model saw.
      tokens_after: the same blocks with the accepted tokens written.
      written: positions whose token was set in this pass: masks that were filled and tokens that were edited.
      edited: the part of `written` that held a token before.
      masked_before: positions that held the mask token when the pass began.
      confidence: current top-1 probability of masked and decoded positions, 1.0 for prompt tokens. A row that
        only commits keeps the values of its last denoise or edit pass.
      active: rows that took part; the other rows hold no information (all False, confidence 1.0).
      starts: position of each row's block in its sequence.
    """

    kind: PassKind
    tokens_before: Int32[np.ndarray, "B T"]
    tokens_after: Int32[np.ndarray, "B T"]
    written: Bool[np.ndarray, "B T"]
    edited: Bool[np.ndarray, "B T"]
    masked_before: Bool[np.ndarray, "B T"]
    confidence: Float32[np.ndarray, "B T"]
    active: Bool[np.ndarray, " B"]
    starts: Int32[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShare:
    """What one row of a batch has to do with the expert cache, over its denoise and edit passes.

    Attributes:
      passes: such passes. One in which it commits beside rows that denoise is none.
      activated, hits: experts that its own tokens were routed to, and those of them that were resident. One that
        several rows share counts for each.
      transferred: pages that came for it. One that several rows waited for is divided between them.
    """

    passes: int
    activated: int
    hits: int
    transferred: float
