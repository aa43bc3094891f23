"""Traces as files: one zip of .npy columns in chunks of passes, versioned (docs/traces.md). NumPy only.

Only the last chunk is in memory, on both ends. A trace grows beside its name and gets it with the first chunk, so
what an earlier recording left there is replaced by something readable or not at all. A finished trace says so in a
last member; one without was interrupted, and is read as far as it goes.
"""

import dataclasses
import io
import itertools
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from oled_jax.errors import UsageError
from oled_jax.traces.archive import (
    DEFLATED,
    STORED,
    DamagedMemberError,
    GrowingZip,
    Member,
    NewMember,
    find_members,
    read_member,
)
from oled_jax.traces.columns import KINDS, REQUIRED, decode, encode
from oled_jax.traces.trace import FORMAT, TraceHeader, TracePass

NAME = "oled_jax routing trace"
HEADER, END = "header.json", "end.json"
CHUNK_PASSES, CHUNK_BYTES = 256, 4_000_000  # a chunk is written when it has as many passes, or bytes of routes
INCOMPRESSIBLE = ("gates",)  # deflate takes an eighth off them, in twice the time of all other columns together


def check_trace_target(path: Path) -> None:
    """Raises UsageError if no trace can be written there, before any work is done."""
    temporary, file = _open_beside(_real(path))
    file.close()
    temporary.unlink()


class TraceWriter:
    """Writes a trace, chunk by chunk.

    As a context manager it ends the trace: as a finished one, or as an interrupted one after an exception. Without a
    single pass the latter leaves nothing.

    Args:
      path: the file to make or to replace.
      header: what the trace is about.

    Attributes:
      num_passes: passes so far.

    Raises:
      UsageError: here and from every method, if the file cannot be written.
    """

    def __init__(self, path: Path, header: TraceHeader) -> None:
        self.path = path
        self.header = header
        self.num_passes = 0
        self._passes: list[TracePass] = []
        self._pending_bytes = 0
        self._num_chunks = 0
        self._target = _real(path)
        self._temporary: Path | None
        self._temporary, self._file = _open_beside(self._target)
        self._zip = GrowingZip(self._file)
        self._usable = True  # what was written is whole
        try:
            self._write([_json_member(HEADER, _describe(header))])
        except BaseException:
            self.close(finished=False)
            raise

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(finished=error is None)

    @property
    def num_bytes(self) -> int:
        """Size of the file so far."""
        return self._zip.num_bytes

    def add(self, pass_: TracePass) -> None:
        """Adds a pass, whose arrays must not change any more.

        Raises:
          ValueError, TypeError: the passes of the chunk cannot be written as they are (`columns.encode`).
        """
        if not self._usable:
            raise RuntimeError(f"trace {self.path} is closed, or could not be written")
        self._passes.append(pass_)
        self.num_passes += 1
        self._pending_bytes += pass_.expert_ids.nbytes + pass_.gates.nbytes
        if len(self._passes) >= CHUNK_PASSES or self._pending_bytes >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was added since the last chunk. The file can be read up to here from now on."""
        if not self._passes:
            return
        passes, self._passes, self._pending_bytes = self._passes, [], 0
        self._usable = False  # unless this chunk gets through
        columns = encode(passes, self.header.num_experts)
        self._write([_column_member(self._num_chunks, name, values) for name, values in columns.items()])
        self._num_chunks += 1
        self._publish()
        self._usable = True

    def close(self, *, finished: bool = True) -> None:
        """Writes the rest and, if the trace is finished, that it is. Does nothing the second time."""
        if self._file.closed:
            return
        try:
            if self._usable:
                self.flush()
            if self._usable and finished:
                self._write([_json_member(END, {"passes": self.num_passes})])
                self._publish()
        finally:
            self._usable = False
            self._file.close()
            if self._temporary is not None:
                self._temporary.unlink(missing_ok=True)

    def _write(self, members: list[NewMember]) -> None:
        try:
            self._zip.append(members)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _publish(self) -> None:
        """Gives the file its name, once."""
        if self._temporary is None:
            return
        try:
            os.replace(self._temporary, self._target)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._temporary = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTrace:
    """A `Trace` in a file, of which one chunk at a time is in memory. `open_trace` makes it.

    Attributes:
      finished: it was closed by its recording; else it ends early.
      kinds: what the numbers of column "kind" mean.
      chunks: members by column.
      num_passes: passes of all chunks.
    """

    header: TraceHeader
    path: Path
    finished: bool
    kinds: tuple[str, ...]
    chunks: tuple[Mapping[str, Member], ...]
    num_passes: int

    def __len__(self) -> int:
        return self.num_passes

    def __iter__(self) -> Iterator[TracePass]:
        with _opened(self.path) as file:
            for number, members in enumerate(self.chunks):
                try:
                    columns = {name: _read_column(file, member) for name, member in members.items()}
                    passes = list(decode(columns, self.header, self.kinds))
                except (DamagedMemberError, ValueError, IndexError, OSError) as error:
                    raise _damaged(self.path, f"chunk {number}", error) from error
                yield from passes


def open_trace(path: Path) -> FileTrace:
    """Opens a trace. Warns if it ends early.

    Raises:
      UsageError: there is no such file, it is no trace, of another version, without a pass, or damaged. Going
        through the passes raises it, too, where a chunk turns out to be damaged.
    """
    with _opened(path) as file:
        members = {member.name: member for member in find_members(file)}
        if HEADER not in members:
            raise UsageError(f"{path} {_what_it_is(file)}")
        header, kinds = _read_header(file, members[HEADER], path)
        chunks = tuple(_chunks(members))
        try:
            num_passes = sum(_read_column(file, chunk["kind"]).size for chunk in chunks)
            claimed = json.loads(read_member(file, members[END]))["passes"] if END in members else None
        except (DamagedMemberError, ValueError, LookupError, TypeError) as error:
            raise _damaged(path, "its description", error) from error
    if claimed is not None and claimed != num_passes:
        raise UsageError(f"trace {path} is damaged: {num_passes} of its {claimed} passes are there, record it again")
    if num_passes == 0:
        why = "it is cut off in its first chunk" if claimed is None else "nothing ran while it was recorded"
        raise UsageError(f"trace {path} holds no pass: {why}, record it again")
    if claimed is None:
        warnings.warn(
            f"trace {path} ends early: {num_passes} passes can be read, then its recording was interrupted "
            "or has not ended",
            stacklevel=2,
        )
    return FileTrace(
        header=header, path=path, finished=claimed is not None, kinds=kinds, chunks=chunks, num_passes=num_passes
    )


# Writing


def _real(path: Path) -> Path:
    """The place itself, so that a link is kept and what it points to is replaced."""
    return Path(os.path.realpath(path))


def _open_beside(target: Path) -> tuple[Path, io.FileIO]:
    """A temporary file in the target's directory, and its path. Raises UsageError if the target cannot be made."""
    if target.is_dir():
        raise UsageError(f"{target} is a directory: give the file to write the trace to")
    if target.exists() and not target.is_file():
        raise UsageError(f"{target} is no regular file: give the file to write the trace to")
    if not target.parent.is_dir():
        raise UsageError(f"{target} cannot be written: there is no directory {target.parent}")
    temporary = target.with_name(f"{target.name}.{os.getpid()}.writing")
    try:
        return temporary, temporary.open("wb", buffering=0)
    except OSError as error:
        raise _unwritable(target, error) from error


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"trace {path} cannot be written: {error.strerror or error}")


