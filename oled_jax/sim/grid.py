"""Policies x capacities over one trace: one cell after the other, or in processes side by side. No JAX."""

import dataclasses
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from oled_jax.errors import UsageError
from oled_jax.offload.schedule import PlacedLayer
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.passes import PassKind
from oled_jax.policies.base import FutureRouting, Policy, PolicyContext
from oled_jax.policies.registry import POLICIES, make_policy, parse_policy
from oled_jax.sim.cells import Cell
from oled_jax.sim.hardware import Hardware
from oled_jax.sim.replay import ManagedReplay, Replay, ResidentReplay, future_of
from oled_jax.sim.timing import Carrier, PassTime, TimeModel, TimeOptions
from oled_jax.sim.tokens import OutputTokens
from oled_jax.traces.files import open_trace
from oled_jax.traces.trace import Trace, TraceHeader, first_pass

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What a trace is replayed on. cpu_available: misses may be left to the CPU."""

    hardware: Hardware
    options: TimeOptions = dataclasses.field(default_factory=TimeOptions)
    cpu_available: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class CellResult:
    """What became of a cell.

    Attributes:
      capacities: C_l at the end.
      statistics: counted as an engine counts.
      times, passes: sum and number of passes, by kind.
      tokens: that the trace generates.
      notes: of the policy.
      seconds: that the replay took.
    """

    cell: Cell
    capacities: list[int]
    statistics: CacheStatistics
    times: dict[PassKind, PassTime]
    passes: dict[PassKind, int]
    tokens: int
    notes: tuple[str, ...]
    seconds: float


def context_of(header: TraceHeader, cell: Cell, machine: Machine, future: FutureRouting | None = None) -> PolicyContext:
    """What a cell's policy is built for."""
    return PolicyContext(
        num_layers=header.num_layers,
        num_experts=header.num_experts,
        top_k=header.top_k,
        total_slots=cell.capacity * header.num_layers,
        costs=machine.hardware.together,
        cpu_available=machine.cpu_available,
        future=future,
    )


def trial_policy(header: TraceHeader, cell: Cell, machine: Machine) -> Policy | None:
    """The cell's policy, for questions about it and not for a replay; None for `all`.

    Raises:
      UsageError: it cannot be built.
    """
    if cell.is_reference:
        return None
    nothing = FutureRouting(activated=np.zeros((0, header.num_layers, header.num_experts), bool))
    return make_policy(cell.policy, context_of(header, cell, machine, nothing))


def simulate(
    trace: Trace,
    cell: Cell,
    machine: Machine,
    *,
    warm_up: int = 0,
    watch: Callable[[PlacedLayer], None] | None = None,
) -> CellResult:
    """Replays a trace under one policy at one capacity.

    Args:
      warm_up: requests at the beginning that fill the cache and are not counted.
      watch: is shown every layer as it was decided; of `all`, nothing.

    Raises:
      UsageError: the policy cannot be built.
    """
    started = time.perf_counter()
    replay, notes = _replay_of(trace, cell, machine, watch)
    first = first_pass(trace, warm_up) if warm_up else 0  # to look for it is to read a chunk
    model = TimeModel(machine.hardware, machine.options)
    times = dict.fromkeys(PassKind, PassTime())
    passes = dict.fromkeys(PassKind, 0)
    tokens = OutputTokens(trace.header)
    for number, step in enumerate(trace):
        kind = step.info.kind
        if number == first:
            replay.statistics.restart()
        took = model.pass_time(replay.run_pass(step))
        tokens.add(step)
        if number >= first:
            times[kind] = times[kind].plus(took)
            passes[kind] += 1
    return CellResult(
        cell=cell,
        capacities=replay.capacities(),
        statistics=replay.statistics,
        times=times,
        passes=passes,
        tokens=tokens.count(warm_up),
        notes=tuple(notes),
        seconds=time.perf_counter() - started,
    )


def _replay_of(
    trace: Trace, cell: Cell, machine: Machine, watch: Callable[[PlacedLayer], None] | None
) -> tuple[Replay, list[str]]:
    header = trace.header
    if cell.is_reference:
        return ResidentReplay(header), []
    needs_future = POLICIES[parse_policy(cell.policy)[0]].needs_future
    future = future_of(trace) if needs_future else None
    policy = make_policy(cell.policy, context_of(header, cell, machine, future))
    overlapping = machine.options.carrier is Carrier.NATIVE
    replay = ManagedReplay(policy, page_bytes=header.page_bytes, overlapping=overlapping, watch=watch)
    return replay, policy.notes


def simulate_file(path: Path, cell: Cell, machine: Machine) -> CellResult:
    """`simulate` of a trace file. Raises what `open_trace` raises; who opened it before has heard its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trace = open_trace(path)
    return simulate(trace, cell, machine)


def run_grid(
    path: Path, cells: Sequence[Cell], machine: Machine, *, jobs: int, done: Callable[[CellResult], None]
) -> list[CellResult]:
    """Replays a trace file in every cell.

    Args:
      jobs: processes; with 1 all happens in this one.
      done: told of each cell that is finished, in the order in which they are.

    Returns:
      one result for each cell, in their order.

    Raises:
      UsageError: as `simulate_file`; or a process was killed, most likely for want of memory.
    """
    results: dict[Cell, CellResult] = {}
    for result in _finished(path, cells, machine, min(jobs, len(cells))):
        results[result.cell] = result
        done(result)
    return [results[cell] for cell in cells]


def _finished(path: Path, cells: Sequence[Cell], machine: Machine, jobs: int) -> Iterator[CellResult]:
    if jobs == 1:
        yield from (simulate_file(path, cell, machine) for cell in cells)
        return
    # Spawned, not forked: the parent may have threads (JAX's, for one), whose locks a fork would copy as they are.
    context = multiprocessing.get_context("spawn")
    quietly = (signal.SIGINT, signal.SIG_DFL)  # after Ctrl-C the parent has the last word
    with (
        _one_thread_each(),
        ProcessPoolExecutor(jobs, mp_context=context, initializer=signal.signal, initargs=quietly) as pool,
    ):
        waiting = [pool.submit(simulate_file, path, cell, machine) for cell in cells]
        try:
            for future in as_completed(waiting):
                yield future.result()
        except BrokenProcessPool as error:
            raise UsageError(f"a process ended before its replay was done ({error}): try fewer --jobs") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Matrix libraries of processes that start meanwhile use one thread: the processes are the parallelism."""
    before = {name: os.environ.get(name) for name in BLAS_THREADS}
    os.environ.update(dict.fromkeys(BLAS_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
