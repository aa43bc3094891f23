"""Text to token ids and back, by the checkpoint's tokenizer and chat template; which ids are mask and eos.

transformers is imported when a tokenizer is loaded, not before: it takes seconds.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oled_jax.config import ModelConfig
from oled_jax.errors import UsageError
from oled_jax.models.registry import Family

VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MASK_TOKENS = (
    "<|mask|>",
    "<|MASK|>",
    "<mask>",
    "[MASK]",
)  # some tokenizers add one without declaring it the mask

Messages = Sequence[Mapping[str, Any]]


class TextCodec:
    """The tokenizer of a checkpoint, or none: then conversions raise UsageErrors that name `--prompt-ids`.

    Args:
      tokenizer: a transformers tokenizer, or None.
      source: where it came from, for messages.
    """

    def __init__(self, tokenizer: Any | None, source: str):
        self._tokenizer = tokenizer
        self._source = source

    @classmethod
    def open(cls, directory: Path, chat_template: str | None = None) -> "TextCodec":
        """Loads the tokenizer of a checkpoint directory, if it has one: no network, none of its code.

        Args:
          chat_template: takes the place of the tokenizer's.

        Raises:
          UsageError: there are tokenizer files, but no tokenizer can be made of them.
        """
        present = any((directory / name).exists() for name in VOCABULARY_FILES)
        tokenizer = _load_tokenizer(directory) if present else None
        if tokenizer is not None and chat_template is not None:
            tokenizer.chat_template = chat_template
        return cls(tokenizer, str(directory))

    @property
    def available(self) -> bool:
        return self._tokenizer is not None

    @property
    def has_chat_template(self) -> bool:
        return self.available and bool(self._tokenizer.chat_template)  # type: ignore[union-attr]

    @property
    def chat_template(self) -> str:
        """Empty where there is none."""
        return str(self._tokenizer.chat_template) if self.has_chat_template else ""  # type: ignore[union-attr]

    @property
    def mask_id(self) -> int | None:
        if self._tokenizer is None:
            return None
        if self._tokenizer.mask_token is not None:
            return self._tokenizer.mask_token_id
        added = self._tokenizer.get_added_vocab()
        return next((added[token] for token in MASK_TOKENS if token in added), None)

    @property
    def eos_id(self) -> int | None:
        if self._tokenizer is None or self._tokenizer.eos_token is None:
            return None
        return self._tokenizer.eos_token_id

    def encode_prompt(self, text: str, system: str | None = None, use_chat_template: bool = True) -> list[int]:
        """Ids of one user turn in the chat template, ready for the answer; else of the raw text.

        Raises:
          UsageError: no tokenizer; or a system prompt where no chat template is used.
        """
        if self.has_chat_template and use_chat_template:
            turns = [{"role": "system", "content": system}] if system is not None else []
            return self.encode_messages([*turns, {"role": "user", "content": text}])
        if system is not None:
            reason = "it is switched off" if self.has_chat_template else f"{self._source} has none"
            raise UsageError(f"--system needs a chat template, and {reason}: put the instruction into the prompt")
        return self.encode_text(text)

    def encode_text(self, text: str, special_tokens: bool = True) -> list[int]:
        """Ids of text as it is; special_tokens: with those that the tokenizer puts around every text."""
        return [int(token) for token in self._required()(text, add_special_tokens=special_tokens)["input_ids"]]

    def encode_messages(self, messages: Messages) -> list[int]:
        """Ids of a conversation in the chat template, ready for the next answer.

        Raises:
          UsageError: no tokenizer, no chat template, or the template refuses the conversation.
        """
        ids = self._apply_template(messages, tokenize=True, return_dict=False)
        return [int(token) for token in ids]

    def render(self, messages: Messages, *, add_generation_prompt: bool = True) -> str:
        """A conversation in the chat template, as text. Raises as `encode_messages` does."""
        return self._apply_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def _apply_template(self, messages: Messages, **options: Any) -> Any:
        tokenizer = self._required()
        if not self.has_chat_template:
            raise UsageError(f"--messages needs a chat template, and {self._source} has none: use --prompt")
        from jinja2.exceptions import TemplateError

        turns = [dict(message) for message in messages]
        try:
            return tokenizer.apply_chat_template(turns, **{"add_generation_prompt": True, **options})
        except TemplateError as error:
            raise UsageError(f"the chat template of {self._source} refuses these messages: {error}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, exactly as the tokens spell it (no spaces cleaned up)."""
        return self._required().decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def _required(self) -> Any:
        if self._tokenizer is None:
            raise UsageError(f"{self._source} has no tokenizer: give the prompt as token ids with --prompt-ids")
        return self._tokenizer


