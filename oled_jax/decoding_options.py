"""How a run decodes: flag, else mode, else generation_config.json, else the family's model card, else the default,
which may depend on the device.

A mode is a set of values that the model card names. A flag that could have no effect is refused.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from oled_jax.config import DecodingConfig
from oled_jax.decode.registry import RULE_SETTINGS, RULES
from oled_jax.errors import UsageError
from oled_jax.loading import OpenedModel
from oled_jax.machine import is_unified
from oled_jax.models.llada2 import LLADA2, LLADA21
from oled_jax.models.registry import Family, siblings
from oled_jax.text import TokenIds, resolve_token_ids

FIELDS = tuple(
    f.name for f in dataclasses.fields(DecodingConfig) if f.name not in ("mask_id", "eos_id", "editing", "whole_text")
)
EDITING_ONLY = ("editing_threshold", "max_post_steps", "num_to_transfer")
SCHEDULE_ONLY = ("steps", "minimal_topk")
SAMPLING_ONLY = ("top_k", "top_p", "seed")
# Names that a generation_config.json does not use for these.
FLAG_ONLY = ("rule", "entropy_bound", "pad_id", "fold_commits")
OPTIONAL = ("editing_threshold", "top_k", "top_p")
WHOLE = (
    "gen_length",
    "block_length",
    "steps",
    "minimal_topk",
    "max_post_steps",
    "num_to_transfer",
    "top_k",
    "seed",
    "pad_id",
)


def decoding_for(model: OpenedModel, flags: Mapping[str, Any]) -> tuple[DecodingConfig, tuple[str, ...]]:
    """The effective settings of a model, and what a user should hear of how they came about, a sentence each.

    Args:
      flags: as for `resolve_decoding`; and `mask_id` and `eos_id`, if not the checkpoint's.

    Raises:
      UsageError: as there, or if no source knows an id.
    """
    ids = resolve_token_ids(
        mask_flag=flags.get("mask_id"),
        eos_flag=flags.get("eos_id"),
        config=model.config,
        generation_config=model.generation_config,
        codec=model.codec,
        family=model.family,
        vocab_size=model.config.vocab_size,
        raw_config=model.raw_config,
    )
    notes = list(ids.notes)
    if "2.1" in model.label and model.family.name == LLADA2.name:
        notes.append(
            f"{model.label} says {model.config.model_type}, so it is decoded as LLaDA2.0: --family {LLADA21.name} "
            "decodes it with editing, as LLaDA2.1"
        )
    decoding = resolve_decoding(
        flags,
        family=model.family,
        generation_config=model.generation_config,
        raw_config=model.raw_config,
        ids=ids,
        defaults=device_defaults(jax.local_devices()[0]),
    )
    if decoding.pad_id is not None and decoding.pad_id >= model.config.vocab_size:
        raise UsageError(f"--pad-id {decoding.pad_id} lies outside the vocabulary of {model.config.vocab_size} tokens")
    return decoding, tuple(notes)


def resolve_decoding(
    flags: Mapping[str, Any],
    *,
    family: Family,
    generation_config: Mapping[str, Any],
    ids: TokenIds,
    raw_config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> DecodingConfig:
    """The effective decoding settings.

    Args:
      flags: what the user gave, by field of `DecodingConfig`, and `mode`; other names are ignored.
      generation_config: the checkpoint's, with Hugging Face's names, the family's or the fields' own.
      raw_config: `config.json`; counts for the family's own keys (`Family.decoding_keys`).
      defaults: what holds where no other source says anything, instead of the fields' own defaults.

    Raises:
      UsageError: a flag without effect, or an impossible value.
    """
    given = {name: flags[name] for name in FIELDS if name in flags}
    _check_rule(given.get("rule"), family)
    preset = _preset(flags.get("mode"), given, family)
    stored = {**_family_keys(raw_config or {}, family, "config.json"), **_from_checkpoint(generation_config)}
    stored |= _family_keys(generation_config, family, "generation_config.json")
    values = {**(defaults or {}), **family.decoding, **stored, **preset, **given, **dataclasses.asdict(ids)}
    del values["notes"]
    decoding = DecodingConfig(**values)
    _refuse_idle(given, decoding, family)
    if decoding.temperature == 0:
        # Programs are compiled for these values, although nothing depends on them.
        return dataclasses.replace(decoding, top_k=None, top_p=None, seed=0)
    return decoding


def device_defaults(device: jax.Device) -> dict[str, Any]:
    """Settings whose faster value depends on the device (docs/performance-notes.md, "Folded commits").

    A pass over two blocks costs a GPU little more than one over one: it reads the same pages. A CPU computes more rows
    for each of them.
    """
    return {"fold_commits": not is_unified(device)}


def idle_fields(decoding: DecodingConfig) -> tuple[str, ...]:
    """Fields that change nothing under these settings."""
    used = RULES[decoding.rule_name].settings
    idle = tuple(name for name in RULE_SETTINGS if name not in used)
    if decoding.editing and decoding.editing_threshold is None:
        idle += ("max_post_steps",)
    idle += ("block_length", "fold_commits") if decoding.whole_text else ("pad_id",)
    return idle + (SAMPLING_ONLY if decoding.temperature == 0 else ())


def effective_settings(decoding: DecodingConfig) -> dict[str, Any]:
    """Every field, None where it does not apply."""
    idle = idle_fields(decoding)
    values = dataclasses.asdict(decoding) | {"rule": decoding.rule_name}
    if decoding.whole_text:
        values["pad_id"] = decoding.end_id
    return {name: None if name in idle else value for name, value in values.items()}


def _check_rule(rule: str | None, family: Family) -> None:
    if rule is not None and rule not in family.rules:
        known = ", ".join(family.rules)
        raise UsageError(f"--rule {rule}: models of family {family.name} are decoded by {known}")


def _refuse_idle(given: Mapping[str, Any], decoding: DecodingConfig, family: Family) -> None:
    for name in idle_fields(decoding):
        if name in given:
            raise UsageError(f"{_flag(name)} has no effect, {_why_idle(name, decoding, family)}")


def _why_idle(name: str, decoding: DecodingConfig, family: Family) -> str:
    models = f"models of family {family.name}"
    if name in SAMPLING_ONLY:
        return "at temperature 0 nothing is drawn: give --temperature above 0 too, or leave it out"
    if name in ("block_length", "fold_commits"):
        return f"{models} denoise the whole text at once: leave it out"
    if name == "pad_id":
        return f"{models} put nothing behind the answer: leave it out"
    if decoding.editing and name in EDITING_ONLY:
        return "with --editing-threshold none nothing is edited: leave it out"
    if decoding.editing and name in SCHEDULE_ONLY:
        return f"{models} have no schedule: leave it out, or use --max-post-steps"
    if name in EDITING_ONLY:
        return f"{models} do not edit tokens: leave it out{_other_family(family)}"
    others = [rule for rule in family.rules if name in RULES[rule].settings]
    instead = f", or give --rule {' or '.join(others)}" if others else ""
    return f"the acceptance rule {decoding.rule_name} does not go by it: leave it out{instead}"


def _preset(mode: str | None, given: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The fields that a mode sets. Raises UsageError if the family has no such mode, or flags leave nothing of it."""
    if mode is None:
        return {}
    if mode not in family.modes:
        why = f"models of family {family.name} have no modes: leave it out{_other_family(family)}"
        raise UsageError(f"--mode {mode} has no effect, {why}")
    preset = family.modes[mode]
    if set(preset) <= set(given):
        flags = " and ".join(_flag(name) for name in preset)
        raise UsageError(f"--mode {mode} has no effect, {flags} are given: leave it out, or one of them")
    return preset


