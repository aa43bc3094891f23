"""Denoising as it happens: the text so far, the block in work with its masks, and the status line.

On a terminal a live picture (rich); elsewhere one plain line per pass. Goes to standard error: it is no result.
"""

import sys
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from oled_jax.decode.events import BlockEvent, Event, PassEvent
from oled_jax.passes import PassKind
from oled_jax.terminal.pieces import Piece, block_pieces
from oled_jax.terminal.status import Status
from oled_jax.text import TextCodec
from oled_jax.text_stream import TextStream

STYLES = {"masked": "bright_black", "prompt": "dim", "high": "green", "middle": "yellow", "low": "red"}
EDITED, NEW = "underline magenta", "bold"
LEGEND = (("sure", "green"), ("likely", "yellow"), ("unsure", "red"), ("edited", EDITED))


class Denoising:
    """Shows one request.

    Args:
      codec: of the model; None shows ids.
      mask_id: of the run.
      prompt_length: tokens of the prompt.
      status: the line below.
      out: where to.
    """

    def __init__(
        self, codec: TextCodec | None, mask_id: int, prompt_length: int, status: Status, out: TextIO | None = None
    ) -> None:
        self._codec, self._mask_id, self._prompt_length, self._status = codec, mask_id, prompt_length, status
        self._out = sys.stderr if out is None else out
        self._console = Console(file=self._out)
        self._text = None if codec is None else TextStream(codec)
        self._done = Text()
        self._pieces: list[Piece] = []
        self._live: Live | None = None
        if self._console.is_terminal:
            # Only when something happened is there something new to show: no thread that refreshes.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def show(self, event: Event) -> None:
        """See `stream.Display`."""
        self._status.add(event)
        if isinstance(event, PassEvent) and event.kind is not PassKind.COMMIT:
            self._pieces = block_pieces(event, self._codec, self._mask_id, self._prompt_length)
            if self._live is None:
                self._out.write(plain_line(event, self._pieces))
        elif isinstance(event, BlockEvent):
            ids = "".join(f"{token} " for token in event.tokens)
            self._done.append(ids if self._text is None else self._text.add(event.tokens))
            self._pieces = []
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)

    def close(self) -> None:
        """See `stream.Display`."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _picture(self) -> Group:
        text = self._done.copy()
        for piece in self._pieces:
            style = EDITED if piece.edited else STYLES[piece.kind] + (f" {NEW}" if piece.new else "")
            text.append(piece.text, style)
        width, height = self._console.size
        lines = text.wrap(self._console, width)[-max(1, height - 3) :]  # the end of a long answer
        legend = Text.assemble(*(part for name in LEGEND for part in (name, "  ")), style="dim")
        return Group(*lines, Text(self._status.line(), style="dim", no_wrap=True, overflow="ellipsis"), legend)


def plain_line(event: PassEvent, pieces: list[Piece]) -> str:
    """A pass without colours: edits in brackets."""
    text = "".join(f"[{piece.text}]" if piece.edited else piece.text for piece in pieces)
    visible = text.replace("\n", "⏎")
    return f"block {event.block}, {event.kind.value} {event.step + 1}: {visible}\n"
