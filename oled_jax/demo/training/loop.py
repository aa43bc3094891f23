"""The training loop: batches in, steps, schedules by wall time or by steps, a log. Owns the clock."""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.demo.families import DEMO_FAMILIES
from oled_jax.demo.training.rows import Packing, Rows, packing
from oled_jax.demo.training.step import Batch, Metrics, StepSettings, TrainState, train_step

IN_FLIGHT = 4  # steps that may be queued on the device; more would let the clock run ahead of the work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate: linear warm-up by steps of this run, then a cosine over progress. Bias rate: coarse, then
    fine.

    fine_from: progress at which the bias rate changes.
    """

    peak: float = 2e-3
    least: float = 0.01
    warmup_steps: int = 200
    bias_rate: float = 1e-3
    fine_bias_rate: float = 1e-4
    fine_from: float = 0.5

    def learning_rate(self, progress: float, steps_done: int) -> float:
        """steps_done: since the optimiser's moments were fresh."""
        cosine = 0.5 * (1.0 + np.cos(np.pi * min(progress, 1.0)))
        warm = min(1.0, (steps_done + 1) / max(self.warmup_steps, 1))
        return float(self.peak * warm * (self.least + (1.0 - self.least) * cosine))

    def bias_rate_at(self, progress: float) -> float:
        return self.bias_rate if progress < self.fine_from else self.fine_bias_rate


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """When a run ends, and which part of the schedule it is.

    steps: of the whole schedule; None: the clock counts instead. until_step: this run ends there at the latest.
    deadline: time.monotonic() at which this run ends at the latest. covers: progress of the schedule at the
    start and at the deadline of this run (by the clock only).
    """

    steps: int | None = None
    until_step: int | None = None
    deadline: float = float("inf")
    covers: tuple[float, float] = (0.0, 1.0)

    def progress(self, step: int, started: float | None) -> float:
        """started: time.monotonic() when the first step was done; None before."""
        if self.steps is not None:
            return step / self.steps
        begin, end = self.covers
        if started is None:
            return begin
        return begin + (end - begin) * (time.monotonic() - started) / max(self.deadline - started, 1e-9)

    def is_over(self, step: int) -> bool:
        if self.steps is not None and step >= min(self.steps, self.until_step or self.steps):
            return True
        return time.monotonic() >= self.deadline


@dataclasses.dataclass(kw_only=True)
class Progress:
    """What a run has done.

    tokens: positions of items trained on, counted once (each is computed twice, noisy and clean). answers: those
    that were learnt. seconds: without compilation. schedule: progress of the schedule, 0 to 1.
    """

    steps: int = 0
    schedule: float = 0.0
    tokens: int = 0
    answers: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def count(self, batch: Packing, seconds: float) -> None:
        """One more step over such a batch, done `seconds` after the first."""
        self.steps += 1
        self.tokens += batch.tokens
        self.answers += batch.answers
        self.seconds = seconds


def train(
    state: TrainState,
    batches: Iterator[Rows],
    settings: StepSettings,
    schedule: Schedule,
    budget: Budget,
    *,
    seed: int,
    warm_from: int = 0,
    log_every: int = 100,
    report: Callable[[str], None] = print,
    save: Callable[[TrainState, Progress], None] | None = None,
    save_seconds: float = float("inf"),
) -> tuple[TrainState, Progress]:
    """Trains until the budget is used up. The clock starts when the first step, which compiles, is done.

    Args:
      state: given up to this function.
      warm_from: the step at which the optimiser's moments were fresh.
      report: takes one line for people.
      save: called every `save_seconds` with the state, which it must not keep.
    """
    key, progress = jax.random.key(seed), Progress()
    log = _Log(progress, log_every, report)
    step, started, saved = int(state.step), None, 0.0
    while not budget.is_over(step):
        done = budget.progress(step, started)
        rate, bias_rate = schedule.learning_rate(done, step - warm_from), schedule.bias_rate_at(done)
        rows, rates = next(batches), (jnp.float32(rate), jnp.float32(bias_rate))
        state, metrics = train_step(state, Batch.of(rows), key, *rates, settings)
        if started is None:
            jax.block_until_ready(metrics)
            started = time.monotonic()
        progress.count(packing(rows), time.monotonic() - started)
        progress.schedule = done
        log.add(_Pending(step, rate, metrics))
        if save is not None and progress.seconds - saved >= save_seconds:
            save(state, progress)
            saved = progress.seconds
        step += 1
    log.wait(0)
    return state, progress


class _Pending(NamedTuple):
    """A step that was given to the device."""

    step: int
    learning_rate: float
    metrics: Metrics


class _Log:
    """Follows the steps that the device works on, and writes down one in `every`."""

    def __init__(self, progress: Progress, every: int, report: Callable[[str], None]) -> None:
        self._progress = progress
        self._every = every
        self._report = report
        self._waiting: collections.deque[_Pending] = collections.deque()

    def add(self, pending: _Pending) -> None:
        """One more step; returns when at most IN_FLIGHT are unfinished."""
        self._waiting.append(pending)
        self.wait(IN_FLIGHT)

    def wait(self, most: int) -> None:
        """Returns when at most `most` steps are unfinished."""
        while len(self._waiting) > most:
            pending = self._waiting.popleft()
            jax.block_until_ready(pending.metrics)
            if pending.step % self._every == 0:
                self._report(_write_down(pending, self._progress))


def _write_down(pending: _Pending, progress: Progress) -> str:
    """Adds a step to the log; returns the line for people."""
    step, rate, metrics = pending
    values = jax.device_get(metrics)
    entry: dict[str, Any] = {
        "step": step,
        "seconds": round(progress.seconds, 1),
        "tokens": progress.tokens,
        "learning_rate": rate,
        "loss": round(float(values.loss), 5),
        "imbalance": round(float(values.imbalance), 3),
        "gradient_norm": round(float(values.gradient_norm), 4),
    }
    for number, family in enumerate(DEMO_FAMILIES):
        entry[family.name] = [round(float(values.entropy[number]), 4), round(float(values.right[number]), 4)]
    progress.log.append(entry)
    parts = " ".join(f"{f.name} {entry[f.name][0]:.3f}/{entry[f.name][1]:.1%}" for f in DEMO_FAMILIES)
    speed = progress.tokens / progress.seconds / 1e3 if progress.seconds else 0.0
    return (
        f"step {step} {progress.seconds:.0f} s {progress.tokens / 1e6:.1f} M tokens ({speed:.0f} k/s) "
        f"lr {rate:.2e} loss {entry['loss']:.4f} {parts} max load {entry['imbalance']:.1f}"
    )
