"""What the decoder does in a synthetic trace: passes, blocks, tokens, masks, confidence. No routing. NumPy only.

The order is that of a real run (`decode/row.py`, `session.py`) of one request at a time: the prompt's whole blocks are
prefilled; the first block begins with what is left of the prompt; every block is denoised until no mask is left, and,
but for the request's last, committed. In a block's first pass every confidence is 1.0, as is a prompt token's always.

What is written when is made up: the number of passes over a block is such that one fills `tokens_per_iteration` masks
on average, the masks of greatest confidence first. A masked token has a confidence of its own, which rises while the
block fills; a pass that fills several masks was sure of each (above 0.9), as with a threshold. Most written tokens stay
sure, some do not. Random numbers are drawn per block, so a block does not depend on what came before it.
"""

import dataclasses
import enum
import itertools
from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, Float, Float32, Int, Int32

from oled_jax.passes import PassKind
from oled_jax.policies.base import IterationOutcome, PassInfo
from oled_jax.traces.spec import SyntheticSpec

MAX_PREFILL = 1024  # positions of one prefill pass
SURE = 0.9  # confidence of masks that are filled together is above it
SURE_SHARE = 0.85  # of the written tokens, those that stay sure
RISE = 0.25  # of a masked token's confidence while its block fills
JITTER = 0.03  # standard deviation of confidence between passes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptedPass:
    """A pass without its routes. block: of the request, prompt blocks included. prompt: of a request that begins."""

    request: int
    block: int
    new_block: bool
    prompt: Int32[np.ndarray, " P"] | None
    info: PassInfo
    outcome: IterationOutcome


