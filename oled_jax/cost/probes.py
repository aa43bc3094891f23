"""The single measurements behind a hardware profile: transfers, CPU experts, the device's FFN, host memory.

Owns scratch pages of the real size, in the same kind of memory as the engine's store and pool, so that everything is
measured by the code that a run uses and before any weight is loaded.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.cost.profile import CpuTime, FfnTime, ProfileKey
from oled_jax.offload.carriers.registry import make_mover
from oled_jax.offload.cpu_experts import CpuExperts, CpuWork
from oled_jax.offload.pool import Pool, empty_pool
from oled_jax.offload.store import allocate_store
from oled_jax.ops.grouped_ffn import grouped_ffn
from oled_jax.ops.grouping import ItemShape

STORE_BYTES, STORE_PAGES = 10**9, (8, 512)  # more than the caches of most hosts, so that pages come from memory
POOL_BYTES, POOL_PAGES = 512 * 10**6, (4, 32)  # moved by one call, as many as a layer misses
VISIT_EXPERTS = 16  # experts per visit of the CPU, about its share of a layer's misses
FFN_PAGES = 64  # about what a block of 16 activates
FFN_CHAIN = 8  # layers in one program, so that its launch is not what is timed


class Scratch:
    """Pages of a key's size: one layer of a store, every byte written, and a pool for some of its pages."""

    def __init__(self, key: ProfileKey) -> None:
        pages = _within(STORE_BYTES // key.page_bytes, *STORE_PAGES)
        slots = min(pages, _within(POOL_BYTES // key.page_bytes, *POOL_PAGES))
        self.store = allocate_store(1, pages, key.hidden, key.width, jnp.dtype(key.dtype))
        # Memory that was never written is one and the same page of zeros, and that is never cold.
        self.views = self.store.views(0)
        for view in self.views:
            view.reshape(-1).view(np.uint8).fill(0)
        self.pool = empty_pool(slots, key.hidden, key.width, jnp.dtype(key.dtype))
        self._mover = make_mover(key.carrier, self.store)
        self._mover.attach(self.pool)
        starts = range(0, pages, slots)
        self._moves = [[(0, (start + slot) % pages, slot) for slot in range(slots)] for start in starts]
        self._calls = len(starts) // 2  # half a turn away from where the CPU begins
        self.pages_per_call = 1

    def transfer(self) -> float:
        """Moves the next `pages_per_call` pages to the device in one call; microseconds a page."""
        moves = self._moves[self._calls % len(self._moves)][: self.pages_per_call]
        self._calls += 1
        started = time.perf_counter()
        self.pool = self._mover.stage(self.pool, moves)
        self._mover.drain(self.pool)
        return _elapsed_us(started) / self.pages_per_call

    def warm_up(self, budget_s: float) -> None:
        """Compiles, and chooses `pages_per_call`: a pool of pages, fewer where that would take most of the budget."""
        self.transfer()
        slots = len(self._moves[0])
        self.pages_per_call = min(slots, 4)
        self.pages_per_call = _within(int(budget_s * 1e6 / 4 / self.transfer()), 1, slots)


def transfers_alone(scratch: Scratch, budget_s: float) -> float:
    """Microseconds a page while nothing else runs."""
    scratch.warm_up(budget_s)
    return median_until(scratch.transfer, budget_s)


class TransferLoop:
    """Transfers in a thread of its own, without a pause, while the body of a `with` runs.

    A thread, because on a GPU a call blocks its thread for as long as pages move, as a pass does in a run.
    """

    def __init__(self, scratch: Scratch) -> None:
        self._scratch = scratch
        self._times: list[float] = []
        self._error: BaseException | None = None
        self._begun, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="profile-transfers", daemon=True)

    @property
    def page_us(self) -> float:
        """Median microseconds a page, calls that began or ended outside the `with` left out where there are more."""
        inside = self._times[1:-1] or self._times
        return statistics.median(inside)

    def __enter__(self) -> "TransferLoop":
        self._thread.start()
        self._begun.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._begun.set()
            while not self._stop.is_set() or not self._times:
                self._times.append(self._scratch.transfer())
        except BaseException as error:  # handed to the thread that waits
            self._error = error


class CpuProbe:
    """Visits scratch pages with a CPU backend, `VISIT_EXPERTS` at a time, each page once a turn: cold weights."""

    def __init__(self, experts: CpuExperts) -> None:
        self._experts = experts
        self._pages = len(experts.pages[0][1])
        self._chosen = np.arange(min(self._pages, VISIT_EXPERTS))

    def visit(self, tokens: int) -> float:
        """Submits and collects experts with so many tokens each; microseconds an expert, all threads together."""
        gate_up, _ = self._experts.pages[0]
        H = len(self._chosen)
        work = CpuWork(
            layer=0,
            hidden=np.zeros((tokens, gate_up.shape[2]), gate_up.dtype),  # zeros cost what other values do
            experts=self._chosen,
            expert_ids=np.broadcast_to(self._chosen, (tokens, H)),
            gates=np.ones((tokens, H), np.float32),
            token_mask=np.ones(tokens, bool),
        )
        started = time.perf_counter()
        self._experts.submit(work)
        self._experts.collect(0)
        elapsed = _elapsed_us(started) / H
        self._chosen = np.sort((self._chosen + H) % self._pages)
        return elapsed

    def points(self, tokens: tuple[int, ...], budget_s: float) -> list[CpuTime]:
        """The median time of an expert for each number of tokens, measured in turn until the time is over.

        On a slow host the largest numbers of tokens are left out, never the first two.
        """
        visit_s = self.visit(1) * len(self._chosen) / 1e6
        affordable = tuple(n for n in tokens if sum(m for m in tokens if m <= n) * visit_s <= budget_s / 2)
        chosen = max(affordable, tokens[:2], key=len)
        times: dict[int, list[float]] = {n: [] for n in chosen}
        deadline = time.perf_counter() + budget_s
        turns = 0
        while turns < 2 or time.perf_counter() < deadline:
            for n in chosen:
                times[n].append(self.visit(n))
            turns += 1
        threads = self._experts.threads
        return [CpuTime(tokens=n, threads=threads, us=statistics.median(times[n])) for n in chosen]


def ffn_time(pool: Pool, tokens: int, budget_s: float) -> FfnTime:
    """The expert FFN of every page of a pool for a block, as one layer of a pass computes it."""
    C, _, D = pool.gate_up.shape
    items = ItemShape(num_tokens=tokens, top_k=C, num_experts=C)
    x = jnp.ones((tokens, D), pool.gate_up.dtype)
    numbers = jnp.array([0, C, *range(C)], jnp.int32)  # first item, end, slots

    @jax.jit
    def layers(x: jax.Array, numbers: jax.Array, pool: Pool) -> jax.Array:
        def layer(index: jax.Array, out: jax.Array) -> jax.Array:
            rows = x[None] + out[:1] * 0  # each layer waits for the one before
            return grouped_ffn(rows, numbers, *pool, out, span_at=0, slots_at=2)

        return jax.lax.fori_loop(0, FFN_CHAIN, layer, jnp.zeros((items.max_items, items.rows, D), x.dtype))

    def call() -> float:
        started = time.perf_counter()
        jax.block_until_ready(layers(x, numbers, pool))
        return _elapsed_us(started) / FFN_CHAIN

    call()
    return FfnTime(pages=C, tokens=tokens, us=median_until(call, budget_s))


def host_read_gbs(scratch: Scratch, budget_s: float) -> float:
    """Bandwidth of reading the scratch store with every CPU of this process, 10^9 bytes per second."""
    workers = len(os.sched_getaffinity(0))
    words = [view.reshape(-1).view(np.uint8) for view in scratch.views]
    pieces = [piece for flat in words for piece in np.array_split(flat[: len(flat) // 8 * 8].view(np.uint64), workers)]
    num_bytes = sum(piece.nbytes for piece in pieces)
    with ThreadPoolExecutor(workers) as pool:

        def call() -> float:
            started = time.perf_counter()
            for _ in pool.map(np.add.reduce, pieces):
                pass
            return _elapsed_us(started)

        call()
        return num_bytes / median_until(call, budget_s) / 1e3


def median_until(call: Callable[[], float], budget_s: float) -> float:
    """Median of what `call` returns, at least twice and until the time is over."""
    deadline = time.perf_counter() + budget_s
    times = [call(), call()]
    while time.perf_counter() < deadline:
        times.append(call())
    return statistics.median(times)


def _elapsed_us(started: float) -> float:
    """Never 0, whatever the clock's resolution."""
    return max((time.perf_counter() - started) * 1e6, 1e-3)


def _within(value: int, least: int, most: int) -> int:
    return max(least, min(most, value))
