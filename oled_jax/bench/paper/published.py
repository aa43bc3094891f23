"""A published shape with random weights: synthetic routes, replayed. As many layers as there is room for."""

import dataclasses
import functools
from typing import Any

import jax

from oled_jax.bench.bed import TestBed, fitting_layers
from oled_jax.bench.paper.subject import POOL_SHARE, WARM_UP, RunSettings, Subject, Work
from oled_jax.bench.replay import greedy_sampling
from oled_jax.config import ModelConfig
from oled_jax.errors import UsageError
from oled_jax.machine import prepare_runtime
from oled_jax.memory import page_bytes, store_bytes
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.program import Sampling
from oled_jax.traces.batch import stack_requests
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise
from oled_jax.traces.trace import MemoryTrace

NAMES = {"mini-random": "llada2-mini", "flash-random": "llada2-flash"}
SYNTHETIC = "synthetic"
BLOCK, BLOCKS, PROMPT = 16, 2, 128  # of a synthetic request


class PublishedSubject(Subject):
    """Replays synthetic routes.

    Args:
      preset: of the synthetic traces.
      config: with the preset's MoE layers, or fewer.
      note: on how many layers there are and why.
    """

    generates = False
    workloads = (SYNTHETIC,)
    block_length = BLOCK

    def __init__(self, label: str, preset: str, config: ModelConfig, settings: RunSettings, note: str = "") -> None:
        super().__init__(config, settings)
        self.label = label
        self.description = f"{label}: the shape of {preset}, random weights, synthetic routes replayed{note}"
        self._preset = preset

    @functools.cached_property
    def bed(self) -> TestBed:
        return TestBed(self.config, slots=self.slots)

    @property
    def sampling(self) -> Sampling:
        return greedy_sampling(self.config)

    def decoding_settings(self) -> dict[str, Any]:
        return {}

    def described_work(self, work: Work) -> dict[str, Any]:
        """The specification of the trace."""
        return dict(self.trace(work).header.settings)

    def make_trace(self, work: Work) -> MemoryTrace:
        """Its targets are the preset's (docs/locality.md)."""
        config = self.config
        block = work.block_length or BLOCK
        spec = make_spec(
            self._preset,
            num_layers=config.num_moe_layers,
            block_length=block,
            blocks=BLOCKS if work.prompt_tokens is None else 1,
            prompt_tokens=PROMPT if work.prompt_tokens is None else work.prompt_tokens,
            tokens_per_iteration=float(min(3, block)),
            requests=(WARM_UP + self.num_batches(work)) * work.batch,
            iterations=None,
        )
        trace = synthesise(spec)
        if work.batch > 1:
            return stack_requests(trace, work.batch)
        return MemoryTrace(trace.header, tuple(trace))


def published_subject(label: str, settings: RunSettings, layers: int | None = None) -> PublishedSubject:
    """A model of this many layers, dense ones included; None: as many as memory holds, at most all.

    Raises:
      UsageError: not even one MoE layer fits, or not as many layers as are wanted.
    """
    preset = NAMES[label]
    config = config_from_hf(PUBLISHED[preset])
    prepare_runtime(store_bytes(config))
    dense, whole = config.first_k_dense_replace, config.num_hidden_layers
    fitting = min(fitting_layers(config), _device_layers(config) + dense)
    if fitting <= dense:
        need = config.num_experts * page_bytes(config) / 1e9
        raise UsageError(f"--model {label}: not one MoE layer fits here, its experts take {need:.3g} GB")
    if layers is not None and not dense < layers <= fitting:
        raise UsageError(f"--layers {layers}: choose {dense + 1} to {fitting}, which fit here")
    reason = "as many as memory holds" if layers is None else "as --layers says"
    layers = layers or fitting
    note = "" if layers == whole else f"; {layers} of {whole} layers, {reason}"
    return PublishedSubject(label, preset, dataclasses.replace(config, num_hidden_layers=layers), settings, note)


def _device_layers(config: ModelConfig) -> int:
    """MoE layers that can be resident as a whole, so that policy `all` can be measured."""
    stats = None if jax.default_backend() == "cpu" else jax.local_devices()[0].memory_stats()
    if not stats or "bytes_limit" not in stats:
        return config.num_moe_layers
    pages = int(POOL_SHARE * stats["bytes_limit"] / page_bytes(config)) - DEFAULT_SPARE
    return min(config.num_moe_layers, pages // config.num_experts)
