"""How many output tokens a trace generates, counted as `generate` counts them. No JAX."""

import math
from collections import defaultdict

from oled_jax.traces.trace import TraceHeader, TracePass


class OutputTokens:
    """Tokens that were written, by request, up to and including the end token, `gen_length` at most.

    A trace whose header says neither (a synthetic one) counts every position that was written.
    """

    def __init__(self, header: TraceHeader) -> None:
        self._eos_id = header.settings.get("eos_id")
        self._gen_length = header.settings.get("gen_length")
        self._prompt_lengths: list[int] = []
        self._written: defaultdict[int, dict[int, int]] = defaultdict(dict)  # token by position, by request

    def add(self, step: TracePass) -> None:
        """The next pass."""
        self._prompt_lengths += [len(prompt) for prompt in step.prompts]
        places = step.outcome.written.nonzero()[0]
        width = step.outcome.token_ids.size // step.request_ids.size
        for place, token in zip(places.tolist(), step.outcome.token_ids[places].tolist(), strict=True):
            row, offset = divmod(place, width)
            position = int(step.block_starts[row]) + offset
            self._written[int(step.request_ids[row])][position] = token

    def count(self, first_request: int = 0) -> int:
        """So far, over all requests from this one on."""
        numbered = self._written.items()
        return sum(self._count(request, written) for request, written in numbered if request >= first_request)

    def _count(self, request: int, written: dict[int, int]) -> int:
        end = math.inf
        if self._gen_length is not None and request < len(self._prompt_lengths):
            end = self._prompt_lengths[request] + self._gen_length
        tokens = [written[position] for position in sorted(written) if position < end]
        return tokens.index(self._eos_id) + 1 if self._eos_id in tokens else len(tokens)
