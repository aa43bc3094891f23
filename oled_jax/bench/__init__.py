"""Measurements of a model and of the cache: `python -m oled_jax.bench NAME`. A bench is one file and one line."""
