"""The compiled extension, where it was built. The one place that imports it.

Without it everything works: the portable carrier, the Python planner and the other CPU expert backends take over.
The environment variable OLED_JAX_NATIVE=off leaves it out although it was built.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

SWITCH = "OLED_JAX_NATIVE"


def _load() -> tuple[ModuleType | None, str]:
    """The module, or None and why there is none."""
    if os.environ.get(SWITCH) == "off":
        return None, f"it is switched off ({SWITCH}=off)"
    try:
        return importlib.import_module("oled_jax._native"), ""
    except ModuleNotFoundError as error:
        return None, "these are the sources: python -P takes the installed package" if _installed() else str(error)
    except ImportError as error:
        return None, str(error)


def _installed() -> bool:
    """Another copy of this package on the path has the extension, as where `pip install` was run in a checkout."""
    here = Path(__file__).parent
    copies = (Path(entry, here.name) for entry in sys.path)
    return any(any(copy.glob("_native*.so")) for copy in copies if copy.resolve() != here)


# The module, or None; then UNAVAILABLE says why.
extension, UNAVAILABLE = _load()

NUMPY: dict[str, Callable[..., Any]] = {}  # by name, the functions that `compiled` decorates

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """The extension's planning function of the same name, where there is an extension; else the function itself.

    Both do the same, bit for bit: sums run from the first element to the last, and ties are broken alike. The extension
    takes arguments by position only. Arrays that it writes are contiguous and of the dtype in the signature, int64 and
    float64 where it says Int and Float; those that it reads may have any dtype of the same kind.
    """
    NUMPY[function.__name__] = function
    if extension is None:
        return function
    replacement: _Function = getattr(extension.planning, function.__name__)
    return replacement
