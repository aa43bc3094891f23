"""The simulator's part: what a trace would take with pages of a published size, on a machine that a profile describes.

Everything here is an estimate of the time of routed experts: trunk, head and planning count 0, and every row says so by
its method.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from oled_jax.bench.paper.record import Method, Row, Value
from oled_jax.bench.paper.subject import Subject, Work
from oled_jax.bench.paper.values import Took, run_values
from oled_jax.cli import note
from oled_jax.cost.lookup import profile_for
from oled_jax.cost.measure import profile_key
from oled_jax.errors import UsageError
from oled_jax.models.published import PUBLISHED
from oled_jax.offload.schedule import PlacedLayer
from oled_jax.passes import PassKind
from oled_jax.sim.cells import Cell
from oled_jax.sim.grid import CellResult, Machine, simulate
from oled_jax.sim.hardware import Hardware, is_about, of_bandwidths, of_profile, read_profile
from oled_jax.sim.timing import Carrier, TimeOptions
from oled_jax.traces.trace import MemoryTrace, TraceHeader

DECODE = (PassKind.DENOISE, PassKind.EDIT, PassKind.COMMIT)
PAGE_FIELDS = ("hidden_size", "moe_intermediate_size", "dtype")


class Estimates:
    """Simulates a subject's traces.

    Args:
      subject: whose traces.
      profiles: files of hardware profiles; each is for pages of one size.

    Attributes:
      sizes: names of page sizes. The demo model's own pages are too small to say anything about published models: it
        is estimated with theirs.

    Raises:
      UsageError: a file cannot be used, or is about pages that nothing is estimated with.
    """

    def __init__(self, subject: Subject, profiles: Sequence[Path], *, is_demo: bool) -> None:
        self._subject = subject
        self._pages: dict[str, dict[str, Any]] = {}
        if is_demo:
            self._pages = {name: {field: PUBLISHED[name][field] for field in PAGE_FIELDS} for name in PUBLISHED}
        else:
            self._pages = {subject.label: {field: getattr(subject.config, field) for field in PAGE_FIELDS}}
        self.sizes = tuple(self._pages)
        self._hardware: dict[str, Hardware] = {}
        for path in profiles:
            profile = read_profile(path)
            about = [name for name in self.sizes if is_about(profile, self._header(name))]
            if not about:
                raise UsageError(f"--profile {path} is about other pages than those of {' and '.join(self.sizes)}")
            for name in about:
                self._hardware[name] = _filled(of_profile(profile, str(path)), self._header(name))

    def hardware(self, size: str) -> Hardware:
        """Of pages of a size: the given profile, else on a GPU this machine's, else figures that are built in."""
        if size not in self._hardware:
            self._hardware[size] = _filled(self._own(size), self._header(size))
        return self._hardware[size]

    @property
    def origins(self) -> dict[str, list[str]]:
        """Where the times come from, by size; of those that were used."""
        return {size: list(hardware.origins) for size, hardware in self._hardware.items()}

    def row(
        self,
        panel: str,
        work: Work,
        policy: str,
        capacity: int,
        *,
        size: str,
        h2d_gbs: float | None = None,
        watch: Callable[[PlacedLayer], None] | None = None,
        more: Callable[[CellResult], Mapping[str, float]] | None = None,
    ) -> Row:
        """Simulates one policy.

        Args:
          size: of the pages. h2d_gbs: another bandwidth of the link.
          watch: is shown every layer as it was decided. more: further values of the result.
        """
        machine = self._machine(size, h2d_gbs)
        trace = self._resized(work, size)
        cell = Cell(policy=policy, capacity=capacity)
        result = simulate(trace, cell, machine, warm_up=self._subject.first_request(work), watch=watch)
        values = self._values(result, work) | dict(more(result) if more is not None else {})
        return Row(
            panel=panel, method=Method.SIMULATED, policy=policy, capacity=capacity, workload=work.workload,
            batch=work.batch, block_length=trace.header.block_length, setting=f"pages of {size}", x=h2d_gbs,
            values={name: Value((value,)) for name, value in values.items()},
        )  # fmt: skip

    def _values(self, result: CellResult, work: Work) -> dict[str, float]:
        decode_s = sum(result.times[kind].total for kind in DECODE) / 1e6
        took = Took(
            decode_s=decode_s,
            request_s=decode_s * work.batch,
            prefill_s=result.times[PassKind.PREFILL].total / 1e6,
            batches=self._subject.num_batches(work),
            tokens=result.tokens,
        )
        values = run_values(result.statistics, len(result.capacities), took)
        return {name: value for name, value in values.items() if "planning" not in name}

    def _machine(self, size: str, h2d_gbs: float | None) -> Machine:
        hardware = self.hardware(size)
        if h2d_gbs is not None:
            us = self._header(size).page_bytes / h2d_gbs / 1e3
            costs = {name: dataclasses.replace(getattr(hardware, name), h2d_us=us) for name in ("alone", "together")}
            hardware = dataclasses.replace(hardware, **costs)
        carrier = Carrier(hardware.carrier or Carrier.NATIVE)
        return Machine(hardware=hardware, options=TimeOptions(carrier=carrier))

    def _header(self, size: str) -> TraceHeader:
        config = self._subject.config
        return TraceHeader(
            source="", model=size, num_layers=config.num_moe_layers, num_experts=config.num_experts,
            top_k=config.num_experts_per_tok, block_length=self._subject.block_length, **self._pages[size],
        )  # fmt: skip

    def _resized(self, work: Work, size: str) -> MemoryTrace:
        trace = self._subject.trace(work)
        return MemoryTrace(dataclasses.replace(trace.header, **self._pages[size]), trace.passes)

    def _own(self, size: str) -> Hardware:
        """This machine's, measured if it is not known yet; built in where it has no GPU, or pages of another size."""
        settings = self._subject.settings
        if size != self._subject.label or jax.default_backend() == "cpu":
            return of_bandwidths(self._header(size).page_bytes)
        key = profile_key(self._subject.config, settings.backend, settings.threads, settings.carrier)
        return of_profile(profile_for(key, note), "this machine's profile")


def _filled(hardware: Hardware, header: TraceHeader) -> Hardware:
    """With the built-in time of the expert FFN, where a quick profile has none: 0 would make residency free."""
    if hardware.ffn:
        return hardware
    built_in = of_bandwidths(header.page_bytes)
    origins = (*hardware.origins[:-1], built_in.origins[-1], built_in.origins[0])
    return dataclasses.replace(hardware, ffn=built_in.ffn, origins=origins)
