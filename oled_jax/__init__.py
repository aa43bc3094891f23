"""Mixture-of-experts block-diffusion language models in JAX on a device that cannot hold all experts."""

__version__ = "0.1.0"
