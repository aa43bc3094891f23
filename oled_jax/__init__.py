"""Mixture-of-experts block-diffusion language models in JAX on a device that cannot hold all experts.

Importing this imports neither JAX nor NumPy: `load` prepares JAX's start, so it must be possible to come first.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oled_jax.api import Answer, Model, Part, load

__version__ = "0.1.0"
__all__ = ["Answer", "Model", "Part", "load"]


def __getattr__(name: str) -> Any:
    """The names of `api.py`, imported when they are first asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from oled_jax import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
