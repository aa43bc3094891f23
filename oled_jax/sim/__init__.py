"""Replay of a routing trace under any policy, capacity and hardware profile. No JAX."""
