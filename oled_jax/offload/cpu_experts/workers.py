"""Worker threads shared by the CPU expert backends: they take units of all layers in flight from one queue.

Owns the threads, the queue and the table of jobs. A backend adds `_compute` (a unit's arithmetic) and, where
it needs one, `_prepare` (what must happen before the first unit).
"""

import abc
import queue
import threading
import time
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from oled_jax.offload.cpu_experts.base import CpuExperts, CpuStats, CpuWork, LayerPages
from oled_jax.offload.cpu_experts.jobs import Job

LIVENESS_S = 0.05  # how often a waiting `collect` looks whether the workers still live
MIN_COLUMNS = 64  # narrower slices of F waste the cache lines of down's rows
MAX_PARTS = 8


class WorkerThread(threading.Thread):
    """One worker: takes units until it gets None. `current` tells what died with it."""

    def __init__(self, owner: "ThreadedCpuExperts", number: int) -> None:
        super().__init__(name=f"cpu-experts-{owner.name}-{number}", daemon=True)
        self.owner = owner
        self.number = number
        self.current: tuple[Job, int] | None = None

    def run(self) -> None:
        # Overflow of exp in silu is exact (0), and a result that is not finite is reported by name.
        with np.errstate(all="ignore"):
            while (task := self.owner._queue.get()) is not None:
                self.current = task
                self.owner._run_unit(*task)
                self.current = None
                del task  # an idle worker must not keep the caller's arrays alive


class ThreadedCpuExperts(CpuExperts):
    """A CPU expert backend that runs `_compute`, which subclasses define, in its own threads."""

    max_parts: ClassVar[int] = MAX_PARTS

    def __init__(self, pages: Sequence[LayerPages], *, threads: int) -> None:
        super().__init__(pages, threads=threads)
        self._prepare()
        self._queue: queue.SimpleQueue[tuple[Job, int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._dropped: list[Job] = []  # never to be collected, perhaps still read by a worker
        self._closed = False
        self._workers = [WorkerThread(self, number) for number in range(threads)]
        for worker in self._workers:
            worker.start()

    def _prepare(self) -> None:
        """Compiles and wraps weights. Runs in the constructor, before any worker starts."""

    @abc.abstractmethod
    def _compute(
        self, layer: int, expert: int, columns: slice, x: Float[np.ndarray, "n D"]
    ) -> Float[np.ndarray, "n D"]:
        """down[:, columns] @ (silu(gate @ x) * (up @ x))[columns] in float32, in a fresh array."""

    def submit(self, work: CpuWork) -> None:
        self._require_fit(work)
        job = Job(work, self._parts(len(work.experts)))
        with self._lock:
            self._require_open()
            self._drop(self._jobs.get(work.layer))
            self._jobs[work.layer] = job
        for unit in range(job.units):
            self._queue.put((job, unit))

    def collect(self, layer: int) -> Float[np.ndarray, "N D"]:
        started = time.perf_counter()
        with self._lock:
            self._require_open()
            job = self._jobs.pop(layer, None)
        if job is None:
            raise RuntimeError(f"CPU experts ({self.name}): nothing was submitted for layer {layer}")
        self._wait(job)
        with self._lock:
            self.stats += job.stats + CpuStats(wait_us=(time.perf_counter() - started) * 1e6)
        if job.error is not None:
            raise job.error
        return job.result

    def reset(self) -> None:
        with self._lock:
            for job in self._jobs.values():
                self._drop(job)
            self._jobs.clear()
            dropped, self._dropped = self._dropped, []
        for job in dropped:
            self._wait(job)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.reset()
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.join()

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"CPU experts ({self.name}) are closed")

    def _drop(self, job: Job | None) -> None:
        if job is not None:
            job.cancelled = True
            self._dropped = [old for old in self._dropped if not old.done.is_set()] + [job]

    def _parts(self, experts: int) -> int:
        """Slices per page: enough units that no worker idles, yet few, since each costs some Python."""
        if self.threads == 1 or not experts:
            return 1
        most = min(self.max_parts, self.pages[0][1].shape[2] // MIN_COLUMNS)
        parts = 1
        while experts * parts < 2 * self.threads and 2 * parts <= most:
            parts *= 2
        return parts

    def _wait(self, job: Job) -> None:
        while not job.done.wait(LIVENESS_S):
            self._replace_dead_workers()

    def _replace_dead_workers(self) -> None:
        with self._lock:
            for worker in [w for w in self._workers if not w.is_alive()]:
                if not self._closed:
                    fresh = self._workers[worker.number] = WorkerThread(self, worker.number)
                    fresh.start()
                if worker.current is not None:
                    (job, unit), worker.current = worker.current, None
                    where = f"layer {job.work.layer}, expert {job.work.experts[unit // job.parts]}"
                    job.fail(RuntimeError(f"CPU experts ({self.name}): thread {worker.name} died in {where}"))
                    job.finish(unit, None, CpuStats())

    def _run_unit(self, job: Job, unit: int) -> None:
        started = time.perf_counter()
        outcome = None
        pages = 0
        if not job.cancelled:
            try:
                outcome = self._unit_rows(job, unit)
                pages = int(outcome is not None and unit % job.parts == 0)
            except Exception as error:
                job.fail(error)
        job.finish(unit, outcome, CpuStats(pages=pages, busy_us=(time.perf_counter() - started) * 1e6))

    def _unit_rows(self, job: Job, unit: int) -> tuple[np.ndarray, np.ndarray] | None:
        index, part = divmod(unit, job.parts)
        tokens, gates = job.rows(index)
        if not tokens.size:
            return None
        layer, expert = job.work.layer, int(job.work.experts[index])
        F = self.pages[layer][1].shape[2]
        columns = slice(part * F // job.parts, (part + 1) * F // job.parts)
        x = job.work.hidden[tokens]
        rows = self._compute(layer, expert, columns, x)
        rows *= gates[:, None]
        if not np.isfinite(rows).all():
            raise self._not_finite(layer, expert, x, gates)
        return tokens, rows
