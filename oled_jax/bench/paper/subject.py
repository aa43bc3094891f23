"""What figures are measured on: a model in memory, what it is asked, and the runs that were already made.

A run has a new engine, so that no policy has seen the measured requests before. Its first batch of requests fills the
cache and is not counted; what compiles is run once before. Runs are kept: figures share them.
"""

import abc
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from oled_jax.bench.bed import Case, TestBed
from oled_jax.bench.paper.record import Method, Row, Values
from oled_jax.bench.paper.values import Took, over_runs, run_values
from oled_jax.bench.replay import EngineReplay, PassTime
from oled_jax.cli import note
from oled_jax.config import ModelConfig
from oled_jax.engine import Engine
from oled_jax.memory import page_bytes
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.passes import PassKind
from oled_jax.policies.registry import POLICIES, parse_policy
from oled_jax.program import Sampling
from oled_jax.sim.replay import future_of
from oled_jax.sim.tokens import OutputTokens
from oled_jax.traces.trace import MemoryTrace, first_pass

WARM_UP = 1  # batches of requests that are not counted
POOL_SHARE = 0.8  # of the device's memory, at most, for pages


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What is asked.

    block_length, prompt_tokens: None: as is usual for the model. editing: the 2.1 rule. requests: that are counted, in
    batches; None: the run's setting, and one batch of several. compared: layer inputs are, while it is recorded.
    """

    workload: str
    batch: int = 1
    block_length: int | None = None
    prompt_tokens: int | None = None
    editing: bool = False
    requests: int | None = None
    compared: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured. cpu: with CPU experts even where `generate` would leave them out. replayed: routes are
    replayed, even if the policy could generate."""

    policy: str
    capacity: int
    work: Work
    cpu: bool = False
    replayed: bool = False

    @property
    def needs_future(self) -> bool:
        return POLICIES[parse_policy(self.policy)[0]].needs_future


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """A job's figures over its repeats. digest: of the first repeat's text."""

    job: Job
    block_length: int
    method: Method
    values: Values
    digest: str | None

    def row(self, panel: str, setting: str | None = None, x: float | None = None) -> Row:
        """As a point of a figure."""
        job = self.job
        return Row(
            panel=panel, method=self.method, values=self.values, policy=job.policy, capacity=job.capacity,
            workload=job.work.workload, batch=job.work.batch, block_length=self.block_length, setting=setting, x=x,
            digest=self.digest,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSettings:
    """repeats: of every job. requests: that are measured. backend, threads: of CPU experts. carrier: of pages.
    quick: less of everything."""

    repeats: int
    requests: int
    backend: str
    threads: int | None
    carrier: str
    quick: bool


class Subject(abc.ABC):
    """A model to measure.

    Attributes:
      label: what the user called it. description: what it is, in a sentence.
      workloads: names of what it can be asked. block_length: the usual one.
      generates: it answers real prompts; else its routes are synthetic and replayed.
    """

    label: str
    description: str
    workloads: tuple[str, ...]
    block_length: int
    generates: bool

    def __init__(self, config: ModelConfig, settings: RunSettings) -> None:
        self.config = config
        self.settings = settings
        self._measured: dict[Job, Measured] = {}
        self._traces: dict[Work, MemoryTrace] = {}
        self._compiled: set[tuple[Work, str]] = set()

    @functools.cached_property
    @abc.abstractmethod
    def bed(self) -> TestBed:
        """The weights, loaded when they are first needed."""

    @abc.abstractmethod
    def make_trace(self, work: Work) -> MemoryTrace:
        """The passes of a piece of work: WARM_UP batches, then the measured ones."""

    @property
    @abc.abstractmethod
    def sampling(self) -> Sampling:
        """Of the head's program in replays."""

    @abc.abstractmethod
    def decoding_settings(self) -> dict[str, Any]:
        """How text is decoded; empty where none is."""

    @abc.abstractmethod
    def described_work(self, work: Work) -> dict[str, Any]:
        """What was asked, ready for JSON: enough to ask it again."""

    @property
    def largest_capacity(self) -> int:
        """Experts per layer for which the device has room."""
        stats = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
        if not stats or "bytes_limit" not in stats:
            return self.config.num_experts
        pages = int(POOL_SHARE * stats["bytes_limit"] / page_bytes(self.config)) - DEFAULT_SPARE
        return min(self.config.num_experts, pages // self.config.num_moe_layers)

    @property
    def slots(self) -> int:
        """Of every pool, so that all engines share their programs."""
        return self.config.num_moe_layers * self.largest_capacity + DEFAULT_SPARE

    def num_batches(self, work: Work) -> int:
        """Batches of requests that are counted."""
        return work.requests or (self.settings.requests if work.batch == 1 else 1)

    def first_request(self, work: Work) -> int:
        """Number of the first request that is counted."""
        return WARM_UP * work.batch

    def trace(self, work: Work) -> MemoryTrace:
        """`make_trace`, once."""
        if work not in self._traces:
            self._traces[work] = self.make_trace(work)
        return self._traces[work]

    def measure(self, jobs: Sequence[Job]) -> list[Measured]:
        """Runs jobs that were not run before, once each in every round: what else the machine does hits all alike."""
        new = [job for job in dict.fromkeys(jobs) if job not in self._measured]
        rounds = [[self._run(job) for job in new] for _ in range(self.settings.repeats)]
        for job, *runs in zip(new, *rounds, strict=True):
            self._measured[job] = self._together(job, runs)
        return [self._measured[job] for job in jobs]

    def _run(self, job: Job) -> tuple[dict[str, float], str | None]:
        values, digest = self._replay(job) if self.replays(job) else self.generate(job)
        speed = f"{values['tpot_ms']:.3g} ms a token" if "tpot_ms" in values else "no tokens"
        note(f"{job.policy} at {job.capacity}, {job.work.workload}, batch {job.work.batch}: {speed}")
        return values, digest

    def replays(self, job: Job) -> bool:
        """Whether the job's routes are replayed."""
        return job.replayed or job.needs_future or not self.generates

    def _together(self, job: Job, runs: Sequence[tuple[dict[str, float], str | None]]) -> Measured:
        return Measured(
            job=job,
            block_length=job.work.block_length or self.block_length,
            method=Method.REPLAYED if self.replays(job) else Method.GENERATED,
            values=over_runs([values for values, _ in runs]),
            digest=runs[0][1],
        )

    def generate(self, job: Job) -> tuple[dict[str, float], str | None]:
        """One run of real text: its figures, and a digest of the tokens."""
        raise NotImplementedError(f"{self.label} does not generate")

    def case(self, job: Job) -> Case:
        """The engine of a job: with CPU experts where `generate` would have them by default, or the job says so."""
        entry = POLICIES[parse_policy(job.policy)[0]]
        usual = entry.needs_cpu or (jax.default_backend() != "cpu" and self.bed.may_use_cpu(job.policy))
        backend = self.settings.backend if job.cpu or usual else None
        carrier, threads = self.settings.carrier, self.settings.threads
        return Case(policy=job.policy, capacity=job.capacity, carrier=carrier, backend=backend, threads=threads)

    def _replay(self, job: Job) -> tuple[dict[str, float], None]:
        trace = self.trace(job.work)
        case = self.case(job)
        future = future_of(trace) if job.needs_future else None
        program = "all" if case.is_reference else f"cpu {case.backend}"
        if (job.work, program) not in self._compiled:
            with self.bed.engine(case, future) as engine:
                list(EngineReplay(engine, trace, self.sampling).run())
            self._compiled.add((job.work, program))
        with self.bed.engine(case, future) as engine:
            took = self._timed(engine, trace, job.work)
            return run_values(engine.statistics, self.config.num_moe_layers, took), None

    def _timed(self, engine: Engine, trace: MemoryTrace, work: Work) -> Took:
        first = first_pass(trace, self.first_request(work))
        times = list(_counted(engine, EngineReplay(engine, trace, self.sampling).run(), first))
        tokens = OutputTokens(trace.header)
        for each in trace:
            tokens.add(each)
        prefill_s = sum(each.forward_s for each in times if each.kind is PassKind.PREFILL)
        decode_s = sum(each.total_s for each in times if each.kind is not PassKind.PREFILL)
        batches = sum(bool(each.prompts) for each in trace.passes[first:])
        return Took(
            decode_s=decode_s,
            request_s=decode_s * work.batch,
            prefill_s=prefill_s,
            batches=batches,
            tokens=tokens.count(self.first_request(work)),
        )


def _counted(engine: Engine, times: Iterator[PassTime], first: int) -> Iterator[PassTime]:
    """The passes from `first` on; the engine counts from there."""
    for number, each in enumerate(times):
        if number >= first:
            yield each
        if number == first - 1:
            engine.statistics.restart()


def digest_of(outputs: Sequence[Sequence[int]]) -> str:
    """Of generated token ids: equal for equal text."""
    joined = np.concatenate([np.asarray([*ids, -1], np.int64) for ids in outputs])
    return hashlib.sha256(joined.tobytes()).hexdigest()[:16]
