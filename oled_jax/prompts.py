"""The prompts of a run, as token ids: one from text, a conversation, ids or standard input, or many from a file."""

import argparse
import sys
from pathlib import Path
from typing import Any

from oled_jax.batches import DEFAULT_BATCH, Prompt, read_prompt_file
from oled_jax.cli import whole_number
from oled_jax.errors import UsageError
from oled_jax.text import TextCodec, load_messages

SOURCES = ("prompt", "messages", "prompt_ids", "prompt_file")


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompt", "One of the first four; without any, text from standard input.")
    group.add_argument("--prompt", metavar="TEXT", help="what the user says")
    group.add_argument("--messages", metavar="FILE", help="a conversation: JSON list of objects with role and content")
    group.add_argument("--prompt-ids", metavar="1,2,3", help="token ids; the answer is printed as ids too")
    group.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="a prompt per line, or JSON lines with prompt, messages or prompt_ids, and id; answers are JSON lines",
    )
    group.add_argument("--system", metavar="TEXT", help="system prompt, for models with a chat template")
    group.add_argument("--no-chat-template", action="store_true", help="give the text to the model as it is")
    group.add_argument(
        "--batch-size",
        type=whole_number(1),
        metavar="N",
        help=f"prompts of --prompt-file that are decoded together (default: {DEFAULT_BATCH}, or all if they are fewer)",
    )


def check_prompt_flags(options: argparse.Namespace) -> None:
    """Raises UsageError for contradictions; needs no model."""
    given = [name for name in SOURCES if getattr(options, name) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(_flag(name) for name in given)} are given: there can be one prompt only")
    if options.batch_size is not None and options.prompt_file is None:
        raise UsageError("--batch-size has no effect without --prompt-file: there is one prompt")
    for name in ("system", "no_chat_template"):
        if not getattr(options, name):
            continue
        if options.prompt_ids is not None:
            raise UsageError(f"{_flag(name)} has no effect with --prompt-ids: leave it out")
        if options.messages is not None:
            hint = "put a system message into the file" if name == "system" else "messages need the template"
            raise UsageError(f"{_flag(name)} has no effect with --messages: {hint}")


def read_prompts(
    options: argparse.Namespace, codec: TextCodec, vocab_size: int, default: str | None = None
) -> list[Prompt]:
    """The prompts and their token ids.

    Args:
      options: of `add_prompt_flags`, checked.
      default: the text if there is no prompt at all.

    Raises:
      UsageError: no prompt, or one that this model cannot take.
    """
    if options.no_chat_template and not codec.has_chat_template:
        raise UsageError("--no-chat-template has no effect: this model has no chat template")
    if options.prompt_file is None:
        prompts = [Prompt(id=None, source="prompt", ids=_one_prompt(options, codec, default))]
    else:
        prompts = read_prompt_file(
            Path(options.prompt_file), codec, system=options.system, use_chat_template=not options.no_chat_template
        )
    for prompt in prompts:
        outside = [token for token in prompt.ids if not 0 <= token < vocab_size]
        if outside:
            raise UsageError(
                f"{prompt.source}: token id {outside[0]} is outside the vocabulary, it must be from 0 to "
                f"{vocab_size - 1}"
            )
    return prompts


def batch_size(options: argparse.Namespace, num_prompts: int) -> int:
    """Rows of the batch."""
    return min(options.batch_size or DEFAULT_BATCH, num_prompts)


def _one_prompt(options: argparse.Namespace, codec: TextCodec, default: str | None) -> list[int]:
    if options.prompt_ids is not None:
        return parse_ids(options.prompt_ids)
    if options.messages is not None:
        return codec.encode_messages(load_messages(Path(options.messages)))
    text = options.prompt if options.prompt is not None else _standard_input(default)
    return codec.encode_prompt(text, options.system, use_chat_template=not options.no_chat_template)


def parse_ids(text: str) -> list[int]:
    """Ids separated by commas or spaces. Raises UsageError if there are none or something else is there."""
    words = text.replace(",", " ").split()
    if not words:
        raise UsageError("--prompt-ids is empty: give token ids separated by commas")
    for word in words:
        if not word.removeprefix("-").isdecimal():
            raise UsageError(f"--prompt-ids: {word!r} is not a token id, a whole number")
    return [int(word) for word in words]


def describe_prompt(options: argparse.Namespace, codec: TextCodec) -> dict[str, Any]:
    """The part of the statistics' settings that is about the prompt."""
    templated = options.prompt_ids is None and codec.has_chat_template and not options.no_chat_template
    return {"chat_template": templated, "system": options.system}


def _standard_input(default: str | None) -> str:
    text = "" if sys.stdin.isatty() else _read_all()
    if not text and default is None:
        raise UsageError("there is no prompt: give --prompt, --messages or --prompt-ids, or text on standard input")
    return text or str(default)


def _read_all() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError("standard input is not UTF-8 text") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
