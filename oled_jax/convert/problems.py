"""Collects everything wrong with a checkpoint, so that one message can list it all. Owns no files."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SPELLED_OUT = 10  # of each kind; a lost shard of a real model would fill the screen with expert names


class Problems:
    """Problems by kind, in the order in which their kinds were first met."""

    def __init__(self) -> None:
        self._by_kind: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_kind)

    def add(self, message: str, kind: str | None = None) -> None:
        """Keeps `message`. Those with an equal `kind` share the limit on how many are spelled out."""
        self._by_kind.setdefault(message if kind is None else kind, []).append(message)

    def add_all(self, messages: Iterable[str], kind: str) -> None:
        for message in messages:
            self.add(message, kind)

    def lines(self) -> list[str]:
        """One line per problem; of a kind with more than `SPELLED_OUT`, the rest as "and 12 more"."""
        found = []
        for kind, messages in self._by_kind.items():
            found += messages[:SPELLED_OUT]
            if len(messages) > SPELLED_OUT:
                found.append(f"and {len(messages) - SPELLED_OUT} more: {kind}")
        return found


def read_json_object(path: Path, problems: Problems) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is none, and then a problem says why."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        problems.add(f"{path.name} is not valid JSON (line {error.lineno}, column {error.colno}: {error.msg})")
    except UnicodeDecodeError:
        problems.add(f"{path.name} is not valid JSON (not UTF-8 text)")
    except OSError as error:
        problems.add(f"{path.name} cannot be read ({error.strerror})")
    else:
        if isinstance(value, dict):
            return value
        problems.add(f"{path.name} holds a JSON {type(value).__name__}, an object is needed")
    return None
