"""From what a user says (a model, a cache size, a policy) to an engine.

Opening reads headers only and starts no backend; planning refuses what cannot fit before anything is loaded.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from oled_jax.config import DecodingConfig, ModelConfig
from oled_jax.convert.checkpoint import open_checkpoint
from oled_jax.convert.hub import resolve_model
from oled_jax.cost.lookup import profile_for
from oled_jax.cost.measure import profile_key
from oled_jax.cost.profile import UNMEASURED
from oled_jax.decode.whole_text import rounded_up, text_capacity
from oled_jax.demo.shipped import LABEL, demo_model_dir
from oled_jax.engine import Engine, WeightSource, load_offloaded, load_resident
from oled_jax.errors import UsageError
from oled_jax.machine import device_free_bytes, host_free_bytes, is_unified, prepare_runtime
from oled_jax.memory import MemoryPlan, page_bytes, plan_memory, store_bytes
from oled_jax.models.registry import Family, family_named, siblings
from oled_jax.offload.carriers.registry import AUTO as CARRIER_AUTO
from oled_jax.offload.carriers.registry import choose
from oled_jax.offload.cpu_experts.registry import AUTO
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.policies.base import Policy, PolicyContext
from oled_jax.policies.registry import POLICIES, make_policy, parse_policy
from oled_jax.program import HEAD_POSITIONS
from oled_jax.session import kv_capacity, prefill_chunk
from oled_jax.text import TextCodec

CPU_OFF = "off"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenedModel:
    """A model whose description was read and whose weights were not.

    `label` is what the user called it. `config` has the dtype that the weights will have. `shipped`: it is
    the small trained model inside the package.
    """

    label: str
    config: ModelConfig
    raw_config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    codec: TextCodec
    weights: WeightSource
    shipped: bool = False

    @property
    def family(self) -> Family:
        return family_named(self.config.family)

    @property
    def identity(self) -> str:
        """Tells these weights from others, in one line: what the user called them, a digest of the configuration."""
        words = json.dumps(dict(self.raw_config), sort_keys=True, default=str)
        return f"{self.label} {hashlib.sha256(words.encode()).hexdigest()[:12]}"


def open_model(model: str | None, dtype: str | None = None, family: str | None = None) -> OpenedModel:
    """Finds and checks a model, and prepares JAX for its size. Must come before JAX starts its backend.

    Args:
      model: a directory or hub id; None: the trained model inside the package.
      dtype: of the weights; None: the checkpoint's.
      family: name of the family to take it for, where `config.json` does not say; None: the one it says.

    Raises:
      UsageError: there is no such model, everything that is wrong with it, or the family is of another network.
    """
    opened = _open_shipped(dtype) if model is None else _open_checkpoint(resolve_model(model), model, dtype)
    if family is not None:
        opened = _as_family(opened, family)
    config = opened.config
    prepare_runtime(store_bytes(config))
    return opened


def _open_shipped(dtype: str | None) -> OpenedModel:
    opened = _open_checkpoint(demo_model_dir(), LABEL, dtype)
    return dataclasses.replace(opened, shipped=True)


def _open_checkpoint(directory: Path, label: str, dtype: str | None) -> OpenedModel:
    checkpoint = open_checkpoint(directory)
    return OpenedModel(
        label=label,
        config=dataclasses.replace(checkpoint.config, dtype=dtype or checkpoint.config.dtype),
        raw_config=checkpoint.raw_config,
        generation_config=checkpoint.generation_config,
        codec=TextCodec.open(directory, checkpoint.family.chat_template),
        weights=checkpoint,
    )


def _as_family(model: OpenedModel, name: str) -> OpenedModel:
    """The same checkpoint as one of another family: published LLaDA2.1 files may say the model type of 2.0."""
    possible = [family.name for family in siblings(model.family)]
    if name not in possible:
        raise UsageError(
            f"--family {name}: model {model.label} says that it is {model.config.model_type}, which is another "
            f"network; it can be read as {' or '.join(possible)}"
        )
    return dataclasses.replace(model, config=dataclasses.replace(model.config, family=name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """How many experts are resident, and who chooses them.

    capacity: experts per MoE layer; None: as many as fit. all_resident: the user said "all". gigabytes: a
    size of the pool instead. cpu_experts: backend for misses left to the CPU, "off", or None for the
    default: "auto" where a policy can use it and the device is not the CPU itself, or where the policy
    needs one. carrier: see `offload.carriers.registry`; None: the user said nothing.
    """

    policy: str
    carrier: str | None = None
    cpu_experts: str | None = None
    cpu_threads: int | None = None
    capacity: int | None = None
    all_resident: bool = False
    gigabytes: float | None = None

    @property
    def is_reference(self) -> bool:
        """Every page is resident for good, and no policy runs."""
        return POLICIES[parse_policy(self.policy)[0]].is_reference

    def cpu_backend(self, device: jax.Device) -> str | None:
        """The backend to build; None: every miss is transferred."""
        if self.cpu_experts is not None:
            return None if self.cpu_experts == CPU_OFF else self.cpu_experts
        needed = POLICIES[parse_policy(self.policy)[0]].needs_cpu
        return AUTO if needed or device.platform != "cpu" else None

    @classmethod
    def parse(
        cls,
        policy: str,
        expert_cache: str | None,
        gigabytes: float | None,
        cpu_experts: str | None = None,
        cpu_threads: int | None = None,
        carrier: str | None = None,
    ) -> "CacheOptions":
        """From the flags' words. Raises UsageError for contradictions and impossible values."""
        entry = POLICIES[parse_policy(policy)[0]]
        if entry.simulated_only:
            raise UsageError(
                f"policy {policy!r} cannot generate: pages appear free of charge, only a replay can do that"
            )
        if expert_cache is not None and gigabytes is not None:
            raise UsageError("--expert-cache and --expert-cache-gb are two ways to say the same: give one")
        capacity = None
        if expert_cache is not None and expert_cache not in ("auto", "all"):
            if not expert_cache.isdecimal() or int(expert_cache) < 1:
                raise UsageError(
                    f"--expert-cache {expert_cache}: it must be a whole number of experts per MoE layer, "
                    "at least 1, or auto or all"
                )
            capacity = int(expert_cache)
        if entry.is_reference and (expert_cache not in (None, "all") or gigabytes is not None):
            raise UsageError("--policy all keeps every expert resident: leave out the size of the expert cache")
        if entry.is_reference and (cpu_experts is not None or cpu_threads is not None):
            raise UsageError("--cpu-experts and --cpu-threads have no effect with --policy all: nothing misses")
        if entry.is_reference and carrier is not None:
            raise UsageError("--carrier has no effect with --policy all: nothing moves")
        if cpu_threads is not None and cpu_experts == CPU_OFF:
            raise UsageError("--cpu-threads has no effect with --cpu-experts off")
        return cls(
            policy=policy,
            capacity=capacity,
            all_resident=expert_cache == "all",
            gigabytes=gigabytes,
            cpu_experts=cpu_experts,
            cpu_threads=cpu_threads,
            carrier=carrier,
        )

    def slots(self, config: ModelConfig, spare: int) -> int | None:
        """Sum of C_l; None: as many as fit. Raises UsageError for a number that the model does not have."""
        L, E = config.num_moe_layers, config.num_experts
        if self.all_resident or self.is_reference:
            return L * E
        if self.gigabytes is not None:
            return _slots_of_gigabytes(self.gigabytes, config, spare)
        if self.capacity is None:
            return None
        if self.capacity > E:
            raise UsageError(
                f"--expert-cache {self.capacity}: the model has {E} experts per layer, give 1 to {E}, or all"
            )
        return L * self.capacity


