"""The line that says how a run is going: tokens per second, passes, hit rate. Text only; displays place it."""

import time
from collections.abc import Callable

from oled_jax.decode.events import BlockEvent, Event, PassEvent
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.passes import PassKind


class Status:
    """Counts a run's events.

    The clock starts with the first of them, so that loading, compiling and the prompt are not in the rate.

    Args:
      statistics: of the engine; what it counted before the run is left out.
      clock: seconds.
    """

    def __init__(self, statistics: CacheStatistics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._statistics, self._clock = statistics, clock
        self._started: float | None = None
        self._tokens = self._passes = self._block = 0
        self._hits, self._activated = self._counted()

    def add(self, event: Event) -> None:
        """Takes an event of the run."""
        if self._started is None:
            self._started = self._clock()
        if isinstance(event, PassEvent):
            self._passes += 1
            self._block = event.block
        elif isinstance(event, BlockEvent):
            self._tokens += len(event.tokens)

    def line(self) -> str:
        """The line as it is now."""
        parts = [f"block {self._block}", f"{self._passes} passes", f"{self._tokens} tokens"]
        elapsed = 0.0 if self._started is None else self._clock() - self._started
        if self._tokens and elapsed > 0:
            parts.append(f"{self._tokens / elapsed:.1f} tokens/s")
        hits, activated = self._counted()
        if activated > self._activated:
            parts.append(f"hit rate {(hits - self._hits) / (activated - self._activated):.1%}")
        return " · ".join(parts)

    def _counted(self) -> tuple[int, int]:
        summary = self._statistics.summary(PassKind.DENOISE, PassKind.EDIT)
        return summary.hits, summary.hits + summary.misses
