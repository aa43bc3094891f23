"""One layer's CPU share in flight: its routing, its units, its sum, its error. Shared by worker threads.

A unit is one page or a slice of one. Units are added to the result in their order, whoever finishes first, so
equal work gives equal bits.
"""

import threading
import time

import numpy as np
from jaxtyping import Float, Int

from oled_jax.offload.cpu_experts.base import CpuStats, CpuWork


class Job:
    """One layer's share while it is computed. Unit u is part u % parts of expert experts[u // parts]."""

    def __init__(self, work: CpuWork, parts: int) -> None:
        self.work = work
        self.parts = parts
        self.units = len(work.experts) * parts
        self.result = np.zeros(work.hidden.shape, np.float32)
        self.done = threading.Event()
        self.cancelled = False
        self.error: BaseException | None = None
        self.stats = CpuStats()
        self.started = time.perf_counter()
        self._lock = threading.Lock()
        self._routes: list[tuple[np.ndarray, np.ndarray]] | None = None
        self._finished: dict[int, tuple[np.ndarray, np.ndarray] | None] = {}
        self._next = 0
        if not self.units:
            self.done.set()

    def rows(self, index: int) -> tuple[Int[np.ndarray, " n"], Float[np.ndarray, " n"]]:
        """Tokens and gates of expert number `index` of the work. The first caller routes all of them."""
        with self._lock:
            if self._routes is None:
                self._routes = _route(self.work)
            return self._routes[index]

    def finish(self, unit: int, outcome: tuple[np.ndarray, np.ndarray] | None, stats: CpuStats) -> None:
        """A unit is over; `outcome` is (tokens, rows to add) or None. Units are summed in their order."""
        with self._lock:
            self.stats += stats
            self._finished[unit] = outcome
            while self._next in self._finished:
                ready = self._finished.pop(self._next)
                self._next += 1
                if ready is not None:
                    self.result[ready[0]] += ready[1]
            if self._next == self.units:
                self.stats += CpuStats(span_us=(time.perf_counter() - self.started) * 1e6)
                self.done.set()

    def fail(self, error: BaseException) -> None:
        """The first error is the one that the caller gets; units that have not begun are skipped."""
        with self._lock:
            if self.error is None:
                self.error = error
            self.cancelled = True


def _route(work: CpuWork) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, gates) per expert of the work, tokens ascending."""
    K = work.expert_ids.shape[1]
    ids = np.where(work.token_mask[:, None], work.expert_ids, -1).ravel()
    order = np.argsort(ids, kind="stable")
    starts, stops = np.searchsorted(ids[order], [work.experts, work.experts + 1])
    gates = work.gates.ravel()
    chosen = [order[start:stop] for start, stop in zip(starts, stops, strict=True)]
    return [(pairs // K, gates[pairs].astype(np.float32)) for pairs in chosen]
