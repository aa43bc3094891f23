"""The statistics of a run: the JSON object (see docs/statistics.md) and the lines a user reads at the end.

A field that does not apply is None, never invented. tests/test_report.py holds the object's schema.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

import oled_jax
from oled_jax.decode.events import Result
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.machine import describe_machine, device_peak_bytes, host_peak_bytes
from oled_jax.memory import format_bytes
from oled_jax.offload.statistics import GROUPS, cache_figures
from oled_jax.passes import CacheShare, PassKind

STDOUT = "-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One finished request: its prompt's name and length, its result, and its text where there is a tokenizer."""

    prompt_tokens: int
    result: Result
    text: str | None
    id: str | int | None = None

    @property
    def end_s(self) -> float:
        """From the start of the run to its end."""
        return self.result.waited_s + self.result.ttft_prefill_s + self.result.decode_s

    def as_json(self, page_bytes: int) -> dict[str, Any]:
        """An entry of `requests`."""
        result = self.result
        return {
            "id": self.id,
            "prompt_tokens": self.prompt_tokens,
            "output_ids": list(result.output_ids),
            "text": self.text,
            "finish": result.finish,
            "passes": {kind.value: result.passes.get(kind, 0) for kind in PassKind},
            "waited_s": result.waited_s,
            "ttft_prefill_s": result.ttft_prefill_s,
            "ttft_block_s": result.ttft_block_s,
            "decode_s": result.decode_s,
            "tpot_s": result.tpot_s,
            "cache": None if result.share is None else share_object(result.share, page_bytes),
        }


def share_object(share: CacheShare, page_bytes: int) -> dict[str, Any]:
    """`cache` of a request."""
    return {
        "passes": share.passes,
        "hits": share.hits,
        "misses": share.activated - share.hits,
        "hit_rate": share.hits / share.activated if share.activated else None,
        "bytes_h2d": share.transferred * page_bytes,
    }


def totals(requests: Sequence[Request]) -> dict[str, Any]:
    """`totals`: what a run of requests, one batch after another, did together."""
    tokens = sum(len(request.result.output_ids) for request in requests)
    seconds = max(request.end_s for request in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.prompt_tokens for request in requests),
        "output_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if tokens else None,
    }


def statistics_object(
    engine: Engine, *, model: str, policy: str, settings: Mapping[str, Any], requests: Sequence[Request]
) -> dict[str, Any]:
    """The whole object, ready for JSON.

    Args:
      engine: that served all of `requests` and no others.
      model: what the user called it.
      policy: its specification, options included.
      settings: every effective value.
      requests: of one run, in order.
    """
    device = jax.local_devices()[0]
    tokens = sum(len(request.result.output_ids) for request in requests)
    return {
        "version": oled_jax.__version__,
        "model": model,
        "machine": describe_machine(device),
        "settings": dict(settings),
        "requests": [request.as_json(engine.statistics.page_bytes) for request in requests],
        "totals": totals(requests),
        **{name: cache_object(engine, policy, kinds, tokens) for name, kinds in GROUPS.items()},
        "memory": {
            "host_peak_bytes": host_peak_bytes(),
            "device_peak_bytes": device_peak_bytes(device),
            "store_bytes": engine.store.num_bytes if engine.store else None,
            "pool_bytes": sum(array.nbytes for array in engine.pool),
        },
    }


def cache_object(engine: Engine, policy: str, kinds: Sequence[PassKind], tokens: int) -> dict[str, Any]:
    """Cache figures over the passes of some kinds.

    Args:
      policy: its specification.
      tokens: generated ones, for `bytes_per_token`; prefill serves the prompt, so there it does not apply.
    """
    return cache_figures(
        engine.statistics, policy=policy, capacities=layer_capacities(engine), kinds=kinds, tokens=tokens
    )


def layer_capacities(engine: Engine) -> list[int]:
    """C_l of every MoE layer as it is now."""
    if engine.manager is None:
        return [engine.config.num_experts] * engine.config.num_moe_layers
    return [int(capacity) for capacity in engine.manager.policy.capacities()]


def cache_line(cache: Mapping[str, Any], num_experts: int) -> str:
    """One line for people, from the `cache` object."""
    parts = [f"cache: {cache['policy']}", f"capacity {cache['capacity']:g} of {num_experts}"]
    for name in ("hit_rate", "utilization"):
        if cache[name] is not None:
            parts.append(f"{name.replace('_', ' ')} {cache[name]:.1%}")
    if cache["bytes_per_token"] is not None:
        parts.append(f"{format_bytes(cache['bytes_per_token'])} per token moved")
    moved = f"{cache['to_gpu']} transferred, {cache['to_cpu']} on the CPU"
    parts.append(f"{cache['hits']} hits, {cache['misses']} misses ({moved})")
    if cache["prefetched"]:
        parts.append(f"{cache['prefetch_used']} of {cache['prefetched']} prefetches used")
    if cache["planning_us"] is not None and cache["planning_us"]["total"] > 0:
        parts.append(f"planning {cache['planning_us']['total'] / 1e3:.2f} ms per pass")
    return ", ".join(parts)


def request_line(request: Request) -> str:
    """One line for people on a finished request."""
    result = request.result
    passes = ", ".join(f"{count} {kind.value}" for kind, count in result.passes.items() if count)
    speed = "" if result.tpot_s is None else f", {result.tpot_s * 1e3:.1f} ms per token"
    return (
        f"generated {len(result.output_ids)} tokens ({result.finish}) in {result.decode_s:.2f} s{speed}; "
        f"prompt of {request.prompt_tokens} in {result.ttft_prefill_s:.2f} s; passes: {passes or 'none'}"
    )


def totals_line(together: Mapping[str, Any]) -> str:
    """One line for people on a run of several requests, from the `totals` object."""
    speed = "" if together["tokens_per_s"] is None else f", {together['tokens_per_s']:.1f} tokens per second"
    return f"{together['requests']} requests, {together['output_tokens']} tokens in {together['seconds']:.2f} s{speed}"


def check_json_target(target: str | None) -> None:
    """Raises UsageError if a JSON file cannot be written there, before any work is done."""
    if target is None or target == STDOUT:
        return
    path = Path(target)
    if path.is_dir():
        raise UsageError(f"{target} is a directory: give the file to write the statistics to")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no directory {path.absolute().parent}")


def write_json(value: Mapping[str, Any], target: str) -> None:
    """Writes one object, indented, as `write_text` does. Strict JSON: NaN is a defect."""
    write_text(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n", target)


def write_text(text: str, target: str) -> None:
    """Writes to standard output (`-`), or a whole file at once.

    Raises:
      UsageError: the file cannot be written.
    """
    if target == STDOUT:
        sys.stdout.write(text)
        return
    path = Path(os.path.realpath(target))  # a link is kept, and what it points to replaced
    in_place = path.exists() and not path.is_file()  # a device or a pipe
    unfinished = path if in_place else path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        unfinished.write_text(text, encoding="utf-8")
        if not in_place:
            os.replace(unfinished, path)
    except OSError as error:
        if not in_place:
            unfinished.unlink(missing_ok=True)
        raise UsageError(f"{target} cannot be written: {error.strerror}") from error
