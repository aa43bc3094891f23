"""What a checkpoint is and what of it fits on this machine, as lines for a user."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from oled_jax.config import DecodingConfig
from oled_jax.convert.checkpoint import ConvertedCheckpoint
from oled_jax.convert.weights import StoredWeights
from oled_jax.loading import RunShape
from oled_jax.machine import device_free_bytes, host_free_bytes, is_unified
from oled_jax.memory import MARGIN, MemoryPlan, format_bytes, page_bytes, plan_memory, trunk_bytes
from oled_jax.offload.residency import DEFAULT_SPARE

PROMPT_LENGTH = 512  # what the table assumes; decoding as the family's model card recommends


def describe_checkpoint(weights: StoredWeights, device: jax.Device) -> list[str]:
    """Configuration, sizes, and a table of capacities.

    Args:
      weights: of either kind.
      device: that would hold the pool.
    """
    lines = [*_configuration(weights), *_sizes(weights)]
    if weights.config.num_moe_layers == 0:
        return [*lines, "no routed experts: there is nothing to cache or page"]
    return [*lines, *_fits(weights, device)]


def _configuration(weights: StoredWeights) -> Iterator[str]:
    config = weights.config
    yield f"checkpoint: {weights.directory} ({_kind(weights)})"
    yield (
        f"model: {config.model_type}, {config.num_hidden_layers} layers, {config.num_moe_layers} of them with "
        f"{config.num_experts} experts (top {config.num_experts_per_tok}), {config.dtype}"
    )
    head = "tied head" if config.tie_word_embeddings else "own head"
    yield (
        f"shape: hidden {config.hidden_size}, expert width {config.moe_intermediate_size}, "
        f"{config.num_attention_heads} query and {config.num_key_value_heads} key/value heads of "
        f"{config.head_dim}, vocabulary {config.vocab_size} ({head})"
    )


def _kind(weights: StoredWeights) -> str:
    if not isinstance(weights, ConvertedCheckpoint):
        return "Hugging Face layout"
    cast = f", cast to {weights.manifest.dtype}" if weights.manifest.dtype else ""
    return f"converted by oled_jax {weights.manifest.converter_version}{cast}"


def _sizes(weights: StoredWeights) -> Iterator[str]:
    config, page = weights.config, page_bytes(weights.config)
    layer = config.num_experts * page
    yield f"on disk: {format_bytes(weights.total_bytes)} of weights"
    yield (
        f"in memory: trunk {format_bytes(trunk_bytes(config))}, page {format_bytes(page)}, "
        f"all pages of a layer {format_bytes(layer)}, all pages {format_bytes(config.num_moe_layers * layer)}"
    )


def _fits(weights: StoredWeights, device: jax.Device) -> Iterator[str]:
    plan = _plan(weights, device)
    host = "" if plan.host_free is None else f", {format_bytes(plan.host_free)} of host memory free"
    free = "" if plan.device_free is None else f", {format_bytes(plan.device_free)} of device memory free"
    shared = ", shared with the host" if plan.unified else ""
    yield f"this machine: {device.device_kind}{free}{shared}{host}"
    yield "experts per layer  expert cache   on the device  on the host  fits"
    for capacity in _capacities(weights, plan):
        yield _row(str(capacity), plan.with_capacity(capacity))
    yield _row("policy all", _plan(weights, device, resident=True))


def _capacities(weights: StoredWeights, plan: MemoryPlan) -> list[int]:
    E, K = weights.config.num_experts, weights.config.num_experts_per_tok
    return sorted({K, *(max(K, E * share // 16) for share in (1, 2, 4, 8, 16)), max(1, plan.largest_capacity)})


def _row(name: str, plan: MemoryPlan) -> str:
    device = plan.device_free is None or plan.device_bytes <= plan.device_free * (1 - MARGIN)
    host = plan.host_free is None or plan.host_bytes <= plan.host_free * (1 - MARGIN)
    verdict = "yes" if device and host else "no: " + ("host" if device else "device") + " memory"
    sizes = (format_bytes(size) for size in (plan.pool_bytes, plan.device_bytes, plan.host_bytes))
    pool, on_device, on_host = sizes
    return f"{name:<17}  {pool:>12}  {on_device:>14}  {on_host:>11}  {verdict}"


def _plan(weights: StoredWeights, device: jax.Device, *, resident: bool = False) -> MemoryPlan:
    config = weights.config
    recommended: dict[str, Any] = dict(weights.family.decoding)
    decoding = DecodingConfig(mask_id=0, eos_id=-1, **recommended)
    shape = RunShape.of([PROMPT_LENGTH], decoding)
    return plan_memory(
        config,
        total_slots=config.num_moe_layers * (config.num_experts if resident else 1),
        spare=0 if resident else DEFAULT_SPARE,
        **dataclasses.asdict(shape),
        resident=resident,
        unified=is_unified(device),
        device_free=device_free_bytes(device),
        host_free=host_free_bytes(),
    )
