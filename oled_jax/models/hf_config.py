"""Typed reading of Hugging Face's `config.json`: every wrong value is noted, none stops the reading.

Used by the families' `config_from_hf`. Knows JSON types and the keys that all families spell alike; which
keys exist and what they default to is the family's business.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from oled_jax.config import ModelConfig, RopeScaling
from oled_jax.errors import CheckpointError

SOURCE = "model configuration"
ROPE_NUMBERS = (
    "factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "low_freq_factor",
    "high_freq_factor",
)  # fmt: skip


class ConfigReader:
    """Reads keys of one mapping. Missing and null give the default; `problems` collects the wrong ones."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = ""):
        self.raw = raw
        self.prefix = prefix
        self.problems: list[str] = []
        self.wrong: list[str] = []

    def _note(self, key: str, wanted: str) -> None:
        self.wrong.append(key)
        self.problems.append(f"{self.prefix}{key} is {self.raw[key]!r}, it must be {wanted}")

    def integer(self, key: str, default: int) -> int:
        value = self.optional_integer(key)
        return default if value is None else value

    def optional_integer(self, key: str) -> int | None:
        value = self.raw.get(key)
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        self._note(key, "a whole number")
        return None

    def number(self, key: str, default: float) -> float:
        value = self.optional_number(key)
        return default if value is None else value

    def optional_number(self, key: str) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        self._note(key, "a finite number")
        return None

    def boolean(self, key: str, default: bool) -> bool:
        """null counts as false, as it does in the reference's conditions."""
        value = self.raw.get(key, default)
        if value is None or isinstance(value, bool):
            return bool(value)
        self._note(key, "true or false")
        return default

    def numbers(self, key: str) -> tuple[float, ...] | None:
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, list | tuple) and all(
            isinstance(item, int | float) and not isinstance(item, bool) for item in value
        ):
            return tuple(float(item) for item in value)
        self._note(key, "a list of numbers")
        return None

    def token_id(self, key: str) -> int | None:
        """A token id; of a list of ids (Hugging Face allows several end tokens) the first."""
        value = self.raw.get(key)
        first = value[0] if isinstance(value, list) and value else value
        if first is None or (isinstance(first, int) and not isinstance(first, bool)):
            return first
        self._note(key, "a token id")
        return None

    def dtype(self) -> str:
        """`dtype`, or its old name `torch_dtype`; float32 where both are missing."""
        key = "dtype" if self.raw.get("dtype") is not None else "torch_dtype"
        value = self.raw.get(key)
        if value is None:
            return "float32"
        if isinstance(value, str):
            return value.removeprefix("torch.")
        self._note(key, "the name of a dtype")
        return "float32"

    def dtype_and_ids(self) -> dict[str, Any]:
        """The fields of `ModelConfig` that every family spells alike."""
        ids = ("mask_token_id", "eos_token_id", "pad_token_id")
        return {"dtype": self.dtype(), **{name: self.token_id(name) for name in ids}}

    def refuse_unsupported(self) -> None:
        """Notes what no family here can run."""
        if self.raw.get("hidden_act", "silu") != "silu":
            self.problems.append(f"hidden_act is {self.raw['hidden_act']!r}, only 'silu' is supported")
        if self.raw.get("quantization_config"):
            self.problems.append("quantization_config is set: quantized checkpoints are not supported")

    def rope_scaling(self) -> RopeScaling | None:
        """`rope_scaling`; null, false and {} mean none. Its type is `rope_type`, or `type` in old files."""
        value = self.raw.get("rope_scaling")
        if not value:
            return None
        if not isinstance(value, Mapping):
            self._note("rope_scaling", "an object or null")
            return None
        inner = ConfigReader(value, "rope_scaling ")
        rope_type = value.get("rope_type", value.get("type", "default"))
        scaling = RopeScaling(
            rope_type=rope_type if isinstance(rope_type, str) else repr(rope_type),
            original_max_position_embeddings=inner.optional_integer("original_max_position_embeddings"),
            truncate=inner.boolean("truncate", True),
            short_factor=inner.numbers("short_factor"),
            long_factor=inner.numbers("long_factor"),
            **{name: inner.optional_number(name) for name in ROPE_NUMBERS},
        )
        self.problems += inner.problems
        self.wrong += inner.wrong
        return scaling

    def finish(self, make: Callable[..., ModelConfig], fields: Mapping[str, Any]) -> ModelConfig:
        """`make(**fields)`, or one CheckpointError with the reading's problems and those of `make`."""
        consequent: list[str] = []
        try:
            config = make(**fields)
        except CheckpointError as error:
            # A key of a wrong type was read as its default, so what is said about its value would mislead.
            consequent = [p for p in error.problems if not any(name in p for name in self.wrong)]
        if self.problems or consequent:
            raise CheckpointError(SOURCE, self.problems + consequent)
        return config
