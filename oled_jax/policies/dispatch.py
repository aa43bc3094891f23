"""Where a miss is computed: transferred to the device, or on the CPU while the transfers run."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from oled_jax import native
from oled_jax.cost.profile import CostProfile
from oled_jax.policies.base import LayerRouting, PolicyContext
from oled_jax.policies.composed import Dispatch, everything_transferred

Split = tuple[Int[np.ndarray, " G"], Int[np.ndarray, " H"]]


class TransferAll(Dispatch):
    """Every miss is transferred."""

    uses_cpu = False

    def split(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> Split:
        return everything_transferred(routing)


class ComputeAll(Dispatch):
    """Every miss is computed on the CPU."""

    def split(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> Split:
        to_gpu, to_cpu = everything_transferred(routing)
        return to_cpu, to_gpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class MissCosts:
    """What a split of the misses into G (transferred) and the rest (CPU) costs, in microseconds.

        J(G) = max(|G| * T_H2D, sum of cpu over the rest) - sum of reuse over G

    cpu: CPU time of each miss. reuse: lambda * p of each miss.
    """

    h2d_us: float
    cpu: Float[np.ndarray, " M"]
    reuse: Float[np.ndarray, " M"]


class CostedDispatch(Dispatch):
    """Splits the misses by J(G).

    Args:
      reuse_weight: lambda in units of |A_l| * T_H2D. As p sums to 1 over the |A_l| activated experts, 1
      makes the reuse
        of an average expert worth one transfer; 0 leaves the balance of load alone.
    """

    def __init__(self, context: PolicyContext, *, reuse_weight: float = 1.0) -> None:
        super().__init__(context)
        self.reuse_weight = reuse_weight

    def reuse_scale(self, routing: LayerRouting) -> float:
        """lambda, in microseconds."""
        return self.reuse_weight * routing.num_activated * self.context.costs.h2d_us

    def costs(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> MissCosts:
        profile, scale = self.context.costs, self.reuse_scale(routing)
        figures = profile.h2d_us, profile.cpu_fixed_us, profile.cpu_token_us, scale
        return cost_misses(routing.misses, routing.loads, scores, *figures)


class BalancedDispatch(CostedDispatch):
    """Reuse-aware CPU/GPU compensation (OLED-MoE).

    The round(rho * M) misses of highest priority start on the GPU, rho = n*tau / (n*tau + T_H2D), where
    n*tau is the mean CPU time of a miss: with that share both sides take equally long. Then at most `swaps`
    exchanges of one transferred miss with one on the CPU, each the best there is and accepted only if J
    falls. |G| stays.
    """

    def __init__(self, context: PolicyContext, *, reuse_weight: float = 1.0, swaps: int = 8) -> None:
        super().__init__(context, reuse_weight=reuse_weight)
        self.swaps = swaps

    def split(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> Split:
        misses, costs = routing.misses, self.context.costs
        if misses.size == 0:
            return misses, misses
        figures = costs.h2d_us, costs.cpu_fixed_us, costs.cpu_token_us, self.reuse_scale(routing)
        return split_balanced(misses, routing.loads, scores, *figures, self.swaps)


def cost_misses(
    misses: Int[np.ndarray, " M"],
    loads: Int[np.ndarray, " E"],
    scores: Float[np.ndarray, " E"],
    h2d_us: float,
    cpu_fixed_us: float,
    cpu_token_us: float,
    reuse_scale: float,
) -> MissCosts:
    """The costs of misses under a linear CPU time. reuse_scale: lambda."""
    cpu = cpu_fixed_us + cpu_token_us * loads[misses]
    return MissCosts(h2d_us=h2d_us, cpu=cpu, reuse=reuse_scale * scores[misses])


@native.compiled
def split_balanced(
    misses: Int[np.ndarray, " M"],
    loads: Int[np.ndarray, " E"],
    scores: Float[np.ndarray, " E"],
    h2d_us: float,
    cpu_fixed_us: float,
    cpu_token_us: float,
    reuse_scale: float,
    swaps: int,
) -> Split:
    """The rule of `BalancedDispatch`. M > 0."""
    costs = cost_misses(misses, loads, scores, h2d_us, cpu_fixed_us, cpu_token_us, reuse_scale)
    mean_cpu = _sum(costs.cpu) / misses.size
    count = int(misses.size * mean_cpu / (mean_cpu + h2d_us) + 0.5)
    order = (-scores[misses]).argsort(kind="stable")
    gpu, cpu = order[:count], order[count:]
    if gpu.size and cpu.size:
        _exchange(costs, gpu, cpu, swaps)
    ranked = misses[order]
    return ranked[:count], ranked[count:]


def _sum(values: Float[np.ndarray, " M"]) -> float:
    """From the first to the last, which `np.sum` does not promise. M > 0."""
    return float(values.cumsum()[-1])


def _exchange(costs: MissCosts, gpu: Int[np.ndarray, " G"], cpu: Int[np.ndarray, " H"], swaps: int) -> None:
    """Exchanges members of the two index arrays in place."""
    transfer_us = gpu.size * costs.h2d_us
    cpu_us = _sum(costs.cpu[cpu])
    # G starts with the highest priorities: where transfers are the slower side, no exchange gains.
    if cpu_us <= transfer_us:
        return
    # While the CPU is slower, an exchange changes J by the difference of cpu + reuse: the k-th best pairs
    # the k-th least of G with the k-th greatest of the CPU.
    key = costs.cpu + costs.reuse
    count = min(swaps, gpu.size, cpu.size)
    leaving = key[gpu].argsort(kind="stable")[:count]
    entering = (-key[cpu]).argsort(kind="stable")[:count]
    out, into = gpu[leaving], cpu[entering]
    slower_us = np.maximum(cpu_us + (costs.cpu[out] - costs.cpu[into]).cumsum(), transfer_us)
    values = (slower_us + (costs.reuse[out] - costs.reuse[into]).cumsum()).tolist()
    accepted, value = 0, cpu_us
    while accepted < count and values[accepted] < value - 1e-9 * cpu_us:
        value = values[accepted]
        accepted += 1
    gpu[leaving[:accepted]] = into[:accepted]
    cpu[entering[:accepted]] = out[:accepted]


class MakespanDispatch(CostedDispatch):
    """The exact minimum of J over all G of every size (beyond the paper).

    Sort and scan. For |G| = g every G satisfies J >= g*T - R_1(g) with R_1 the reuse of the g misses of
    greatest reuse, and J >= (C - B(g)) with C all CPU time and B the sum of the g greatest cpu + reuse. Two
    sorts give both bounds and two candidates for every g in one scan; a candidate that meets the least bound
    over g is a minimum. With lambda = 0 one always does: the g longest CPU times are then the best G of
    their size.

    Otherwise the bounds may leave a gap (balancing the two sides is a knapsack problem). CPU time depends on
    the number of experts and of tokens only, so a table over both, filled by groups of equal token count,
    closes it: within a group the CPU gets the misses of least reuse, by exchange.
    """

    def split(self, routing: LayerRouting, scores: Float[np.ndarray, " E"]) -> Split:
        misses = routing.misses
        if misses.size == 0:
            return misses, misses
        costs = self.costs(routing, scores)
        chosen, value, bound = scan_sorted(costs)
        if value > bound + 1e-9 * max(1.0, abs(bound)):
            chosen = fill_table(costs, self.context.costs, routing.loads[misses])
        order = np.argsort(-scores[misses], kind="stable")
        ranked, on_gpu = misses[order], chosen[order]
        return ranked[on_gpu], ranked[~on_gpu]


def scan_sorted(costs: MissCosts) -> tuple[Bool[np.ndarray, " M"], float, float]:
    """The best G on either sorted path, its J, and a lower bound on J over all G. M > 0."""
    chosen = np.zeros(costs.cpu.size, bool)
    value, bound = scan_paths(costs.h2d_us, costs.cpu, costs.reuse, chosen)
    return chosen, value, bound


@native.compiled
def scan_paths(
    h2d_us: float, cpu: Float[np.ndarray, " M"], reuse: Float[np.ndarray, " M"], chosen: Bool[np.ndarray, " M"]
) -> tuple[float, float]:
    """What `scan_sorted` does: writes G and returns its J and the bound."""
    M = cpu.size
    transfer_us = np.arange(M + 1) * h2d_us
    orders, values, bounds = [], [], []
    for key in (reuse, cpu + reuse):
        order = (-key).argsort(kind="stable")
        cpu_us = np.append(cpu[order][::-1].cumsum()[::-1], 0.0)
        taken = np.append(0.0, reuse[order].cumsum())
        orders.append(order)
        values.append(np.maximum(transfer_us, cpu_us) - taken)
        bounds.append((transfer_us if key is reuse else cpu_us) - taken)
    path, count = divmod(int(np.argmin(np.stack(values))), M + 1)
    chosen[:] = False
    chosen[orders[path][:count]] = True
    return float(values[path][count]), float(np.maximum(bounds[0], bounds[1]).min())


def fill_table(costs: MissCosts, profile: CostProfile, tokens: Int[np.ndarray, " M"]) -> Bool[np.ndarray, " M"]:
    """The best G of all, by least lost reuse for every (experts, tokens) that the CPU may get."""
    M, S = tokens.size, int(tokens.sum())
    lost = np.full((M + 1, S + 1), np.inf)
    lost[0, 0] = 0.0
    steps = []
    for count in sorted(set(tokens.tolist())):
        members = np.flatnonzero(tokens == count)
        members = members[np.argsort(costs.reuse[members], kind="stable")]
        taken_reuse = np.append(0.0, np.cumsum(costs.reuse[members]))
        options = np.full((members.size + 1, M + 1, S + 1), np.inf)
        for taken, reuse in enumerate(taken_reuse):
            options[taken, taken:, taken * count :] = lost[: M + 1 - taken, : S + 1 - taken * count] + reuse
        choice = options.argmin(axis=0)
        lost = options.min(axis=0)
        steps.append((count, members, choice))
    experts = np.arange(M + 1)[:, None]
    cpu_us = profile.cpu_fixed_us * experts + profile.cpu_token_us * np.arange(S + 1)
    value = np.maximum((M - experts) * costs.h2d_us, cpu_us) + lost
    h, s = divmod(int(value.argmin()), S + 1)
    chosen = np.ones(M, bool)
    for count, members, choice in reversed(steps):
        taken = int(choice[h, s])
        chosen[members[:taken]] = False
        h, s = h - taken, s - taken * count
    return chosen
