"""The parts of a converted checkpoint, each one Orbax checkpoint: read from the source, described tensor by tensor.

The trunk and the redundant tensors are one part each, every MoE layer another. A part owns its arrays only
while `collect` and its caller hold them.
"""

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from oled_jax.convert.arrays import chunk_file
from oled_jax.convert.hf import HfCheckpoint
from oled_jax.convert.layout import ExpertTensor
from oled_jax.convert.manifest import EXPERTS, REDUNDANT, TRUNK, Entry
from oled_jax.convert.pieces import array_crc
from oled_jax.convert.tensors import READABLE, StoredTensor, TensorReader
from oled_jax.errors import CheckpointError

PAGE_ARRAYS = {"gate_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}
SAFETENSORS_CODES = {dtype.name: code for code, dtype in READABLE.items()}

Arrays = dict[tuple[str, ...], np.ndarray]


@runtime_checkable
class Part(Protocol):
    """`name` is its directory, `num_bytes` the size of its arrays."""

    @property
    def name(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def collect(self) -> tuple[Arrays, list[Entry]]:
        """The arrays that have elements, by path, and an entry for each tensor of the source."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrunkPart:
    """Everything but the routed experts. `code`: the dtype to cast to, None: each as it is."""

    source: HfCheckpoint
    code: str | None
    name: str = TRUNK

    @property
    def num_bytes(self) -> int:
        pairs = self.source.layout.trunk
        return sum(math.prod(n.shape) * READABLE[self._code(s, n.float32)].itemsize for n, s in pairs)

    def collect(self) -> tuple[Arrays, list[Entry]]:
        arrays: Arrays = {}
        entries = []
        with TensorReader(self.source.values) as reader:
            for needed, stored in self.source.layout.trunk:
                code = self._code(stored, needed.float32)
                array = np.empty(needed.shape, READABLE[code])
                reader.read(stored, array)
                path = tuple(str(part) for part in needed.path)
                if array.size:
                    arrays[path] = array
                file = f"{self.name}/{chunk_file(path, array.ndim)}"
                entries.append(_entry(self.source, stored, code, file, [array]))
        return arrays, entries

    def _code(self, stored: StoredTensor, float32: bool) -> str:
        return stored.dtype if self.code is None or float32 else self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerPart:
    """The pages of one MoE layer, in the layout of the store: gate_up [E, 2F, D] and down [E, D, F]."""

    source: HfCheckpoint
    code: str | None
    layer: int

    @property
    def name(self) -> str:
        return f"{EXPERTS}/layer_{self.layer:03d}"

    @property
    def num_bytes(self) -> int:
        config, dtypes = self.source.config, self._dtypes()
        matrix = config.num_experts * config.hidden_size * config.moe_intermediate_size
        return matrix * (2 * dtypes["gate_up"].itemsize + dtypes["down"].itemsize)

    def collect(self) -> tuple[Arrays, list[Entry]]:
        config, dtypes = self.source.config, self._dtypes()
        E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
        arrays = {
            "gate_up": np.empty((E, 2 * F, D), dtypes["gate_up"]),
            "down": np.empty((E, D, F), dtypes["down"]),
        }
        self.source.read_pages(self.layer, arrays["gate_up"], arrays["down"])
        entries = [self._describe(tensor, arrays) for tensor in self.source.layout.experts[self.layer]]
        return {(name,): array for name, array in arrays.items()}, entries

    def _describe(self, tensor: ExpertTensor, arrays: dict[str, np.ndarray]) -> Entry:
        name = PAGE_ARRAYS[tensor.projection]
        pages, F = arrays[name], self.source.config.moe_intermediate_size
        first_row = F if tensor.projection == "up_proj" else 0
        rows = pages.shape[1] if name == "down" else F
        experts = range(len(pages)) if tensor.expert is None else [tensor.expert]
        entry = _entry(
            self.source,
            tensor.stored,
            SAFETENSORS_CODES[pages.dtype.name],
            f"{self.name}/{chunk_file((name,), pages.ndim)}",
            [pages[e, first_row : first_row + rows] for e in experts],
        )
        offset = experts[0] * pages[0].nbytes + first_row * pages[0, 0].nbytes
        stride = pages[0].nbytes if len(experts) > 1 else 0
        return dataclasses.replace(entry, offset=offset, pieces=len(experts), stride=stride)

    def _dtypes(self) -> dict[str, np.dtype]:
        found: dict[str, set[str]] = {"gate_up": set(), "down": set()}
        for tensor in self.source.layout.experts[self.layer]:
            found[PAGE_ARRAYS[tensor.projection]].add(tensor.stored.dtype)
        return {name: READABLE[self.code or _widest(codes)] for name, codes in found.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RedundantPart:
    """Tensors that nothing reads, kept as plain bytes (their dtype may be any) so that none is lost."""

    source: HfCheckpoint
    name: str = REDUNDANT

    @property
    def num_bytes(self) -> int:
        return sum(stored.nbytes for stored in self.source.layout.redundant)

    def collect(self) -> tuple[Arrays, list[Entry]]:
        arrays: Arrays = {}
        entries = []
        for stored in self.source.layout.redundant:
            try:
                array = np.fromfile(stored.file, np.uint8, stored.nbytes, offset=stored.offset)
            except OSError as error:
                raise CheckpointError(str(stored.file), [f"cannot be read ({error.strerror})"]) from error
            if array.size:
                arrays[(stored.name,)] = array
            file = f"{self.name}/{chunk_file((stored.name,), 1)}"
            entries.append(_entry(self.source, stored, stored.dtype, file, [array]))
        return arrays, entries


def parts_of(source: HfCheckpoint, code: str | None) -> Iterator[Part]:
    """All parts. The trunk comes first, the layers in order, the redundant tensors last."""
    yield TrunkPart(source=source, code=code)
    for layer in range(source.config.num_moe_layers):
        yield LayerPart(source=source, code=code, layer=layer)
    yield RedundantPart(source=source)


def _entry(source: HfCheckpoint, stored: StoredTensor, code: str, file: str, pieces: list[np.ndarray]) -> Entry:
    """Of a tensor that begins its file; `pieces` are its values, in its own order."""
    nbytes = sum(piece.nbytes for piece in pieces)
    return Entry(
        name=stored.name, shape=stored.shape, source_file=str(stored.file.relative_to(source.directory)),
        source_offset=stored.offset, source_dtype=stored.dtype, dtype=code, file=file if nbytes else None,
        offset=0, nbytes=nbytes, pieces=1, stride=0, crc32=array_crc(pieces),
    )  # fmt: skip


def _widest(codes: set[str]) -> str:
    """The smallest dtype that holds all values of these dtypes exactly."""
    return next(iter(codes)) if len(codes) == 1 else "F32"


def part_file(part: Part) -> Path:
    """Where a finished part's entries are kept until there is a manifest."""
    return Path("parts") / f"{part.name.replace('/', '-')}.json"
