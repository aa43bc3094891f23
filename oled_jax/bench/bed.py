"""A test bed: one trunk and one store of weights, under any number of engines after one another.

Filling the store takes most of a bench's time and memory: so it is filled once.
"""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

from oled_jax.cli import note
from oled_jax.config import ModelConfig
from oled_jax.cost.lookup import profile_for
from oled_jax.cost.measure import profile_key
from oled_jax.cost.profile import UNMEASURED, HardwareProfile, ProfileKey
from oled_jax.engine import Engine, WeightSource, load_trunk
from oled_jax.machine import host_free_bytes
from oled_jax.memory import page_bytes
from oled_jax.offload.cpu_experts.registry import make_cpu_experts
from oled_jax.offload.manager import CacheManager
from oled_jax.offload.pool import empty_pool
from oled_jax.offload.residency import DEFAULT_SPARE
from oled_jax.offload.store import allocate_store
from oled_jax.policies.base import FutureRouting, PolicyContext
from oled_jax.policies.registry import POLICIES, make_policy, parse_policy
from oled_jax.program import fill_pool
from oled_jax.random_weights import RandomWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One engine to measure.

    policy: a specification. capacity: experts per MoE layer. carrier: a name or "auto". backend: of the CPU experts, a
    name or "auto"; None: every miss is transferred. threads: of the backend; None: its default.
    """

    policy: str
    capacity: int
    carrier: str = "auto"
    backend: str | None = None
    threads: int | None = None

    @property
    def is_reference(self) -> bool:
        """Every page is resident: capacity and carrier mean nothing."""
        return POLICIES[parse_policy(self.policy)[0]].is_reference

    @classmethod
    def parse(cls, text: str, *, capacity: int, carrier: str, threads: int | None) -> "Case":
        """From POLICY or POLICY@BACKEND."""
        policy, _, backend = text.partition("@")
        return cls(policy=policy, capacity=capacity, carrier=carrier, backend=backend or None, threads=threads)


def fitting_layers(config: ModelConfig) -> int:
    """Layers of the model whose pages leave a tenth of this host's free memory free; at most all of them."""
    per_layer = config.num_experts * page_bytes(config)
    free = host_free_bytes()
    if free is None:
        return config.num_hidden_layers
    dense = config.num_hidden_layers - config.num_moe_layers
    return min(config.num_hidden_layers, int(0.9 * free // per_layer) + dense)


class TestBed:
    """Weights in memory.

    Args:
      config: of the model.
      slots: least size of every engine's pool: engines whose pools are of one size share their programs.
      source: of the weights; None: random ones.

    `load_s`: seconds that it took to put the weights there.
    """

    __test__ = False  # not a test, whatever its name

    def __init__(self, config: ModelConfig, slots: int = 0, source: WeightSource | None = None) -> None:
        started = time.perf_counter()
        self.config = config
        self.slots = slots
        self._profiles: dict[ProfileKey, HardwareProfile] = {}
        weights = RandomWeights(config, 0) if source is None else source
        self.trunk = load_trunk(config, weights)
        L, E, D, F = config.num_moe_layers, config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.store = allocate_store(L, E, D, F, jnp.dtype(config.dtype))
        for layer in range(L):
            weights.read_pages(layer, *self.store.views(layer))
        weights.check_finite()
        jax.block_until_ready((self.trunk, self.store.layers))
        self.load_s = time.perf_counter() - started

    @contextmanager
    def engine(self, case: Case, future: FutureRouting | None = None) -> Iterator[Engine]:
        """An engine of its own pool, which is given back in the end."""
        engine = self._resident() if case.is_reference else self._offloaded(case, future)
        try:
            yield engine
        finally:
            engine.close()
            for array in engine.pool:
                array.delete()

    def _resident(self) -> Engine:
        """Every page in the pool: no manager, no callbacks."""
        config = self.config
        L, E = config.num_moe_layers, config.num_experts
        pool = empty_pool(L * E, config.hidden_size, config.moe_intermediate_size, jnp.dtype(config.dtype))
        for layer in range(L):
            pool = jax.block_until_ready(fill_pool(pool, *self.store.views(layer), np.int32(layer * E)))
        return Engine(config, self.trunk, pool=pool)

    def _offloaded(self, case: Case, future: FutureRouting | None) -> Engine:
        config = self.config
        profile = self.profile(case)
        policy = make_policy(case.policy, self._context(case, profile, future))
        experts = None
        if profile is not None:
            views = [self.store.views(layer) for layer in range(config.num_moe_layers)]
            experts = make_cpu_experts(profile.backend, views, threads=profile.key.threads)
        manager = CacheManager(policy, spare=DEFAULT_SPARE, page_bytes=page_bytes(config), cpu_experts=experts)
        slots = max(self.slots, manager.residency.num_slots)
        pool = empty_pool(slots, config.hidden_size, config.moe_intermediate_size, jnp.dtype(config.dtype))
        return Engine(config, self.trunk, pool=pool, store=self.store, manager=manager, carrier=case.carrier)

    def profile(self, case: Case) -> HardwareProfile | None:
        """The machine's profile where the case uses the CPU, measured if none is saved; else None."""
        if case.backend is None:
            return None
        key = profile_key(self.config, case.backend, case.threads, case.carrier)
        if key not in self._profiles:
            self._profiles[key] = profile_for(key, note)
        return self._profiles[key]

    def may_use_cpu(self, policy: str) -> bool:
        """Whether a policy would leave misses to a CPU backend, if there were one."""
        shape = self.config.num_moe_layers, self.config.num_experts
        nothing = FutureRouting(activated=np.zeros((0, *shape), bool))
        case = Case(policy=policy, capacity=1)
        if case.is_reference:
            return False
        context = dataclasses.replace(self._context(case, None, nothing), cpu_available=True)
        return make_policy(policy, context).uses_cpu

    def _context(self, case: Case, profile: HardwareProfile | None, future: FutureRouting | None) -> PolicyContext:
        config = self.config
        return PolicyContext(
            num_layers=config.num_moe_layers,
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            total_slots=case.capacity * config.num_moe_layers,
            costs=UNMEASURED if profile is None else profile.costs,
            cpu_available=profile is not None,
            future=future,
        )
