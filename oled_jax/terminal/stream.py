"""Finished blocks as they come, and on a terminal the status line below them.

The line stands under the text and goes when more text comes. For that the cursor's place is saved and restored (ESC 7
and 8, which every terminal since the VT100 has); IND first makes sure that there is a row below.
"""

import shutil
from typing import Protocol, TextIO

from rich.cells import cell_len

from oled_jax.decode.events import BlockEvent, Event, FinishEvent
from oled_jax.terminal.status import Status
from oled_jax.text import TextCodec
from oled_jax.text_stream import TextStream

ROW_BELOW, SAVE, RESTORE, CLEAR_BELOW = "\x1bD\x1b[A", "\x1b7", "\x1b8", "\x1b[J"
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class Display(Protocol):
    """Shows a run."""

    def show(self, event: Event) -> None:
        """Something happened."""
        ...

    def close(self) -> None:
        """The run is over, or was given up: the terminal is left in order."""
        ...


class Nothing:
    """For runs that nobody watches."""

    def show(self, event: Event) -> None: ...

    def close(self) -> None: ...


class BlockStream:
    """Writes each block's text when it is final, and a line feed at the end.

    Args:
      out: where to.
      codec: of the model; None writes ids, separated by commas.
      status: the line below; None, or an `out` that is no terminal: there is none.
    """

    def __init__(self, out: TextIO, codec: TextCodec | None, status: Status | None) -> None:
        self._out = out
        self._text = None if codec is None else TextStream(codec)
        self._status = status if out.isatty() else None
        self._started = self._shown = False
        self._column = 0

    def show(self, event: Event) -> None:
        """See `Display`."""
        new, self._shown = "", True
        if isinstance(event, BlockEvent):
            new = self._piece(event.tokens)
        elif isinstance(event, FinishEvent) and self._text is not None:
            new = self._text.finish()
        if self._status is None:
            self._write(new)
            return
        self._status.add(event)
        width = shutil.get_terminal_size().columns
        line = self._status.line()[: width - 1]
        # A full row leaves the cursor on its last character, which the next would overwrite once it was restored.
        full = "\r\n" if self._fills_row(new, width) else ""
        self._write(f"{CLEAR_BELOW}{new}{full}{ROW_BELOW}{SAVE}\r\n{DIM}{line}{PLAIN}{RESTORE}")

    def close(self) -> None:
        """See `Display`."""
        if self._shown:  # else the run has not even begun
            self._shown = False
            self._write(("" if self._status is None else CLEAR_BELOW) + "\n")

    def _fills_row(self, new: str, width: int) -> bool:
        """Follows the cursor through the text; whether it ends a row exactly. Then it is in the next one."""
        for character in new:
            cells = cell_len(character)
            self._column = 0 if character == "\n" else self._column + cells
            if self._column > width:
                self._column = cells
        full = self._column == width
        self._column = 0 if full else self._column
        return full

    def _piece(self, ids: tuple[int, ...]) -> str:
        if self._text is not None:
            return self._text.add(ids)
        comma = "," if self._started and ids else ""
        self._started = self._started or bool(ids)
        return comma + ",".join(map(str, ids))

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