def _describe(header: TraceHeader) -> dict[str, Any]:
    return {"format": NAME, "version": FORMAT, "kinds": KINDS, "header": dataclasses.asdict(header)}


def _json_member(name: str, value: Mapping[str, Any]) -> NewMember:
    return NewMember(name, json.dumps(value, indent=2, allow_nan=False).encode())


def _column_member(chunk: int, name: str, values: np.ndarray) -> NewMember:
    buffer = io.BytesIO()
    np.lib.format.write_array(buffer, values, allow_pickle=False)
    return NewMember(f"{chunk:06}/{name}.npy", buffer.getvalue(), STORED if name in INCOMPRESSIBLE else DEFLATED)


# Reading


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise UsageError(f"there is no trace {path}") from None
    except OSError as error:
        raise UsageError(f"trace {path} cannot be read: {error.strerror or error}") from error


def _what_it_is(file: BinaryIO) -> str:
    """What to say of a file without a readable header."""
    file.seek(0)
    ours = HEADER.encode() in file.read(64)
    return "is cut off before its header is whole: record it again" if ours else "is no routing trace"


def _read_header(file: BinaryIO, member: Member, path: Path) -> tuple[TraceHeader, tuple[str, ...]]:
    try:
        described = json.loads(read_member(file, member))
        if described["format"] != NAME:
            raise UsageError(f"{path} is no routing trace")
        if described["version"] != FORMAT:
            raise UsageError(
                f"trace {path} has format {described['version']}, this oled_jax reads {FORMAT}: record it again"
            )
        return TraceHeader(**described["header"]), tuple(described["kinds"])
    except UsageError:
        raise
    except (DamagedMemberError, ValueError, LookupError, TypeError) as error:
        raise _damaged(path, "its header", error) from error


def _chunks(members: Mapping[str, Member]) -> Iterator[Mapping[str, Member]]:
    """Whole chunks from the first on."""
    by_chunk: dict[str, dict[str, Member]] = {}
    for name, member in members.items():
        folder, _, column = name.partition("/")
        by_chunk.setdefault(folder, {})[column.removesuffix(".npy")] = member
    for number in itertools.count():
        chunk = by_chunk.get(f"{number:06}", {})
        if not chunk.keys() >= REQUIRED:
            return
        yield chunk


def _read_column(file: BinaryIO, member: Member) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(read_member(file, member)), allow_pickle=False)


def _damaged(path: Path, where: str, error: Exception) -> UsageError:
    return UsageError(f"trace {path} is damaged in {where} ({error}): record it again")
