"""The cells of a grid: which policies at which capacities, from the words of a user. No JAX."""

import dataclasses
from collections.abc import Sequence

from oled_jax.errors import UsageError
from oled_jax.policies.registry import POLICIES, parse_policy

ALL = "all"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cell:
    """One policy (its specification) at one capacity, average C_l."""

    policy: str
    capacity: int

    @property
    def is_reference(self) -> bool:
        """Every page is resident for good, and no policy runs."""
        return POLICIES[parse_policy(self.policy)[0]].is_reference


def chosen_cells(policies: str, capacities: str | None, num_experts: int) -> list[Cell]:
    """Every policy at every capacity, policies as given, capacities ascending.

    Args:
      policies: specifications, separated by commas.
      capacities: experts per MoE layer, percentages of `num_experts` or `all`, separated by commas; None where nobody
        needs one: policy `all` keeps every expert resident and is one cell.

    Raises:
      UsageError: an unknown policy or option, no capacity or one that the model does not have, something twice.
    """
    specs = [spec.strip() for spec in policies.split(",")]
    _refuse_twins("--policy", specs, specs)
    managed = [spec for spec in specs if not Cell(policy=spec, capacity=num_experts).is_reference]
    if managed and capacities is None:
        raise UsageError("--capacity is missing: experts per MoE layer on average, such as 40 or 16%, or all")
    if capacities is not None and not managed:
        raise UsageError("--policy all keeps every expert resident: leave out --capacity")
    sizes = [num_experts] if capacities is None else _sizes(capacities, num_experts)
    return [
        Cell(policy=spec, capacity=size) for spec in specs for size in (sizes if spec in managed else [num_experts])
    ]


def _sizes(capacities: str, num_experts: int) -> list[int]:
    words = [word.strip() for word in capacities.split(",")]
    sizes = [_size(word, num_experts) for word in words]
    _refuse_twins("--capacity", words, sizes)
    return sorted(sizes)


def _size(word: str, num_experts: int) -> int:
    if word == ALL:
        return num_experts
    try:
        size = max(1, round(_percentage(word) * num_experts / 100)) if word.endswith("%") else int(word)
    except ValueError:
        size = 0
    if not 1 <= size <= num_experts:
        raise UsageError(
            f"--capacity {word}: it must be a whole number of experts per MoE layer, from 1 to {num_experts}, "
            "a percentage of them above 0% and at most 100%, or all"
        )
    return size


def _percentage(word: str) -> float:
    """Raises ValueError unless it is above 0 and at most 100."""
    value = float(word.removesuffix("%"))
    if not 0 < value <= 100:
        raise ValueError(word)
    return value


def _refuse_twins(flag: str, words: Sequence[str], values: Sequence[object]) -> None:
    first: dict[object, str] = {}
    for word, value in zip(words, values, strict=True):
        if value in first:
            same = f"{word} is given twice" if word == first[value] else f"{first[value]} and {word} are the same"
            raise UsageError(f"{flag}: {same}")
        first[value] = word
