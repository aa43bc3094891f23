"""How a run decodes: where settings come from, and what is said of flags that no rule of a family goes by."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oled_jax.config import DecodingConfig
from oled_jax.decode.registry import RULES, acceptance_rule
from oled_jax.decoding_options import device_defaults, effective_settings, resolve_decoding
from oled_jax.errors import UsageError
from oled_jax.models.registry import FAMILIES, family_named
from oled_jax.text import TokenIds

IDS = TokenIds(mask_id=252, eos_id=251)


def resolve(
    family: str,
    flags: Mapping[str, Any] | None = None,
    raw_config: Mapping[str, Any] | None = None,
    generation_config: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> DecodingConfig:
    return resolve_decoding(
        flags or {},
        family=family_named(family),
        generation_config=generation_config or {},
        raw_config=raw_config,
        ids=IDS,
        defaults=defaults,
    )


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_familys_defaults_are_its_first_rule(family: Any) -> None:
    decoding = resolve(family.name)
    assert decoding.rule_name == family.rules[0]
    assert acceptance_rule(decoding) is not None
    for rule in family.rules:
        assert RULES[rule].whole_text == decoding.whole_text
        assert resolve(family.name, {"rule": rule}).rule_name == rule


def test_defaults_of_a_device_are_the_last_word() -> None:
    gpu, cpu = (device_defaults(SimpleNamespace(platform=platform)) for platform in ("gpu", "cpu"))
    assert (gpu, cpu) == ({"fold_commits": True}, {"fold_commits": False})
    assert resolve("llada2", defaults=gpu).fold_commits
    assert not resolve("llada2", {"fold_commits": False}, defaults=gpu).fold_commits
    assert resolve("llada2", {"fold_commits": True}, defaults=cpu).fold_commits
    assert resolve("llada2", defaults={"block_length": 4}).block_length == 32  # the family's card says so
    assert effective_settings(resolve("rnd1", defaults=gpu))["fold_commits"] is None


def test_keys_of_the_checkpoint(golden: Path) -> None:
    raw = {name: json.loads((golden / f"{name}-tiny" / "config.json").read_text()) for name in ("sdar", "rnd1")}
    assert resolve("sdar", raw_config={**raw["sdar"], "block_size": 16}).block_length == 16
    assert resolve("sdar", {"block_length": 8}, raw_config=raw["sdar"]).block_length == 8
    assert resolve("sdar").temperature == 1.0
    rnd1 = resolve("rnd1", raw_config={**raw["rnd1"], "num_diffusion_steps": 77})
    assert (rnd1.steps, rnd1.pad_id, rnd1.whole_text, rnd1.gen_length) == (77, 250, True, 256)
    stored = {"num_diffusion_steps": 12, "pad_token_id": None, "max_new_tokens": 40, "rule": "never read"}
    rnd1 = resolve("rnd1", raw_config=raw["rnd1"], generation_config=stored)
    assert (rnd1.steps, rnd1.pad_id, rnd1.gen_length, rnd1.rule) == (12, 250, 40, "entropy")
    # LLaDA2's files have such keys as well, and they mean nothing there.
    assert resolve("llada2", raw_config={"pad_token_id": 5, "block_size": 3}).pad_id is None
    with pytest.raises(UsageError, match=r"config\.json: num_diffusion_steps is 'x', it must be a whole number"):
        resolve("rnd1", raw_config={"num_diffusion_steps": "x"})


def test_settings_that_do_not_apply_are_null() -> None:
    rnd1, sdar = effective_settings(resolve("rnd1")), effective_settings(resolve("sdar", {"rule": "static"}))
    assert rnd1["block_length"] is rnd1["threshold"] is rnd1["entropy_bound"] is rnd1["max_post_steps"] is None
    assert (rnd1["rule"], rnd1["pad_id"]) == ("entropy", 251)  # eos stands behind the answer where no pad is known
    assert sdar["threshold"] is sdar["pad_id"] is sdar["minimal_topk"] is None
    assert (sdar["rule"], sdar["block_length"], sdar["seed"]) == ("static", 4, 0)


@pytest.mark.parametrize(
    ("family", "flags", "said"),
    [
        ("sdar", {"editing_threshold": 0.5}, "--editing-threshold has no effect, models of family sdar do not edit"),
        ("rnd1", {"fold_commits": True}, "--fold-commits has no effect, models of family rnd1 denoise the whole text"),
        ("rnd1", {"max_post_steps": 2}, "--max-post-steps has no effect, models of family rnd1 do not edit tokens"),
        ("rnd1", {"block_length": 8}, "family rnd1 denoise the whole text at once"),
        ("rnd1", {"threshold": 0.5}, "the acceptance rule entropy does not go by it: leave it out$"),
        ("rnd1", {"entropy_bound": 0.5}, "leave it out, or give --rule entropy-bound"),
        ("sdar", {"rule": "static", "threshold": 0.5}, "rule static does not go by it: .* --rule dynamic"),
        ("sdar", {"pad_id": 3}, "family sdar put nothing behind the answer"),
        ("sdar", {"rule": "entropy"}, "--rule entropy: models of family sdar are decoded by dynamic, static, seq"),
        ("llada2", {"rule": "edit"}, "--rule edit: models of family llada2 are decoded by threshold"),
        ("llada21", {"rule": "threshold"}, "models of family llada21 are decoded by edit"),
        ("llada21", {"entropy_bound": 1.0}, "the acceptance rule edit does not go by it"),
        ("sdar", {"temperature": 0.0, "seed": 4}, "at temperature 0 nothing is drawn"),
    ],
)
def test_flags_without_effect_are_refused(family: str, flags: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve(family, flags)
