"""Matches the tensors of a checkpoint with those a model needs, by name, shape and dtype. Reads no data."""

import dataclasses
import re
from collections.abc import Iterable

from oled_jax.config import ModelConfig
from oled_jax.convert.problems import Problems
from oled_jax.convert.shards import Shards
from oled_jax.convert.tensors import READABLE, StoredTensor
from oled_jax.models.registry import Family, TrunkTensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertTensor:
    """One projection of one expert (`expert` e), or of all experts of a layer stacked (`expert` None)."""

    projection: str
    expert: int | None
    stored: StoredTensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Where each part of the model lies. `experts` is indexed by MoE layer, counted from 0.

    `redundant` tensors stand in the files and are not read: the head of a tied model.
    """

    trunk: tuple[tuple[TrunkTensor, StoredTensor], ...]
    experts: tuple[tuple[ExpertTensor, ...], ...]
    redundant: tuple[StoredTensor, ...] = ()

    @property
    def total_bytes(self) -> int:
        experts = (expert.stored for layer in self.experts for expert in layer)
        return sum(t.nbytes for t in (*(stored for _, stored in self.trunk), *experts))


def match_tensors(family: Family, config: ModelConfig, shards: Shards, problems: Problems) -> Layout:
    """Finds every tensor of the model in `shards`; notes missing, extra, mis-shaped and mis-typed ones."""
    matcher = _Matcher(shards, problems)
    trunk = []
    for needed in family.trunk_tensors(config):
        stored = matcher.find(needed.name, needed.shape)
        if stored is not None:
            trunk.append((needed, stored))
    experts = tuple(tuple(_layer_experts(family, config, layer, matcher)) for layer in family.moe_layers(config))
    ignored = family.ignored_tensors(config)
    matcher.note_extras(ignored)
    redundant = tuple(shards.tensors[name] for name in ignored if name in shards.tensors)
    return Layout(trunk=tuple(trunk), experts=experts, redundant=redundant)


def _layer_experts(family: Family, config: ModelConfig, layer: int, matcher: "_Matcher") -> Iterable[ExpertTensor]:
    E, F, D = config.num_experts, config.moe_intermediate_size, config.hidden_size
    for projection in PROJECTIONS:
        shape = (D, F) if projection == "down_proj" else (F, D)
        merged = family.merged_name.format(layer=layer, projection=projection)
        if matcher.has(merged):
            candidates: list[tuple[int | None, str, tuple[int, ...]]] = [(None, merged, (E, *shape))]
        else:
            names = (family.expert_name.format(layer=layer, expert=e, projection=projection) for e in range(E))
            candidates = [(e, name, shape) for e, name in enumerate(names)]
        for expert, name, needed_shape in candidates:
            stored = matcher.find(name, needed_shape)
            if stored is not None:
                yield ExpertTensor(projection=projection, expert=expert, stored=stored)


class _Matcher:
    def __init__(self, shards: Shards, problems: Problems):
        self._shards = shards
        self._problems = problems
        self._used: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._shards.tensors or name in self._shards.excused

    def find(self, name: str, shape: tuple[int, ...]) -> StoredTensor | None:
        self._used.add(name)
        stored = self._shards.tensors.get(name)
        if stored is None:
            if self._shards.complete and name not in self._shards.excused:
                self._problems.add(f"{name} is missing", f"missing tensors like {_pattern(name)}")
            return None
        if stored.dtype not in READABLE:
            self._problems.add(
                f"{name} is stored as {stored.dtype}, one of {', '.join(READABLE)} is needed",
                "unusable dtypes",
            )
        if stored.shape != tuple(shape):
            self._problems.add(
                f"{name} has shape {list(stored.shape)}, the configuration needs {list(shape)}",
                f"wrong shapes like {_pattern(name)}",
            )
        return stored

    def note_extras(self, ignored: Iterable[str]) -> None:
        for name in sorted(set(self._shards.tensors) - self._used - set(ignored), key=_natural):
            self._problems.add(f"{name} belongs to no part of the model", f"extra tensors like {_pattern(name)}")


def _pattern(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def _natural(name: str) -> list[str | int]:
    """Sort key that puts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]