def _load_tokenizer(directory: Path) -> Any:
    # On import transformers would tell the user that PyTorch is missing. It is not needed.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # tokenizer.json says all there is to know. AutoTokenizer would read config.json first, whose model type
    # it does not know, and ask for code from the checkpoint.
    loader = PreTrainedTokenizerFast if (directory / "tokenizer.json").exists() else AutoTokenizer
    try:
        return loader.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # the tokenizers library raises bare Exception for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(f"the tokenizer of {directory} cannot be loaded: {reason}") from error


def load_messages(path: Path) -> list[dict[str, Any]]:
    """A conversation from a JSON file: [{"role": ..., "content": ...}, ...].

    Raises:
      UsageError: the file cannot be read, is not JSON, or is not such a list.
    """
    try:
        messages = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"messages file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"messages file {path} is not UTF-8 text") from error
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UsageError(f"messages file {path} is not valid JSON ({where}: {error.msg})") from error
    check_messages(messages, f"messages file {path}")
    return messages


def check_messages(messages: object, where: str) -> None:
    """Raises UsageError unless it is a list of messages with role and content. where: begins the message."""
    if not isinstance(messages, list) or not messages:
        raise UsageError(f"{where} must hold a list of messages with role and content, at least one")
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise UsageError(f"{where}: message {i} is not an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise UsageError(f"{where}: message {i} needs {key}, a string")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenIds:
    """`eos_id` -1: no token ends the text. `notes` are choices a user should hear of, one sentence each."""

    mask_id: int
    eos_id: int
    notes: tuple[str, ...] = ()


def resolve_token_ids(
    *,
    mask_flag: int | None,
    eos_flag: int | None,
    config: ModelConfig,
    generation_config: Mapping[str, Any],
    codec: TextCodec,
    family: Family,
    vocab_size: int,
    raw_config: Mapping[str, Any] | None = None,
) -> TokenIds:
    """Mask and eos id: the flag, else the configuration, else generation_config, else the tokenizer, else the
    family's default. A value outside the vocabulary is passed over, with a note, unless a flag gave it.

    Args:
      raw_config: `config.json` as it is. It may list several ids, where `config` has only the first.

    Raises:
      UsageError: a flag outside the vocabulary (--eos-id -1, "no eos", is allowed), or an id no source knows.
    """
    notes: list[str] = []
    listed = raw_config or {}
    mask_id = _resolve(
        "mask", mask_flag, 0, vocab_size, notes,
        (("config.json", listed.get("mask_token_id", config.mask_token_id)),
         ("generation_config.json", generation_config.get("mask_token_id")),
         ("the tokenizer", codec.mask_id), ("the model family", family.default_mask_id)),
    )  # fmt: skip
    eos_id = _resolve(
        "eos", eos_flag, -1, vocab_size, notes,
        (("config.json", listed.get("eos_token_id", config.eos_token_id)),
         ("generation_config.json", generation_config.get("eos_token_id")),
         ("the tokenizer", codec.eos_id), ("the model family", family.default_eos_id)),
    )  # fmt: skip
    return TokenIds(mask_id=mask_id, eos_id=eos_id, notes=tuple(notes))


def _resolve(
    what: str,
    flag: int | None,
    least: int,
    vocab_size: int,
    notes: list[str],
    sources: Sequence[tuple[str, Any]],
) -> int:
    if flag is not None:
        if least <= flag < vocab_size:
            return flag
        raise UsageError(f"--{what}-id {flag} lies outside the vocabulary of {vocab_size} tokens")
    for source, value in sources:
        if isinstance(value, list) and value:
            if len(value) > 1:
                notes.append(f"{source} lists {what} ids {value}: only the first is used (--{what}-id overrides)")
            value = value[0]
        if type(value) is not int:
            continue
        if least <= value < vocab_size:
            return value
        notes.append(f"{what} id {value} of {source} lies outside the vocabulary of {vocab_size} tokens: not used")
    raise UsageError(f"the checkpoint does not say which token id is {what}: give --{what}-id")
