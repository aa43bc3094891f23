"""Every cache policy by name. Adding one is one new file and one line here."""

from typing import Any

from oled_jax.errors import UsageError
from oled_jax.policies import (
    fiddler,
    finemoe,
    ktransformers,
    lfu,
    lru,
    moe_infinity,
    oled,
    oled_plus,
    oracle,
    reference,
    sida,
    swapmoe,
    tide,
)
from oled_jax.policies.base import Policy, PolicyContext
from oled_jax.policies.options import PolicyEntry, parse_options, suggestion

POLICIES: dict[str, PolicyEntry] = {
    entry.name: entry
    for entry in (
        *oled.ENTRIES,
        *oled_plus.ENTRIES,
        *lru.ENTRIES,
        *lfu.ENTRIES,
        *moe_infinity.ENTRIES,
        *finemoe.ENTRIES,
        *ktransformers.ENTRIES,
        *fiddler.ENTRIES,
        *tide.ENTRIES,
        *sida.ENTRIES,
        *swapmoe.ENTRIES,
        *oracle.ENTRIES,
        *reference.ENTRIES,
    )
}


def parse_policy(spec: str) -> tuple[str, Any]:
    """A specification `name:option=value:...` as (name, the policy's options dataclass).

    Raises:
      UsageError: unknown policy, option or value; the message lists the known ones.
    """
    name, *assignments = spec.split(":")
    name = name.strip()
    entry = POLICIES.get(name)
    if entry is None:
        raise UsageError(f"unknown policy {name!r}{suggestion(name, POLICIES)}; known: {', '.join(POLICIES)}")
    return name, parse_options(name, entry.options, assignments)


def make_policy(spec: str, context: PolicyContext) -> Policy:
    """Builds the policy that a specification names; its `name` is the specification.

    Raises:
      UsageError: as `parse_policy`; also where the policy needs a CPU backend or a recorded routing and has
      none. UsageError: also for `all`, which is no policy: the engine runs it without a cache manager.
    """
    name, options = parse_policy(spec)
    entry = POLICIES[name]
    if entry.needs_cpu and not context.cpu_available:
        raise UsageError(f"policy {name!r} computes misses on the CPU: choose a backend with --cpu-experts")
    if entry.needs_future and context.future is None:
        raise UsageError(f"policy {name!r} looks into the future: it needs a trace and runs in replays only")
    policy = entry.build(options, context)
    policy.name = spec
    policy.uses_cpu = policy.uses_cpu or entry.needs_cpu
    return policy


def describe_policies() -> str:
    """One line per policy, for `--policy list`."""
    width = max(len(name) for name in POLICIES)
    return "\n".join(f"{name:<{width}}  {entry.summary}" for name, entry in POLICIES.items())
