"""Which policies take part, from the registry, and the steps of the ablation as specifications."""

from oled_jax.policies.registry import POLICIES

LRU, OLED, LFU, ORACLE, BELADY = "lru", "oled", "lfu", "oracle", "belady"
LOW, HIGH = 40 / 256, 100 / 256  # the paper's capacities, as shares of a layer's experts

# Each step switches one part of OLED on. `oled:retention=lru:allocation=uniform:dispatch=gpu` decides as `lru` does.
STEPS = {
    "LRU": "oled:retention=lru:allocation=uniform:dispatch=gpu",
    "+ priority": "oled:retention=priority:allocation=uniform:dispatch=gpu",
    "+ allocation": "oled:retention=priority:allocation=adaptive:dispatch=gpu",
    "+ dispatch": "oled:retention=priority:allocation=adaptive:dispatch=oled",
}
LFU_RETENTION = "oled:retention=lfu:allocation=uniform:dispatch=gpu"
LOAD_ONLY = "oled:retention=priority:allocation=adaptive:dispatch=load"


def deployable() -> list[str]:
    """Every policy that can generate, `oled` and what follows from it last."""
    names = [name for name, entry in POLICIES.items() if not (entry.needs_future or entry.is_reference)]
    return sorted(names, key=lambda name: name in own())  # stable: the registry's order within both


def own() -> list[str]:
    """OLED and its extensions."""
    return [name for name in POLICIES if name.startswith(OLED)]


def bounds() -> list[str]:
    """Policies that know the future."""
    return [name for name, entry in POLICIES.items() if entry.needs_future]


def reference() -> str:
    """Every expert resident."""
    return next(name for name, entry in POLICIES.items() if entry.is_reference)


def capacities(num_experts: int) -> tuple[int, int]:
    """The paper's two capacities for a model of so many experts."""
    return tuple(max(1, round(share * num_experts)) for share in (LOW, HIGH))  # type: ignore[return-value]
