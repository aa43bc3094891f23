"""KTransformers: the most frequent experts live on the GPU, the CPU computes all others."""

import dataclasses

from oled_jax.policies.base import PolicyContext
from oled_jax.policies.dispatch import ComputeAll
from oled_jax.policies.options import NoOptions, PolicyEntry
from oled_jax.policies.static import StaticPolicy, calibrated_policy, evenly_spread


@dataclasses.dataclass(frozen=True, kw_only=True)
class KTransformersOptions:
    """calibration: npz file with `counts` [L, E]; auto: the counts of the first prefill."""

    calibration: str | None = None


def build_frequency(options: KTransformersOptions, context: PolicyContext) -> StaticPolicy:
    """Keeps the most frequently used pages of a calibration run, whichever layers they lie in. Every miss
    outside prefill is computed on the CPU, and nothing is transferred while decoding. In prefill every miss
    is transferred.

    Source: KTransformers, expert placement by frequency. Differences: prefill misses are transferred, where
    the original uses its CPU kernels or layer-wise loading by prompt length; no expert is deferred.
    """
    return calibrated_policy(
        context, name="ktransformers", dispatch=ComputeAll(context), calibration=options.calibration
    )


def build_uniform(options: NoOptions, context: PolicyContext) -> StaticPolicy:
    """As `ktransformers`, with the same number of experts in every layer, whatever their frequency.

    Source: KTransformers, uniform placement. Differences: as there; expert numbers are at even distances.
    """
    return StaticPolicy(context, name="kt-uniform", dispatch=ComputeAll(context), placed=evenly_spread(context))


def build_dynamic(options: NoOptions, context: PolicyContext) -> StaticPolicy:
    """As `ktransformers`, placed anew by the counts of every request's prefill.

    Source: KTransformers, dynamic expert update. Differences: as there; the original updates during
    layer-wise prefill of long prompts only, and keeps the same number in every layer.
    """
    return StaticPolicy(context, name="kt-dynamic", dispatch=ComputeAll(context), learning="each request")


ENTRIES = (
    PolicyEntry(
        name="ktransformers",
        summary="KTransformers: most frequent experts fixed on the GPU, the CPU computes every miss",
        build=build_frequency,
        options=KTransformersOptions,
        needs_cpu=True,
    ),
    PolicyEntry(
        name="kt-uniform",
        summary="ktransformers with the placement spread evenly, without calibration",
        build=build_uniform,
        needs_cpu=True,
    ),
    PolicyEntry(
        name="kt-dynamic",
        summary="ktransformers placed anew by each request's prefill",
        build=build_dynamic,
        needs_cpu=True,
    ),
)
