"""A zip file that grows: after every `append` it is a complete zip again.

Python's `zipfile` writes the directory when it closes, so what a killed run leaves is no zip. Here new members go
over the old directory, and a new directory goes behind them. A run that is killed in between leaves a file without
a directory, in which every whole member can still be found by walking from one member's own header to the next.
"""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from io import FileIO
from typing import BinaryIO, NamedTuple

STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED
DEFLATE_LEVEL = 1
LIMIT_16, LIMIT_32 = 0xFFFF, 0xFFFFFFFF  # what does not fit below goes into the 64-bit fields

# Fields as in PKWARE's APPNOTE, 4.3.7, 4.3.12, 4.3.14 to 4.3.16. Members have no comments and no time.
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR64 = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_OFFSET64 = struct.Struct("<2HQ")
_LOCAL_MARK, _ENTRY_MARK, _END_MARK = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
_END64_MARK, _LOCATOR64_MARK = b"PK\x06\x06", b"PK\x06\x07"
_VERSION, _VERSION_64 = 20, 45
_DAY_ONE = 0x21  # 1 January 1980, the first day that the format knows
_UNIX_FILE = 0o644 << 16


class DamagedMemberError(Exception):
    """A member is not what its header promises."""


class Member(NamedTuple):
    """Where a member lies. `offset` is that of its header, `size` that of its compressed bytes."""

    name: str
    offset: int
    size: int
    method: int
    crc: int


class NewMember(NamedTuple):
    """Something to append, compressed with STORED or DEFLATED."""

    name: str
    data: bytes
    method: int = DEFLATED


class GrowingZip:
    """The writing end.

    Args:
      file: empty, opened for writing, unbuffered (a buffer would try again on closing what a full disk has refused);
        belongs to this object until the last `append`.
    """

    def __init__(self, file: FileIO) -> None:
        self._file = file
        self._end = 0  # of the last member, where the directory begins
        self._entries = bytearray()
        self._count = 0

    @property
    def num_bytes(self) -> int:
        """Size of the file, directory and all."""
        return self._end + len(self._entries) + len(self._end_records())

    def append(self, members: Sequence[NewMember]) -> None:
        """Adds members and hands the complete file to the operating system. Raises OSError; then it is incomplete."""
        parts: list[bytes] = []
        start = self._end
        for member in members:
            parts += self._record(member)
        self._file.seek(start)
        rest = memoryview(b"".join([*parts, self._entries, self._end_records()]))
        while rest:
            rest = rest[self._file.write(rest) :]

    def _record(self, member: NewMember) -> tuple[bytes, bytes, bytes]:
        """Header, name and data of a member; enters it into the directory."""
        name, data = member.name.encode("ascii"), member.data
        if member.method == DEFLATED:
            packer = zlib.compressobj(DEFLATE_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
            data = packer.compress(data) + packer.flush()
        far = self._end >= LIMIT_32
        extra = _OFFSET64.pack(1, 8, self._end) if far else b""
        sizes = zlib.crc32(member.data), len(data), len(member.data)
        version = _VERSION_64 if far else _VERSION
        self._entries += _ENTRY.pack(
            _ENTRY_MARK, version, version, 0, member.method, 0, _DAY_ONE, *sizes,
            len(name), len(extra), 0, 0, 0, _UNIX_FILE, LIMIT_32 if far else self._end,
        )  # fmt: skip
        self._entries += name + extra
        self._count += 1
        header = _LOCAL.pack(_LOCAL_MARK, _VERSION, 0, member.method, 0, _DAY_ONE, *sizes, len(name), 0)
        self._end += len(header) + len(name) + len(data)
        return header, name, data

    def _end_records(self) -> bytes:
        size, behind = len(self._entries), self._end + len(self._entries)
        records = b""
        if self._count >= LIMIT_16 or behind >= LIMIT_32:
            versions = _VERSION_64, _VERSION_64
            counts = self._count, self._count
            records += _END64.pack(_END64_MARK, _END64.size - 12, *versions, 0, 0, *counts, size, self._end)
            records += _LOCATOR64.pack(_LOCATOR64_MARK, 0, behind, 1)
        count = min(self._count, LIMIT_16)
        return records + _END.pack(
            _END_MARK, 0, 0, count, count, min(size, LIMIT_32), min(self._end, LIMIT_32), 0
        )  # fmt: skip


def find_members(file: BinaryIO) -> list[Member]:
    """All members, by the directory; without one, the whole members from the start of the file."""
    try:
        with zipfile.ZipFile(file) as archive:
            return [
                Member(info.filename, info.header_offset, info.compress_size, info.compress_type, info.CRC)
                for info in archive.infolist()
            ]
    except (zipfile.BadZipFile, NotImplementedError, ValueError):  # whatever zipfile makes of half a directory
        return list(_walk(file))


def _walk(file: BinaryIO) -> Iterator[Member]:
    """Members one after the other, up to the first that is not whole."""
    offset = 0
    while (found := _member_at(file, offset)) is not None:
        member, data_offset = found
        try:
            read_member(file, member)
        except DamagedMemberError:
            return
        yield member
        offset = data_offset + member.size


def _member_at(file: BinaryIO, offset: int) -> tuple[Member, int] | None:
    """The member whose header begins there, and where its data begin."""
    file.seek(offset)
    header = file.read(_LOCAL.size)
    if len(header) < _LOCAL.size or header[:4] != _LOCAL_MARK:
        return None
    _, _, _, method, _, _, crc, size, _, name_length, extra_length = _LOCAL.unpack(header)
    name = file.read(name_length).decode("latin-1")
    return Member(name, offset, size, method, crc), offset + _LOCAL.size + name_length + extra_length


def read_member(file: BinaryIO, member: Member) -> bytes:
    """A member's content. Raises DamagedMemberError if it is not what was written."""
    found = _member_at(file, member.offset)
    if found is None:
        raise DamagedMemberError(f"{member.name} has no header")
    file.seek(found[1])
    data = file.read(member.size)
    try:
        content = zlib.decompress(data, -zlib.MAX_WBITS) if member.method == DEFLATED else data
    except zlib.error as error:
        raise DamagedMemberError(f"{member.name} cannot be unpacked: {error}") from error
    if zlib.crc32(content) != member.crc:
        raise DamagedMemberError(f"{member.name} has another checksum")
    return content
