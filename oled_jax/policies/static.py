"""Placements that do not follow the routing: which pages a calibration run says, and how they get there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax.errors import UsageError
from oled_jax.passes import PassKind
from oled_jax.policies.allocation import uniform_capacities
from oled_jax.policies.base import (
    Decision,
    IterationOutcome,
    LayerRouting,
    PageRequest,
    PassInfo,
    Policy,
    PolicyContext,
)
from oled_jax.policies.composed import Dispatch, everything_transferred, keep_best
from oled_jax.policies.prefetch import KnownResidents

Learning = Literal["never", "once", "each request"]


def read_counts(path: str, context: PolicyContext) -> Float[np.ndarray, "L E"]:
    """Tokens per layer and expert: array `counts` of an npz file. Raises UsageError if it is not that."""
    shape = (context.num_layers, context.num_experts)
    try:
        with np.load(Path(path), allow_pickle=False) as archive:
            counts = np.asarray(archive["counts"], np.float64)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UsageError(f"calibration={path}: cannot read array 'counts' from an npz file ({error})") from None
    if counts.shape != shape:
        raise UsageError(f"calibration={path}: counts has shape {counts.shape}, the model needs {shape}")
    if not np.all(np.isfinite(counts)) or counts.min() < 0:
        raise UsageError(f"calibration={path}: counts must be finite and not negative")
    return counts


def most_frequent(counts: Float[np.ndarray, "L E"], total: int) -> Bool[np.ndarray, "L E"]:
    """The `total` pages of greatest count over all layers; what is tied is spread over the layers."""
    by_layer = np.argsort(-counts, axis=1, kind="stable")
    rank = np.empty_like(by_layer)
    np.put_along_axis(rank, by_layer, np.arange(counts.shape[1])[None], axis=1)
    order = np.lexsort((rank.ravel(), -counts.ravel()))
    placed = np.zeros(counts.size, bool)
    placed[order[:total]] = True
    return placed.reshape(counts.shape)


def evenly_spread(context: PolicyContext) -> Bool[np.ndarray, "L E"]:
    """The same number of experts in every layer, at even distances of their numbers."""
    placed = np.zeros((context.num_layers, context.num_experts), bool)
    for layer, capacity in enumerate(uniform_capacities(context)):
        placed[layer, np.arange(capacity) * context.num_experts // max(int(capacity), 1)] = True
    return placed


class StaticPolicy(Policy):
    """Keeps a fixed set of pages. The dispatch rule says where misses go outside prefill.

    The set is given, or learned from the counts of a prefill: while it is being learned, each layer keeps
    its most counted experts; after each of its passes the `total_slots` most counted pages of all layers are
    placed, and C_l is how many of them a layer has. A request without a prefill pass learns from its first
    pass. Placed pages that are missing are staged when a request starts and after a pass. In prefill every
    miss is transferred.

    Args:
      placed: the set, if it is known; learning must then be "never".
      learning: once: from the first request; each request: anew from every request's prefill.
    """

    def __init__(
        self,
        context: PolicyContext,
        *,
        name: str,
        dispatch: Dispatch,
        placed: Bool[np.ndarray, "L E"] | None = None,
        learning: Learning = "never",
    ) -> None:
        super().__init__(context)
        self.name = name
        self.dispatch = dispatch
        self._learning = learning
        self._learns_now = learning == "once"
        self._counts = np.zeros((context.num_layers, context.num_experts))
        self._placed = np.zeros(self._counts.shape, bool) if placed is None else placed
        self._capacities = uniform_capacities(context) if placed is None else placed.sum(axis=1)
        self._known = KnownResidents(context)

    def begin_request(self, prompt_ids: Int[np.ndarray, " P"]) -> Sequence[PageRequest]:
        if self._learning == "each request":
            self._counts[:] = 0.0
            self._learns_now = True
        return () if self._learns_now else self._missing()

    def begin_iteration(self, info: PassInfo) -> None:
        if info.kind is not PassKind.PREFILL and self._counts.any():
            self._learns_now = False

    def on_route(self, routing: LayerRouting) -> Decision:
        layer = routing.layer
        with self.clock.part("dispatch"):
            if routing.info.kind is PassKind.PREFILL:
                to_gpu, to_cpu = everything_transferred(routing)
            else:
                to_gpu, to_cpu = self.dispatch.split(routing, self._counts[layer])
        with self.clock.part("priority"):
            if self._learns_now:
                self._counts[layer] += routing.loads
                keep = keep_best(routing, to_gpu, self._counts[layer])
            else:
                keep = routing.resident.copy()
                keep[to_gpu] = True
                keep &= self._placed[layer]
            self._known.update(layer, keep)
        return Decision(to_gpu=to_gpu, to_cpu=to_cpu, keep=keep)

    def end_iteration(self, outcome: IterationOutcome) -> Sequence[PageRequest]:
        with self.clock.part("allocation"):
            if self._learns_now:
                self._placed = most_frequent(self._counts, self.context.total_slots)
                self._capacities = self._placed.sum(axis=1)
                self._learns_now = outcome.kind is PassKind.PREFILL
            return self._missing()

    def _missing(self) -> Sequence[PageRequest]:
        return self._known.request_all(self._placed, self._counts)

    def capacities(self) -> Int[np.ndarray, " L"]:
        return self._capacities

    def scores(self, layer: int) -> Float[np.ndarray, " E"]:
        # A placed page outranks every other, however often the other was counted.
        return self._counts[layer] + self._placed[layer] * (1.0 + self._counts[layer].max())

    def forget_residents(self) -> None:
        self._known.forget()


def calibrated_policy(
    context: PolicyContext, *, name: str, dispatch: Dispatch, calibration: str | None
) -> StaticPolicy:
    """The most frequent pages of a calibration file; without one, of the first prefill, with a note."""
    if calibration is not None:
        placed = most_frequent(read_counts(calibration, context), context.total_slots)
        return StaticPolicy(context, name=name, dispatch=dispatch, placed=placed)
    policy = StaticPolicy(context, name=name, dispatch=dispatch, learning="once")
    policy.notes.append(f"{name}: no calibration file, so experts are placed by the first prefill's counts")
    return policy
