"""Policy specifications as users write them, `name:option=value:...`, and what the registry knows of a
policy.

A policy's options are the fields of a frozen, keyword-only dataclass with the paper's defaults.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

from oled_jax.errors import UsageError
from oled_jax.policies.base import Policy, PolicyContext

TRUE, FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoOptions:
    """The policy has no options."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyEntry:
    """One line of the registry.

    needs_cpu: it sends misses to the CPU by nature. needs_future: it must know the routing of later passes.
    simulated_only: residency appears free of charge, so only a replay can run it.
    is_reference: no policy at all; the engine runs it without a cache manager.
    """

    name: str
    summary: str
    build: Callable[[Any, PolicyContext], Policy]
    options: type = NoOptions
    needs_cpu: bool = False
    needs_future: bool = False
    simulated_only: bool = False
    is_reference: bool = False


def suggestion(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'lru'?)` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def require_range(options: object, name: str, least: int | float, most: int | float = float("inf")) -> None:
    """Raises UsageError unless least <= option <= most; None passes."""
    value = getattr(options, name)
    if value is not None and not least <= value <= most:
        limit = f"at least {least}" if most == float("inf") else f"between {least} and {most}"
        raise UsageError(f"policy option {name} is {value}, it must be {limit}")


def parse_options(policy: str, options: type, assignments: Iterable[str]) -> Any:
    """The options dataclass from `option=value` strings.

    Raises:
      UsageError: an unknown or repeated option, or a value its field does not take; the message lists what
      it does.
    """
    hints = typing.get_type_hints(options)
    known = [field.name for field in dataclasses.fields(options)]
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        name = name.strip().replace("-", "_")
        if name not in known:
            listed = ", ".join(known) if known else "none"
            raise UsageError(
                f"policy {policy!r} has no option {name!r}{suggestion(name, known)}; its options: {listed}"
            )
        if not equals:
            raise UsageError(f"policy {policy!r}: option {name!r} needs a value, {name}=VALUE")
        if name in values:
            raise UsageError(f"policy {policy!r}: option {name!r} is given twice")
        values[name] = _parse(policy, name, text.strip(), hints[name])
    return options(**values)


def _parse(policy: str, name: str, text: str, kind: Any) -> Any:
    """One value, by its field's type: Literal, bool, int, float or str; with `| None`, "auto" is None."""
    if isinstance(kind, types.UnionType):
        if text == "auto":
            return None
        (kind,) = (member for member in kind.__args__ if member is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        choices = typing.get_args(kind)
        if text not in choices:
            hint = suggestion(text, choices)
            raise UsageError(f"policy {policy!r}: {name}={text} is not one of {', '.join(choices)}{hint}")
        return text
    if kind is bool:
        if text.lower() not in TRUE + FALSE:
            raise UsageError(f"policy {policy!r}: {name}={text} is neither true nor false")
        return text.lower() in TRUE
    try:
        return kind(text)
    except ValueError:
        wanted = {int: "a whole number", float: "a number"}[kind]
        raise UsageError(f"policy {policy!r}: {name}={text} is not {wanted}") from None
