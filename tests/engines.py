"""Engines over golden checkpoints, for tests anywhere. A recorder keeps the hidden states of every pass."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from oled_jax.config import DecodingConfig
from oled_jax.convert.hf import HfCheckpoint
from oled_jax.cost.profile import CostProfile
from oled_jax.decode.events import Result
from oled_jax.engine import Engine, load_offloaded, load_resident
from oled_jax.models.kv_cache import KVCache
from oled_jax.models.layers import head_logits
from oled_jax.offload.carriers.registry import AUTO
from oled_jax.offload.pool import empty_pool
from oled_jax.passes import PassKind
from oled_jax.policies.base import PassInfo, Policy, PolicyContext
from oled_jax.policies.registry import make_policy
from oled_jax.program import PassInputs

GREEDY = DecodingConfig(mask_id=511, eos_id=508, gen_length=24, block_length=8, threshold=0.5, fold_commits=False)
# Of a pool for all pages of the golden model, and five more. Engines with pools of one size share their programs, over
# files, too: compiling is most of what these tests cost.
SLOTS = 3 * 32 + 5
jitted_logits = jax.jit(head_logits)


class CheckedEngine(Engine):
    """Checks residency after every pass."""

    def run_pass(self, info: PassInfo, inputs: PassInputs, cache: KVCache, block_length: int, then):
        done = super().run_pass(info, inputs, cache, block_length, then)
        if self.manager is not None:
            check_residency(self)
        return done


class RecordedEngine(CheckedEngine):
    """Keeps, for every pass, its kind and the logits of its real positions."""

    recorded: list[tuple[PassKind, np.ndarray]]

    def run_pass(self, info: PassInfo, inputs: PassInputs, cache: KVCache, block_length: int, then):
        def follow(hidden):
            if info.token_mask.any():  # else it is a warm-up
                logits = np.asarray(jitted_logits(hidden, self.head))
                self.recorded.append((info.kind, logits.reshape(-1, logits.shape[-1])[info.token_mask]))
            return then(hidden)

        return super().run_pass(info, inputs, cache, block_length, follow)


def check_residency(engine: Engine) -> None:
    """No slot twice, none lost, |R_l| <= C_l."""
    manager = engine.manager
    assert manager is not None
    manager.residency.check()
    assert np.all(manager.residency.counts() <= manager.policy.capacities())
    assert manager.residency.free_slots >= manager.spare


def context(config, capacity: int, **changes) -> PolicyContext:
    shape = PolicyContext(
        num_layers=config.num_moe_layers,
        num_experts=config.num_experts,
        top_k=config.num_experts_per_tok,
        total_slots=capacity * config.num_moe_layers,
        # An expert of one token is quicker on the CPU, one of more is not: policies that weigh costs use both.
        costs=CostProfile(h2d_us=120.0, cpu_fixed_us=90.0, cpu_token_us=20.0),
    )
    return dataclasses.replace(shape, **changes)


def open_tiny(folder: Path, dtype: str = "float32") -> tuple:
    """Configuration and weights of the golden model that the recorded generations are of."""
    return open_golden(folder / "llada2-tiny", dtype)


def open_golden(directory: Path, dtype: str = "float32") -> tuple:
    """Configuration and weights of a golden checkpoint."""
    checkpoint = HfCheckpoint.open(directory)
    return dataclasses.replace(checkpoint.config, dtype=dtype), checkpoint


def build(
    config,
    source,
    policy: str | Policy,
    capacity: int = 0,
    *,
    spare: int = 5,
    cpu: str | None = None,
    slots: int | None = None,
    carrier: str = AUTO,
) -> RecordedEngine:
    """An engine under a policy that records its logits; "all" holds every page.

    cpu: backend for misses. slots: size of the pool, if larger than it need be.
    """
    engine = build_plain(config, source, policy, capacity, spare=spare, cpu=cpu, carrier=carrier)
    if slots is not None:
        needed = engine.pool.gate_up.shape[0]
        assert slots >= needed, f"a pool of {slots} slots for an engine that needs {needed}"
        engine._pool = empty_pool(slots, config.hidden_size, config.moe_intermediate_size, engine.pool.gate_up.dtype)
        engine.mover.attach(engine.pool)
    engine.__class__ = RecordedEngine
    engine.recorded = []
    return engine


def build_plain(
    config,
    source,
    policy: str | Policy,
    capacity: int = 0,
    *,
    spare: int = 5,
    cpu: str | None = None,
    carrier: str = AUTO,
) -> Engine:
    """The same, as users have it."""
    if policy == "all":
        return load_resident(config, source)
    if isinstance(policy, str):
        policy = make_policy(policy, context(config, capacity, cpu_available=cpu is not None))
    return load_offloaded(config, source, policy, spare=spare, cpu_backend=cpu, cpu_threads=1, carrier=carrier)


def run(engine: Engine, prompts: Sequence[Sequence[int]], decoding: DecodingConfig = GREEDY) -> list[Result]:
    return engine.generate(prompts, decoding)
