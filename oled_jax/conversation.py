"""A conversation with a loaded model: its turns, and what of them is computed already.

One conversation at a time generates on a model; the KV cache between its turns belongs to it.
"""

from collections.abc import Generator, Sequence
from typing import Any

from oled_jax.api import Model
from oled_jax.decode.events import BlockEvent, Event
from oled_jax.prefix import KeptPrefix
from oled_jax.session import prefill_chunk

LONGEST_CHUNK = 128  # positions of a prompt pass: what is new in a turn is short, and one size is one program


class Conversation:
    """Turns of user and assistant, in the model's chat template.

    Args:
      model: with a chat template.
      system: system prompt; None: none.
      settings: decoding settings of every answer, see `Model.decoding`.

    Raises:
      UsageError: the settings are not possible.
    """

    def __init__(self, model: Model, system: str | None = None, **settings: Any) -> None:
        self.model = model
        self.decoding = model.decoding(**settings)
        self._system = system
        self.kept = None if self.decoding.whole_text else self._prefix()
        self.messages: list[dict[str, str]] = []
        self.reset()

    def _prefix(self) -> KeptPrefix:
        """What runs keep for the next one; models that decode whole texts have nothing to keep."""
        shape, L = self.model.shape, self.decoding.block_length
        chunk = prefill_chunk(min(LONGEST_CHUNK, shape.chunk), L)
        return KeptPrefix(self.model.opened.config, shape.kv_positions, chunk, L)

    def reset(self) -> None:
        """Forgets every turn. The system prompt stays."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def prepare(self) -> None:
        """Compiles what answers need, so that the first need not wait for it. Whole texts compile for their length."""
        if self.kept is not None:
            # A prompt that is prefilled and ends inside a block: then a short answer, too, goes on in the next one.
            self.model.engine.prepare(2 * self.decoding.block_length - 1, self.decoding, kept=self.kept)

    def send(self, text: str) -> Generator[Event, None, None]:
        """The user's next turn; yields the run's events.

        The answer becomes a turn, too: all of it, or the finished blocks if the iterator is closed before its end. If
        there are none, the user's turn is taken back.

        Raises:
          UsageError: the conversation has outgrown what memory was planned for; it is as it was before.
        """
        turns = [*self.messages, {"role": "user", "content": text}]
        ids = [self.model.encode(turns)]
        self.model.require_planned(ids, self.decoding)
        said: list[int] = []
        try:
            for event in self.model.engine.stream(ids, self.decoding, kept=self.kept):
                if isinstance(event, BlockEvent):
                    said += event.tokens
                yield event
        finally:
            if said:
                self.messages = [*turns, {"role": "assistant", "content": self._text(said)}]

    def _text(self, ids: Sequence[int]) -> str:
        return self.model.opened.codec.decode(ids).rstrip("\ufffd")
