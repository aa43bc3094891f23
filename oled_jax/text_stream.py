"""Text of tokens that come in parts: what is handed out is final, and never half a character."""

from collections.abc import Sequence

from oled_jax.text import TextCodec

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no whole character yet


class TextStream:
    """Turns the tokens of one answer into text, part by part. The parts, joined, are the text of all tokens.

    A character may be spelled by several tokens, which may lie in different blocks: its text waits for the last of
    them. So does a replacement character that the model means, until something follows it or the end comes.
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._given = ""

    def add(self, ids: Sequence[int]) -> str:
        """Takes more tokens; returns the text that is new and whole."""
        self._ids += ids
        return self._advance(self._codec.decode(self._ids).rstrip(UNFINISHED))

    def finish(self) -> str:
        """The rest: an answer may end inside a character."""
        return self._advance(self._codec.decode(self._ids))

    def _advance(self, text: str) -> str:
        new = text[len(self._given) :]
        self._given += new
        return new
