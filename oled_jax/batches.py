"""Many prompts in one run: the file they come from, and the lines their answers become.

A file is JSON lines if its name ends in .jsonl or its first line begins with a brace; else each line is a prompt.
Blank lines are skipped in both.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from oled_jax.decode.events import Result
from oled_jax.errors import UsageError
from oled_jax.text import TextCodec, check_messages

SOURCES = ("prompt", "messages", "prompt_ids")
DEFAULT_BATCH = 8

Id = str | int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One request, as token ids.

    id: what its answer is called: the line's number unless the file says it, None outside files. source: where it
    stands, for messages.
    """

    id: Id | None
    source: str
    ids: list[int]


def read_prompt_file(path: Path, codec: TextCodec, *, system: str | None, use_chat_template: bool) -> list[Prompt]:
    """Every prompt of a file.

    Args:
      codec: of the model.
      system, use_chat_template: for prompts that are text, see `TextCodec.encode_prompt`.

    Raises:
      UsageError: the file cannot be read or holds no prompt, or a line is none; the message names the line.
    """
    lines = _lines(path)
    if not lines:
        raise UsageError(f"prompt file {path} is empty: give one prompt per line")
    structured = path.suffix == ".jsonl" or next(iter(lines.values())).lstrip().startswith("{")
    prompts = []
    for number, line in lines.items():
        where = f"prompt file {path}, line {number}"
        try:
            entry = _parse(line) if structured else {"prompt": line}
            ids = _encode(entry, codec, system=system, use_chat_template=use_chat_template)
        except UsageError as error:
            raise UsageError(f"{where}: {error}") from error
        prompts.append(Prompt(id=entry.get("id", number), source=where, ids=ids))
    return prompts


def _lines(path: Path) -> dict[int, str]:
    """Lines that are not blank, by number."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UsageError(f"prompt file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"prompt file {path} is not UTF-8 text") from error
    # Not splitlines, which would also cut at characters that JSON allows inside a string.
    return {number: line for number, line in enumerate(text.split("\n"), 1) if line.strip()}


def _parse(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"it is not valid JSON (column {error.colno}: {error.msg})") from error
    if not isinstance(entry, dict):
        raise UsageError("it must be an object with prompt, messages or prompt_ids")
    given = [name for name in SOURCES if name in entry]
    if len(given) != 1:
        raise UsageError(f"it must have one of {', '.join(SOURCES)}, and has {' and '.join(given) or 'none'}")
    if "id" in entry and type(entry["id"]) not in (str, int):
        raise UsageError(f"id is {entry['id']!r}, it must be a string or a whole number")
    return entry


def _encode(entry: Mapping[str, Any], codec: TextCodec, *, system: str | None, use_chat_template: bool) -> list[int]:
    if "messages" in entry:
        if system is not None or not use_chat_template:
            raise UsageError("--system and --no-chat-template have no effect on messages: leave them out")
        check_messages(entry["messages"], "messages")
        return codec.encode_messages(entry["messages"])
    if "prompt_ids" in entry:
        ids = entry["prompt_ids"]
        if not isinstance(ids, list) or any(type(token) is not int for token in ids):
            raise UsageError("prompt_ids must be a list of whole numbers")
        return ids
    if not isinstance(entry["prompt"], str):
        raise UsageError("prompt must be a string")
    return codec.encode_prompt(entry["prompt"].rstrip("\r"), system, use_chat_template=use_chat_template)


class AnswerLines:
    """Answers as JSON lines in the order of their prompts, each as soon as those before it are there.

    Args:
      prompts: of the run.
      codec: of the model; without a tokenizer answers are ids.
    """

    def __init__(self, prompts: Sequence[Prompt], codec: TextCodec) -> None:
        self._prompts, self._codec = prompts, codec
        self._finished: dict[int, str] = {}
        self._next = 0

    def add(self, row: int, result: Result) -> Iterator[str]:
        """Takes an answer; yields the lines that can be written now."""
        self._finished[row] = json.dumps(self._answer(row, result), ensure_ascii=False)
        while self._next in self._finished:
            yield self._finished.pop(self._next)
            self._next += 1

    def _answer(self, row: int, result: Result) -> dict[str, Any]:
        said: dict[str, Any] = {"output_ids": list(result.output_ids)}
        if self._codec.available:
            said = {"text": self._codec.decode(result.output_ids)}
        return {"id": self._prompts[row].id, **said, "finish": result.finish}
