"""OLED-MoE: confidence-weighted retention, layer-adaptive allocation, reuse-aware CPU/GPU dispatch."""

import dataclasses
from typing import Literal

from oled_jax.errors import UsageError
from oled_jax.policies.allocation import AdaptiveAllocation, UniformAllocation
from oled_jax.policies.base import PolicyContext
from oled_jax.policies.composed import Allocation, ComposedPolicy, Dispatch, Retention
from oled_jax.policies.dispatch import BalancedDispatch, ComputeAll, MakespanDispatch, TransferAll
from oled_jax.policies.options import PolicyEntry, require_range
from oled_jax.policies.retention import Confidence, Frequency, Priority, Psi, Recency

DispatchChoice = Literal["auto", "oled", "load", "gpu", "cpu", "makespan"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatchOptions:
    """Where misses go.

    dispatch: oled (the paper's), load (oled with reuse_weight 0), gpu, cpu, makespan, or auto: oled where the engine
      has a CPU backend, otherwise gpu. reuse_weight: lambda in units of |A_l| * T_H2D. swaps: most exchanges
      per layer.
    """

    dispatch: DispatchChoice = "auto"
    reuse_weight: float = 1.0
    swaps: int = 8

    def __post_init__(self) -> None:
        require_range(self, "reuse_weight", 0.0)
        require_range(self, "swaps", 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OledOptions(DispatchOptions):
    """The three parts, each of which can be switched alone, and their constants.

    retention: priority (the paper's), lru or lfu. psi, confidence: of the priority; see `retention.Priority`.
    allocation: adaptive (the paper's) or uniform. decay, interval: of the adaptive rule.
    """

    retention: Literal["priority", "lru", "lfu"] = "priority"
    psi: Psi = "confidence"
    confidence: Confidence = "previous+rerank"
    allocation: Literal["adaptive", "uniform"] = "adaptive"
    decay: float = 0.8
    interval: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_range(self, "decay", 0.0, 1.0)
        require_range(self, "interval", 1)


class OledPolicy(ComposedPolicy):
    """Keeps each layer's experts of greatest confidence-weighted router importance, within capacities that
    follow how much each layer activates and hits. Moves the misses whose reuse and load are worth a
    transfer; the CPU computes the others meanwhile. In prefill every miss is transferred.

    Source: OLED-MoE. Differences: ties are broken by last use; capacities have a floor and their running
    means a decay, which the paper does not give; the CPU time of an expert is affine in its tokens.
    """

    def __init__(self, options: OledOptions, context: PolicyContext) -> None:
        super().__init__(
            context,
            name="oled",
            retention=_retention(options, context),
            allocation=_allocation(options, context),
            dispatch=build_dispatch(context, options),
        )
        self.options = options


def _retention(options: OledOptions, context: PolicyContext) -> Retention:
    if options.retention == "lru":
        return Recency(context)
    if options.retention == "lfu":
        return Frequency(context)
    return Priority(context, psi=options.psi, confidence=options.confidence)


def _allocation(options: OledOptions, context: PolicyContext) -> Allocation:
    if options.allocation == "uniform":
        return UniformAllocation(context)
    return AdaptiveAllocation(context, decay=options.decay, interval=options.interval)


def build_dispatch(context: PolicyContext, options: DispatchOptions) -> Dispatch:
    """The dispatch rule by name. Raises UsageError where it needs a CPU backend and there is none."""
    choice = options.dispatch
    if choice == "auto":
        choice = "oled" if context.cpu_available else "gpu"
    if choice == "gpu":
        return TransferAll(context)
    if not context.cpu_available:
        raise UsageError(
            f"policy option dispatch={choice} computes experts on the CPU: "
            "choose a backend with --cpu-experts, or dispatch=gpu"
        )
    if choice == "cpu":
        return ComputeAll(context)
    if choice == "makespan":
        return MakespanDispatch(context, reuse_weight=options.reuse_weight)
    weight = 0.0 if choice == "load" else options.reuse_weight
    return BalancedDispatch(context, reuse_weight=weight, swaps=options.swaps)


ENTRIES = (
    PolicyEntry(
        name="oled",
        summary="OLED-MoE: confidence-weighted retention, adaptive capacity, reuse-aware CPU/GPU dispatch",
        build=OledPolicy,
        options=OledOptions,
    ),
)
