"""Experts computed on host cores: one interface (`base`), several backends, chosen by name (`registry`)."""

from oled_jax.offload.cpu_experts.base import CpuExperts, CpuStats, CpuWork
from oled_jax.offload.cpu_experts.registry import BACKENDS, default_threads, make_cpu_experts

__all__ = ["BACKENDS", "CpuExperts", "CpuStats", "CpuWork", "default_threads", "make_cpu_experts"]