def _slots_of_gigabytes(gigabytes: float, config: ModelConfig, spare: int) -> int:
    L, E, page = config.num_moe_layers, config.num_experts, page_bytes(config)
    slots = int(gigabytes * 1e9 // page) - spare
    if slots < L:
        raise UsageError(
            f"--expert-cache-gb {gigabytes:g}: one expert in each of {L} layers and {spare} spare slots need "
            f"{(L + spare) * page / 1e9:.3g} GB, all {E} experts {(L * E + spare) * page / 1e9:.3g} GB"
        )
    return min(slots, L * E)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunShape:
    """What a run needs beyond the weights. Positions of the KV cache, of a prefill pass, of a block.

    Whole texts: no KV cache, the one kind of pass there is, and what the head works on at a time.
    """

    batch: int
    kv_positions: int
    chunk: int
    block_length: int
    fold_commits: bool = False

    @classmethod
    def of(cls, prompt_lengths: Sequence[int], decoding: DecodingConfig, batch: int | None = None) -> "RunShape":
        """batch: rows, as for `Engine.stream`; None: all prompts at once."""
        batch = min(batch or len(prompt_lengths), len(prompt_lengths))
        if decoding.whole_text:
            chunk = text_capacity(prompt_lengths, decoding)
            return cls(batch=batch, kv_positions=0, chunk=chunk, block_length=HEAD_POSITIONS)
        return cls(
            batch=batch,
            kv_positions=kv_capacity(prompt_lengths, decoding, batch),
            chunk=prefill_chunk(max(prompt_lengths, default=0), decoding.block_length, batch),
            block_length=decoding.block_length,
            fold_commits=decoding.fold_commits,
        )

    @classmethod
    def reserved(
        cls, positions: int, decoding: DecodingConfig, batch: int = 1, longest_chunk: int | None = None
    ) -> "RunShape":
        """For runs yet unknown, of at most so many tokens of prompt and answer together.

        Room is kept for a pass beyond them, of a chunk of a prompt or of blocks: see `session.kv_capacity`.

        Args:
          longest_chunk: positions of a prompt pass at most; None: as for any run.
        """
        if decoding.whole_text:
            return cls(batch=batch, kv_positions=0, chunk=rounded_up(positions + 1), block_length=HEAD_POSITIONS)
        L, folds = decoding.block_length, decoding.fold_commits
        chunk = prefill_chunk(min(positions, longest_chunk or positions), L, batch)
        kv_positions = rounded_up(positions + L + max(chunk, (1 + folds) * L))
        return cls(batch=batch, kv_positions=kv_positions, chunk=chunk, block_length=L, fold_commits=folds)


def plan_run(model: OpenedModel, cache: CacheOptions, shape: RunShape, device: jax.Device) -> MemoryPlan:
    """What the run will occupy on this machine, with the capacity chosen if the user left it open.

    Raises:
      UsageError: it cannot fit, or the capacity is none of the model's.
    """
    config = model.config
    if config.num_moe_layers == 0:
        raise UsageError(f"model {model.label} has no routed experts: there is nothing to cache or page")
    spare = 0 if cache.is_reference else DEFAULT_SPARE
    slots = cache.slots(config, spare)
    plan = plan_memory(
        config,
        total_slots=config.num_moe_layers if slots is None else slots,
        spare=spare,
        resident=cache.is_reference,
        unified=is_unified(device),
        device_free=device_free_bytes(device),
        host_free=host_free_bytes(),
        **dataclasses.asdict(shape),
    )
    if slots is None:
        plan = plan.with_capacity(max(1, plan.largest_capacity))
    plan.require_fit()
    return plan


def load_engine(
    model: OpenedModel,
    cache: CacheOptions,
    plan: MemoryPlan,
    progress: Callable[[int], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> tuple[Engine, Policy | None]:
    """Builds the policy, then loads the weights.

    A policy that may use the CPU goes by the machine's hardware profile: the saved one, or a quick measurement. That
    is made on scratch pages (about 1 GB) before the weights are loaded, so that the policy is complete before the
    slow part.

    Args:
      plan: of `plan_run`.
      progress: called with the number of each MoE layer that was loaded.
      notify: told in a sentence which carrier runs, and where the hardware profile comes from.

    Returns:
      the engine; and its policy, None if every page is resident for good.

    Raises:
      UsageError: the policy, the carrier or the CPU backend cannot be had here, or the weights cannot be used.
    """
    weights = model.weights if progress is None else _Watched(model.weights, progress)
    if plan.resident:
        return load_resident(model.config, weights), None
    carrier, why = choose(cache.carrier or CARRIER_AUTO)
    if notify is not None:
        notify(f"carrier: {carrier} ({why})")
    backend = cache.cpu_backend(jax.local_devices()[0])
    context = PolicyContext(
        num_layers=model.config.num_moe_layers,
        num_experts=model.config.num_experts,
        top_k=model.config.num_experts_per_tok,
        total_slots=plan.total_slots,
        costs=UNMEASURED,
        cpu_available=backend is not None,
        model=model.identity,
    )
    policy = make_policy(cache.policy, context)
    if not policy.uses_cpu and (cache.cpu_experts not in (None, CPU_OFF) or cache.cpu_threads is not None):
        raise UsageError(
            f"--cpu-experts and --cpu-threads have no effect: policy {cache.policy!r} transfers every miss"
        )
    if backend is None or not policy.uses_cpu:
        return load_offloaded(model.config, weights, policy, spare=plan.spare, carrier=carrier), policy
    profile = profile_for(profile_key(model.config, backend, cache.cpu_threads, carrier), notify)
    policy = make_policy(cache.policy, dataclasses.replace(context, costs=profile.costs))
    engine = load_offloaded(
        model.config,
        weights,
        policy,
        spare=plan.spare,
        cpu_backend=profile.backend,
        cpu_threads=profile.key.threads,
        carrier=carrier,
    )
    if engine.cpu_experts is not None and backend == AUTO:
        engine.cpu_experts.description = profile.description  # why this one is the fastest
    return engine, policy


class _Watched:
    """A weight source that reports each layer it has read."""

    def __init__(self, weights: WeightSource, progress: Callable[[int], None]) -> None:
        self._weights = weights
        self._progress = progress

    def read_trunk(self, dtype: np.dtype) -> dict[tuple[str | int, ...], np.ndarray]:
        return self._weights.read_trunk(dtype)

    def read_pages(self, moe_layer: int, gate_up: np.ndarray, down: np.ndarray) -> None:
        self._weights.read_pages(moe_layer, gate_up, down)
        self._progress(moe_layer)

    def check_finite(self) -> None:
        self._weights.check_finite()
