"""The native backend: a layer's share is one call into the extension, which has its own threads (csrc/cpu_experts.h).

Owns the extension's engine and, while a share is in flight, references to the arrays that its threads use.
"""

import os
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from oled_jax import native
from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts.base import CpuExperts, CpuStats, CpuWork, LayerPages
from oled_jax.offload.cpu_experts.cores import one_cpu_per_core


class NativeExperts(CpuExperts):
    """Pages are read as stored, once for the tokens of an expert, with the widest instructions of the machine.

    Equal work gives equal bits at any number of threads. Results of different instruction set levels differ by
    rounding. After a fork the child must make its own: calls there raise RuntimeError.

    Args:
      pages, threads: see `CpuExperts`; pages may lie at any address.
      isa: one of `native.extension.cpu_isa_levels()`; None: the fastest.
      pin: each thread stays on a physical core of its own, while there are as many.

    Raises:
      UsageError: the extension was not built, or `isa` is not a level of this machine.
    """

    name = "native"

    def __init__(self, pages: Sequence[LayerPages], *, threads: int, isa: str | None = None, pin: bool = False) -> None:
        super().__init__(pages, threads=threads)
        if native.extension is None:
            raise UsageError(
                f"CPU experts: the native kernel is not built ({native.UNAVAILABLE}); install oled_jax where a "
                "C++ compiler is, or choose numba, xla or numpy"
            )
        levels = native.extension.cpu_isa_levels()
        if isa is not None and isa not in levels:
            raise UsageError(f"CPU experts: isa {isa!r} is not a level of this machine; choose {', '.join(levels)}")
        self.isa = isa or levels[-1]
        self.description += f", {self.isa}"
        E, D, F = self.pages[0][1].shape
        self._engine = native.extension.CpuExperts(
            layers=[(gate_up.view(np.uint8), down.view(np.uint8)) for gate_up, down in self.pages],
            dtype=self.pages[0][0].dtype.name,
            experts=E, D=D, F=F, threads=threads, isa=self.isa,
            cpus=one_cpu_per_core(os.sched_getaffinity(0)) if pin else [],
        )  # fmt: skip
        self._in_flight: dict[int, tuple[CpuWork, np.ndarray]] = {}
        self._hidden = np.empty((0, 0))  # of the last work
        self._bytes = self._hidden.view(np.uint8)  # the same memory

    def submit(self, work: CpuWork) -> None:
        # A layer waits while this runs, with the caches of its core full of other things: each line costs microseconds.
        # The native carrier lends the same array for every layer.
        if work.hidden is not self._hidden:
            self._require_fit(work)
            self._hidden = np.ascontiguousarray(work.hidden)
            self._bytes = self._hidden.view(np.uint8)
        self._engine.submit(work.layer, self._bytes, work.experts, work.expert_ids, work.gates, work.token_mask)
        self._in_flight[work.layer] = work, self._bytes

    def collect(self, layer: int) -> Float[np.ndarray, "N D"]:
        output, bad, pages, busy_us, span_us, wait_us = self._engine.collect(layer)
        work, _ = self._in_flight.pop(layer)
        self.stats += CpuStats(pages=pages, busy_us=busy_us, span_us=span_us, wait_us=wait_us)
        if bad >= 0:
            expert = int(work.experts[bad])
            tokens, k = np.nonzero((work.expert_ids == expert) & work.token_mask[:, None])
            raise self._not_finite(layer, expert, work.hidden[tokens], work.gates[tokens, k])
        return output

    def reset(self) -> None:
        self._engine.reset()
        self._in_flight.clear()

    def close(self) -> None:
        self._engine.close()
        self._in_flight.clear()
