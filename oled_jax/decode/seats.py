"""A row's place in the batch, and when what happened to it. Owned by the block loop.

The loop's clock stands still while the consumer of the events works.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from oled_jax.decode.events import Event, FinishEvent, Result
from oled_jax.decode.row import Row


class Clock:
    """Seconds since it was made, without the time that the consumer of the events takes."""

    def __init__(self) -> None:
        self._origin = time.perf_counter()

    def elapsed(self) -> float:
        return time.perf_counter() - self._origin

    def outside(self, events: Sequence[Event]) -> Iterator[Event]:
        """Hands out events; the clock stands meanwhile."""
        paused_at = time.perf_counter()
        yield from events
        self._origin += time.perf_counter() - paused_at


@dataclasses.dataclass
class Seat:
    """A row in a place. Times are those of the loop's clock."""

    place: int
    row: Row
    entered_s: float
    prefilled_s: float = 0.0
    first_block_s: float | None = None

    def end_block(self, now: float) -> None:
        """The row has finished a block."""
        if self.first_block_s is None:
            self.first_block_s = now

    def finish(self, now: float) -> FinishEvent:
        """The row's last event."""
        row, output = self.row, self.row.output
        decode_s = now - self.prefilled_s
        result = Result(
            output_ids=output,
            canvas=row.canvas.copy(),
            finish=row.finish,
            passes=dict(row.passes),
            waited_s=self.entered_s,
            ttft_prefill_s=self.prefilled_s - self.entered_s,
            ttft_block_s=None if self.first_block_s is None else self.first_block_s - self.entered_s,
            decode_s=decode_s,
            tpot_s=decode_s / len(output) if output else None,
        )
        return FinishEvent(row=row.index, result=result)
