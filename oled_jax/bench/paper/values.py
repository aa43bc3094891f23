"""The figures of one run by name, the same whether an engine or the simulator counted them. NumPy only.

tpot_ms            decoding time of a request / its output tokens, mean over requests weighted by tokens
pass_ms            decoding time / passes (denoise, edit and commit)
tokens_per_s       output tokens of all rows / decoding time
tokens_per_pass    output tokens / denoise and edit passes
ttft_ms            prefill of a batch of prompts
hit_rate, utilization, effective_transfer_ratio      docs/statistics.md, denoise and edit passes
activated_per_slot sum of activated experts / sum of capacities: no utilization can exceed it
activated, misses, to_gpu, to_cpu, prefetched, prefetch_used      per layer and pass
h2d_mb_per_token   pages moved while decoding / output tokens
planning_*_us      host time of a pass by part; planning_share: of the time of a pass
prefill_*          of a batch of prompts: pages moved, planning
"""

import dataclasses
from collections.abc import Sequence

from oled_jax.bench.paper.record import Value
from oled_jax.offload.statistics import CacheStatistics
from oled_jax.passes import PassKind

DECODE = (PassKind.DENOISE, PassKind.EDIT)
PER_LAYER = ("misses", "to_gpu", "to_cpu", "prefetched", "prefetch_used")
RATIOS = ("hit_rate", "utilization", "effective_transfer_ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Took:
    """Time and tokens of one run, the warm-up left out.

    decode_s: wall time of all decode passes. request_s: decode time of the requests, added up. prefill_s: of all
    prefills. batches: how many there were. tokens: output tokens of all requests.
    """

    decode_s: float
    request_s: float
    prefill_s: float
    batches: int
    tokens: int


def run_values(statistics: CacheStatistics, num_layers: int, took: Took) -> dict[str, float]:
    """Every figure of a run that applies, by name."""
    passes = sum(statistics.summary(*kinds).passes for kinds in (DECODE, (PassKind.COMMIT,)))
    values = _cache_values(statistics, num_layers, took)
    if took.tokens and passes:
        values["tpot_ms"] = took.request_s * 1e3 / took.tokens
        values["pass_ms"] = took.decode_s * 1e3 / passes
        values["tokens_per_s"] = took.tokens / took.decode_s
        values["tokens_per_pass"] = took.tokens / statistics.summary(*DECODE).passes
    prefill = statistics.summary(PassKind.PREFILL)
    if prefill.passes and took.batches:
        values["ttft_ms"] = took.prefill_s * 1e3 / took.batches
        values["prefill_loads"] = prefill.to_gpu / took.batches
        if prefill.planning_us is not None:
            values["prefill_planning_ms"] = prefill.planning_us["total"] * prefill.passes / 1e3 / took.batches
    if "pass_ms" in values and "planning_total_us" in values:
        values["planning_share"] = values["planning_total_us"] / 1e3 / values["pass_ms"]
    return values


def _cache_values(statistics: CacheStatistics, num_layers: int, took: Took) -> dict[str, float]:
    found = statistics.summary(*DECODE)
    if not found.passes:
        return {}
    layer_passes = found.passes * num_layers
    activated = found.hits + found.misses
    values = {name: getattr(found, name) for name in RATIOS if getattr(found, name) is not None}
    values |= {name: getattr(found, name) / layer_passes for name in PER_LAYER}
    values["activated"] = activated / layer_passes
    slots = int(statistics.per_layer(DECODE, "capacity").sum())
    if slots:  # a global list may leave every layer without a page when its turn comes
        values["activated_per_slot"] = activated / slots
    if took.tokens:
        values["h2d_mb_per_token"] = found.bytes_h2d / 1e6 / took.tokens
    values |= {f"planning_{part}_us": us for part, us in (found.planning_us or {}).items()}
    return values


def over_runs(runs: Sequence[dict[str, float]]) -> dict[str, Value]:
    """Repeats of the same work together: what all of them have."""
    return {name: Value(tuple(run[name] for run in runs)) for name in runs[0] if all(name in run for run in runs)}