class Script:
    """The passes of a specification; can be gone through again, with the same result."""

    def __init__(self, spec: SyntheticSpec) -> None:
        self._spec = spec
        self._cumulative = np.cumsum(1.0 / np.arange(1, spec.vocab_size + 1))
        self._cumulative /= self._cumulative[-1]

    def __iter__(self) -> Iterator[ScriptedPass]:
        requests = itertools.count() if self._spec.requests is None else range(self._spec.requests)
        iterations = 0
        for each in itertools.chain.from_iterable(map(self._request, requests)):
            yield each
            iterations += each.info.kind is PassKind.DENOISE
            if iterations == self._spec.iterations:
                return

    def _request(self, request: int) -> Iterator[ScriptedPass]:
        spec, T = self._spec, self._spec.block_length
        prompt = self._tokens(random_numbers(spec.seed, Stream.PROMPT, request), spec.prompt_tokens)
        begins: Int32[np.ndarray, " P"] | None = prompt
        first, last = spec.prompt_tokens // T, spec.prompt_tokens // T + spec.blocks - 1
        chunk = max(1, MAX_PREFILL // T)
        for block in range(0, first, chunk):
            tokens = prompt[block * T : min(block + chunk, first) * T]
            yield self._unmasked(PassKind.PREFILL, request, block, tokens, np.ones(len(tokens), np.float32), begins)
            begins = None
        for block in range(first, last + 1):
            given = prompt[first * T :] if block == first else prompt[:0]
            for each in self._denoise(request, block, given):
                yield dataclasses.replace(each, prompt=begins)
                begins = None
            if block < last:
                outcome = each.outcome
                yield self._unmasked(PassKind.COMMIT, request, block, outcome.token_ids, outcome.confidence, None)

    def _denoise(self, request: int, block: int, given: Int32[np.ndarray, " G"]) -> Iterator[ScriptedPass]:
        """The passes over a block whose first positions hold `given`."""
        T, random = self._spec.block_length, random_numbers(self._spec.seed, Stream.BLOCK, request, block)
        is_prompt = np.arange(T) < len(given)
        text = np.concatenate([given, self._tokens(random, T - len(given))])
        masked = ~is_prompt
        own, settled = random.beta(2.0, 4.0, T), _settled(random, T)
        before = np.ones(T, np.float32)
        for number, count in enumerate(self._fills(random, T - len(given))):
            progress = 1.0 - np.count_nonzero(masked) / T
            unsure = np.clip(own + RISE * progress + random.normal(0.0, JITTER, T), 0.01, SURE - 0.01)
            written = np.zeros(T, bool)
            written[np.argsort(np.where(masked, -unsure, 1.0), kind="stable")[:count]] = True
            sure = written & (count > 1)
            known = np.clip(settled + random.normal(0.0, JITTER, T), 0.01, 1.0)
            confidence = np.where(masked, unsure, known)
            confidence[sure] = random.uniform(SURE, 1.0, T)[sure]
            confidence = np.where(is_prompt, 1.0, confidence).astype(np.float32)
            yield ScriptedPass(
                request=request, block=block, new_block=number == 0, prompt=None,
                info=self._info(PassKind.DENOISE, text, masked, before),
                outcome=IterationOutcome(
                    kind=PassKind.DENOISE,
                    token_ids=np.where(masked & ~written, self._spec.mask_id, text).astype(np.int32),
                    written=written, masked=masked, confidence=confidence,
                ),
            )  # fmt: skip
            masked, before = masked & ~written, confidence

    def _unmasked(
        self,
        kind: PassKind,
        request: int,
        block: int,
        tokens: Int32[np.ndarray, " N"],
        confidence: Float32[np.ndarray, " N"],
        prompt: Int32[np.ndarray, " P"] | None,
    ) -> ScriptedPass:
        """A pass that changes nothing: prefill or commit."""
        nothing = np.zeros(len(tokens), bool)
        return ScriptedPass(
            request=request, block=block, new_block=False, prompt=prompt,
            info=self._info(kind, tokens, nothing, confidence),
            outcome=IterationOutcome(
                kind=kind, token_ids=tokens, written=nothing, masked=nothing, confidence=confidence
            ),
        )  # fmt: skip

    def _info(
        self,
        kind: PassKind,
        text: Int32[np.ndarray, " N"],
        masked: Bool[np.ndarray, " N"],
        confidence: Float32[np.ndarray, " N"],
    ) -> PassInfo:
        return PassInfo(
            kind=kind,
            token_ids=np.where(masked, self._spec.mask_id, text).astype(np.int32),
            masked=masked,
            token_mask=np.ones(len(text), bool),
            confidence=confidence,
        )

    def _tokens(self, random: np.random.Generator, count: int) -> Int32[np.ndarray, " count"]:
        """Token ids by Zipf's law."""
        return np.searchsorted(self._cumulative, random.random(count)).astype(np.int32)

    def _fills(self, random: np.random.Generator, masks: int) -> Int[np.ndarray, " passes"]:
        """How many masks each pass fills: at least one, `tokens_per_iteration` on average."""
        passes = masks / self._spec.tokens_per_iteration
        passes = min(max(1, int(passes) + (random.random() < passes % 1)), masks)
        cuts = np.sort(random.choice(masks - 1, passes - 1, replace=False)) + 1
        return np.diff(np.concatenate([[0], cuts, [masks]]))


class Stream(enum.IntEnum):
    """What random numbers are for: each has its own."""

    PROMPT = 1
    BLOCK = 2
    BANK = 3
    POPULARITY = 4
    MASK = 5
    REQUEST = 6
    ROUTES = 7
    LAYERS = 8


def random_numbers(seed: int, stream: Stream, *where: int) -> np.random.Generator:
    """Random numbers that depend on the seed, their purpose and a place in the trace alone."""
    return np.random.default_rng((seed, stream, *where))


def _settled(random: np.random.Generator, T: int) -> Float[np.ndarray, " T"]:
    """Confidence of each position once its token is written."""
    return np.where(random.random(T) < SURE_SHARE, random.uniform(0.94, 1.0, T), random.uniform(0.3, 0.94, T))