def _other_family(family: Family) -> str:
    """What to do if the checkpoint is of a sibling that edits and does not say so."""
    editing = [other.name for other in siblings(family) if other.decoding.get("editing") and other != family]
    return f" (or give --family {editing[0]}, if that is what the checkpoint is)" if editing else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _family_keys(stored: Mapping[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Fields that a file sets under the family's own names. Null sets nothing."""
    found = {key: name for key, name in family.decoding_keys.items() if stored.get(key) is not None}
    return {name: _checked(name, stored[key], key, source) for key, name in found.items()}


def _from_checkpoint(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that `generation_config.json` sets. As in transformers, sampling needs `do_sample`."""
    sampling = ("temperature", "top_k", "top_p")
    found = {}
    for name in FIELDS:
        if (
            name in generation_config
            and name not in FLAG_ONLY
            and (name not in sampling or generation_config.get("do_sample"))
        ):
            found[name] = _checked(name, generation_config[name])
    if "gen_length" not in found and generation_config.get("max_new_tokens") is not None:
        found["gen_length"] = _checked("gen_length", generation_config["max_new_tokens"], key="max_new_tokens")
    return {name: value for name, value in found.items() if value is not None or name in OPTIONAL}


def _checked(name: str, value: Any, key: str | None = None, source: str = "generation_config.json") -> Any:
    """`value` if it has the field's type; null passes."""
    if value is None:
        return None
    if name == "eos_early_stop":
        right, wanted = isinstance(value, bool), "true or false"
    elif name in WHOLE:
        right, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        right, wanted = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    if right:
        return value
    raise UsageError(f"{source}: {key or name} is {value!r}, it must be {wanted}")
