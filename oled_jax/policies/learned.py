"""What a policy has learned, kept between runs: one npz file for each model. No JAX.

A file that the user named must be usable; one in the cache directory that is not is replaced.
"""

import hashlib
import os
import re
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from oled_jax.errors import UsageError
from oled_jax.policies.base import PolicyContext

OFF, CACHE = "off", "cache"
DIRECTORY = "reuse"
FORMAT = 1

Limits = tuple[float, float]  # least and greatest
FINITE = float(np.finfo(np.float32).max)
TINY = float(np.finfo(np.float32).tiny)
COUNT: Limits = (0, float(2**53))
LEAST_WEIGHT = 1e-6  # below it nothing is forgotten: what is never seen again must not fade to 0 / 0


def forget(sums: np.ndarray, weights: np.ndarray, share: float) -> None:
    """Takes this share of the past of weighted sums, in place; their ratios stay."""
    past = np.where(weights > LEAST_WEIGHT, share, 1.0)
    sums *= past
    weights *= past


@runtime_checkable
class Learner(Protocol):
    """Something that learns into arrays of its own, with names that no other learner of its policy has."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays themselves, not copies."""
        ...

    def limits(self) -> dict[str, Limits]:
        """What the values of each array lie between."""
        ...

    def restored(self) -> None:
        """Somebody wrote what another had learned into the arrays."""
        ...


def open_learned(table: str, context: PolicyContext) -> "LearnedFile | None":
    """From option `table`: None if it is off.

    Raises:
      UsageError: the cache is asked for, and nobody knows which model this is.
    """
    if table == OFF:
        return None
    if table != CACHE:
        return LearnedFile(Path(table), named=True)
    if context.model is None:
        raise UsageError("policy option table=cache: this run does not say which model it is about; give a file")
    return LearnedFile(cache_path(context.model), named=False)


def cache_path(model: str) -> Path:
    """Where what was learned of a model is kept, beside the hardware profiles. XDG_CACHE_HOME is honoured."""
    import platformdirs  # engines that are built without a command do not need it

    digest = hashlib.sha256(model.encode()).hexdigest()[:12]
    words = re.sub(r"[^a-z0-9]+", "-", model.lower()).strip("-")[:40]
    return Path(platformdirs.user_cache_dir("oled_jax")) / DIRECTORY / f"{words}-{digest}.npz"


class LearnedFile:
    """One file. named: by the user, so that what is wrong with it is an error."""

    def __init__(self, path: Path, *, named: bool) -> None:
        self.path = path
        self.named = named

    def load(self, learners: Sequence[Learner]) -> str:
        """Writes the file's arrays into the learners'. Where there is no file yet, they stay as they are.

        Returns:
          a sentence for the user.

        Raises:
          UsageError: the user named a file that cannot be used.
        """
        try:
            found = self._read(learners)
        except FileNotFoundError:
            return f"what it learns will be kept in {self.path}"
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            problem = f"what was learned cannot be read from {self.path} ({' '.join(str(error).split())})"
            if self.named:
                raise UsageError(f"policy option table: {problem}") from None
            return f"{problem}: it starts anew"
        for learner in learners:
            for name, array in learner.arrays().items():
                array[...] = found[name]
            learner.restored()
        return f"it begins with what {self.path} says"

    def _read(self, learners: Sequence[Learner]) -> dict[str, np.ndarray]:
        with self.path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            if int(archive["format"]) != FORMAT:
                raise ValueError(f"its format is {int(archive['format'])}, not {FORMAT}")
            found: dict[str, np.ndarray] = {}
            limits = {name: pair for learner in learners for name, pair in learner.limits().items()}
            for name, array in _all_arrays(learners):
                found[name] = archive[name]
                if found[name].shape != array.shape or found[name].dtype != array.dtype:
                    raise ValueError(f"{name} has shape {found[name].shape}, this model and policy need {array.shape}")
                least, greatest = limits[name]
                if array.size and not least <= found[name].min() <= found[name].max() <= greatest:  # nor may one be NaN
                    raise ValueError(f"{name} has values that are not between {least:g} and {greatest:g}")
            return found

    def save(self, learners: Sequence[Learner]) -> None:
        """Writes the file, whole or not at all. Warns where that is impossible."""
        unfinished = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                arrays: dict[str, Any] = dict(_all_arrays(learners))
                np.savez_compressed(file, format=np.array(FORMAT), **arrays)
            unfinished.replace(self.path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            warnings.warn(f"what the policy learned cannot be kept in {self.path} ({error})", stacklevel=2)


def _all_arrays(learners: Sequence[Learner]) -> Iterator[tuple[str, np.ndarray]]:
    for learner in learners:
        yield from learner.arrays().items()
