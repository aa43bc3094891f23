"""Decoding: everything between a model pass and text ids. `sampling` is the only part that imports JAX."""
