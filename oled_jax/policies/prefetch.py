"""What policies that fetch ahead share: what they believe resident, and the best of what they miss."""

import numpy as np
from jaxtyping import Bool, Float

from oled_jax.policies.base import PageRequest, PolicyContext


class KnownResidents:
    """The pages a policy believes to be resident or on their way, [L, E].

    A policy sees one layer's residents at a time. This remembers each layer as its last decision left it,
    plus what was requested since. It saves requests for pages that are there; being wrong costs a request,
    not an answer.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.pages = np.zeros((context.num_layers, context.num_experts), bool)

    def update(self, layer: int, keep: Bool[np.ndarray, " E"]) -> None:
        self.pages[layer] = keep

    def forget(self) -> None:
        self.pages[:] = False

    def request_all(self, wanted: Bool[np.ndarray, "L E"], priority: Float[np.ndarray, "L E"]) -> list[PageRequest]:
        """Requests for every wanted page that is not known to be resident."""
        layers, experts = np.nonzero(wanted & ~self.pages)
        return self._request(layers, experts, priority[layers, experts])

    def request_best(self, first_layer: int, priority: Float[np.ndarray, "R E"], limit: int) -> list[PageRequest]:
        """Requests for the `limit` missing pages of greatest positive priority, from `first_layer` on."""
        missing = np.where(self.pages[first_layer : first_layer + priority.shape[0]], 0.0, priority).ravel()
        best = np.flatnonzero(missing)
        if best.size > limit:
            values = missing[best]
            best = best[values >= np.partition(values, -limit)[-limit]]
        best = best[np.argsort(-missing[best], kind="stable")[:limit]]
        layers, experts = np.divmod(best, priority.shape[1])
        return self._request(layers + first_layer, experts, missing[best])

    def _request(self, layers: np.ndarray, experts: np.ndarray, priority: np.ndarray) -> list[PageRequest]:
        self.pages[layers, experts] = True
        return [
            PageRequest(layer=layer, expert=expert, priority=value)
            for layer, expert, value in zip(layers.tolist(), experts.tolist(), priority.tolist(), strict=True)
        ]
