"""A real model, from a directory or inside the package: held-out questions of three families are its workloads."""

import argparse
import dataclasses
import functools
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oled_jax.bench.bed import Case, TestBed
from oled_jax.bench.paper.subject import WARM_UP, Job, RunSettings, Subject, Work, digest_of
from oled_jax.bench.paper.values import Took, run_values
from oled_jax.cli import decoding_options
from oled_jax.config import DecodingConfig
from oled_jax.decode.events import Result
from oled_jax.decoding_options import effective_settings
from oled_jax.demo.families import BY_NAME, held_out_items
from oled_jax.loading import OpenedModel
from oled_jax.program import Sampling
from oled_jax.session import kv_capacity, prefill_chunk
from oled_jax.traces.files import open_trace
from oled_jax.traces.trace import MemoryTrace

WORKLOADS = ("math", "code", "qa")
GEN_LENGTH, QUICK_GEN_LENGTH = 128, 16  # tokens at most, of each request
CANDIDATES = 48  # questions of each family to choose from
TOKENS_A_PASS = 3  # what the published models write with their usual threshold, about
EDITING = {"editing": True, "threshold": 0.7, "editing_threshold": 0.5}  # the 2.1 family's card


class CheckpointSubject(Subject):
    """Generates real text.

    Args:
      model: opened; its weights are read when they are first needed.
    """

    generates = True

    def __init__(self, model: OpenedModel, settings: RunSettings) -> None:
        super().__init__(model.config, settings)
        self.label = Path(model.label).name or model.label
        self.workloads = WORKLOADS[:1] if settings.quick else WORKLOADS
        self._model = model
        length = QUICK_GEN_LENGTH if settings.quick else GEN_LENGTH
        flags = argparse.Namespace(gen_length=length)
        self.decoding = decoding_options(flags, model)
        self.block_length = self.decoding.block_length
        self.decoding = self._paced(self.decoding)
        config = model.config
        self.description = (
            f"{model.label}: {config.num_moe_layers} MoE layers of {config.num_experts} experts, held-out questions"
        )

    @functools.cached_property
    def bed(self) -> TestBed:
        return TestBed(self.config, slots=self.slots, source=self._model.weights)

    @property
    def sampling(self) -> Sampling:
        return Sampling.of(self.config, self.decoding)

    def decoding_settings(self) -> dict[str, Any]:
        return effective_settings(self.decoding)

    def described_work(self, work: Work) -> dict[str, Any]:
        """Token ids of the prompts, by batch: the first WARM_UP are not counted."""
        return {"batches": self.batches(work)}

    def _paced(self, decoding: DecodingConfig) -> DecodingConfig:
        """The demo model would fill most blocks at once, and nothing could be reused: it gets the published pace."""
        if not self._model.shipped:
            return decoding
        return dataclasses.replace(decoding, threshold=1.0, steps=max(1, round(decoding.block_length / TOKENS_A_PASS)))

    def decoding_of(self, work: Work) -> DecodingConfig:
        """The settings of a piece of work."""
        changes: dict[str, object] = {} if work.block_length is None else {"block_length": work.block_length}
        if work.prompt_tokens is not None:  # who sets the prompt's length asks about prefill
            changes["gen_length"] = work.block_length or self.block_length
        changed = self._paced(dataclasses.replace(self.decoding, **changes))  # type: ignore[arg-type]
        return dataclasses.replace(changed, **EDITING) if work.editing else changed  # type: ignore[arg-type]

    def batches(self, work: Work) -> list[list[list[int]]]:
        """Prompts, as token ids, in batches: WARM_UP of them, then the measured ones."""
        count = (WARM_UP + self.num_batches(work)) * work.batch
        if work.prompt_tokens is not None:
            text = [token for prompt in self._encoded[work.workload] for token in prompt]
            long = [text[start:] + text[:start] for start in range(0, len(text), max(1, len(text) // count))]
            prompts = [(each * (work.prompt_tokens // len(text) + 1))[: work.prompt_tokens] for each in long]
        else:
            prompts = self._alike[work.workload]
        chosen = [prompts[number % len(prompts)] for number in range(count)]
        return [chosen[start : start + work.batch] for start in range(0, count, work.batch)]

    @functools.cached_property
    def _encoded(self) -> dict[str, list[list[int]]]:
        encode = self._model.codec.encode_prompt
        return {name: [encode(item.prompt) for item in held_out_items(BY_NAME[name], CANDIDATES)] for name in WORKLOADS}

    @functools.cached_property
    def _alike(self) -> dict[str, list[list[int]]]:
        """Prompts of every workload whose programs have the same shapes, as far as there are such."""
        T, found = self.block_length, {}

        def shape(prompt: Sequence[int]) -> tuple[int, int]:
            whole = len(prompt) // T * T
            return kv_capacity([len(prompt)], self.decoding), prefill_chunk(whole, T) if whole else 0

        shapes = {name: Counter(map(shape, prompts)) for name, prompts in self._encoded.items()}
        common = max((s for each in shapes.values() for s in each), key=lambda s: min(n[s] for n in shapes.values()))
        for name, prompts in self._encoded.items():
            same = [prompt for prompt in prompts if shape(prompt) == common]
            found[name] = same or prompts
        return found

    def make_trace(self, work: Work) -> MemoryTrace:
        """Recorded with every page resident but managed, so that no further program is compiled."""
        decoding = self.decoding_of(work)
        capacity = self.largest_capacity
        case = Case(policy="lru", capacity=capacity, carrier=self.settings.carrier)
        with tempfile.TemporaryDirectory() as folder, self.bed.engine(case) as engine:
            path = Path(folder) / "recorded.trace"
            with engine.record(path, decoding, hidden=work.compared, model=self.label):
                for batch in self.batches(work):
                    engine.generate(batch, decoding)
            recorded = open_trace(path)
            return MemoryTrace(recorded.header, tuple(recorded))

    def generate(self, job: Job) -> tuple[dict[str, float], str | None]:
        decoding, batches = self.decoding_of(job.work), self.batches(job.work)
        with self.bed.engine(self.case(job)) as engine:
            for batch in batches[:WARM_UP]:
                engine.generate(batch, decoding)
            engine.statistics.restart()
            answers = [engine.generate(batch, decoding) for batch in batches[WARM_UP:]]
            values = run_values(engine.statistics, self.config.num_moe_layers, _took(answers))
        return values, digest_of([result.output_ids for batch in answers for result in batch])


def _took(answers: Sequence[Sequence[Result]]) -> Took:
    results = [result for batch in answers for result in batch]
    return Took(
        decode_s=sum(max(result.decode_s for result in batch) for batch in answers),
        request_s=sum(result.decode_s for result in results),
        prefill_s=sum(max(result.ttft_prefill_s for result in batch) for batch in answers),
        batches=len(answers),
        tokens=sum(len(result.output_ids) for result in results),
    )
