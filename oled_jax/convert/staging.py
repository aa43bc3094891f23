"""Where a new checkpoint grows until it is complete: a sibling of the target, renamed at the end.

Owns `TARGET.incomplete`. Two processes cannot share one (a lock on the directory); what an interrupted run left
there is taken up if the job is the same, else removed.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oled_jax.errors import UsageError
from oled_jax.memory import format_bytes

JOB_NAME = "oled_job.json"
SPARE_BYTES = 64_000_000  # descriptions, tokenizer files, the file system's own


class Staging:
    """The growing directory. `resumed`: it holds what an earlier run of the same job had finished."""

    def __init__(self, directory: Path, target: Path, resumed: bool) -> None:
        self.directory = directory
        self.target = target
        self.resumed = resumed

    def require_space(self, num_bytes: int) -> None:
        """Raises UsageError if the file system cannot take `num_bytes` more."""
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes + SPARE_BYTES:
            needed = format_bytes(num_bytes + SPARE_BYTES)
            raise UsageError(f"{self.target} needs {needed} of disk, {format_bytes(free)} are free there")

    def write_text(self, name: str, text: str) -> None:
        """A small file that is complete under its name or not there at all."""
        temporary = self.directory / f"{name}.writing"
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(self.directory / name)

    def publish(self) -> None:
        """Gives the directory the target's name; what had it is removed after that."""
        replaced = None
        if self.target.exists() and any(self.target.iterdir()):
            replaced = Path(tempfile.mkdtemp(prefix=f"{self.target.name}.replaced-", dir=self.target.parent))
            self.target.rename(replaced)
        self.directory.rename(self.target)
        (self.target / JOB_NAME).unlink()
        _sync(self.target.parent)
        if replaced is not None:
            shutil.rmtree(replaced)


@contextmanager
def stage(target: Path, *, job: str | None, replaces: Callable[[Path], bool], overwrite: bool) -> Iterator[Staging]:
    """The place to build `target` in. An exception leaves it there, for the next run.

    Args:
      target: the directory to make.
      job: what is made of what; an earlier run's work is used if it was the same. None: never.
      replaces: whether a directory is of the kind that `overwrite` may replace.
      overwrite: the user allows that.

    Raises:
      UsageError: the target exists or cannot be written to, or another process is at it.
    """
    target = Path(os.path.realpath(target))
    _check_target(target, replaces, overwrite)
    directory = target.with_name(f"{target.name}.incomplete")
    with _explained(target, None if job is None else directory):
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory, target):
            resumed = job is not None and _has_job(directory, job)
            staging = Staging(directory, target, resumed)
            if not resumed:
                _require_own(directory)
                _clear(directory)
                staging.write_text(JOB_NAME, job or "")
            yield staging


def is_unfinished(directory: Path) -> bool:
    """Something is, or was, being written there."""
    return (directory / JOB_NAME).exists()


def _check_target(target: Path, replaces: Callable[[Path], bool], overwrite: bool) -> None:
    if not target.name:
        raise UsageError(f"{target} cannot be the target: give a new directory")
    if not target.exists():
        return
    if not target.is_dir():
        raise UsageError(f"{target} exists and is no directory: give another target")
    if not any(target.iterdir()):
        return
    if not overwrite:
        raise UsageError(f"{target} exists: give another target, or --overwrite to replace it")
    if not replaces(target):
        raise UsageError(
            f"{target} is not a checkpoint of the kind to be written, so it is not replaced: remove it yourself"
        )


@contextmanager
def _explained(target: Path, directory: Path | None) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kept = ""
        if directory is not None and is_unfinished(directory):
            kept = f"; what is done so far is kept in {directory}: run the same command again to go on"
        raise UsageError(f"{target} cannot be written: {error.strerror or error}{kept}") from error


@contextmanager
def _locked(directory: Path, target: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another process is writing {target}: wait for it to end") from None
        yield
    finally:
        os.close(descriptor)


def _has_job(directory: Path, job: str) -> bool:
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        return (directory / JOB_NAME).read_text(encoding="utf-8") == job
    return False


def _require_own(directory: Path) -> None:
    """Nothing is removed from a directory that merely has the name."""
    names = {path.name for path in directory.iterdir()}
    if names - {f"{JOB_NAME}.writing"} and JOB_NAME not in names:
        raise UsageError(f"{directory} is needed while writing and holds something else: move it away")


def _clear(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def discard(staging: Staging) -> None:
    """Removes the growing directory: the source turned out to be unusable."""
    shutil.rmtree(staging.directory)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
