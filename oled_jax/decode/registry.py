"""The acceptance rules, and which settings each goes by. A rule is one entry of `RULES`."""

import dataclasses
from collections.abc import Callable, Mapping

from oled_jax.config import DecodingConfig
from oled_jax.decode.entropy import EntropyBoundRule, EntropyRule
from oled_jax.decode.unmask import AcceptanceRule, EditRule, SequentialRule, ThresholdRule
from oled_jax.errors import UsageError


@dataclasses.dataclass(frozen=True)
class RuleEntry:
    """How a rule is made.

    Attributes:
      make: from the settings of a run.
      settings: fields of `DecodingConfig` that it goes by; those that only other rules go by have no effect.
      whole_text: it decodes a text as one, not block by block.
    """

    make: Callable[[DecodingConfig], AcceptanceRule]
    settings: tuple[str, ...]
    whole_text: bool = False


RULES: Mapping[str, RuleEntry] = {
    "threshold": RuleEntry(ThresholdRule.from_config, ("threshold", "steps", "minimal_topk")),
    "edit": RuleEntry(EditRule.from_config, ("threshold", "editing_threshold", "max_post_steps", "num_to_transfer")),
    "dynamic": RuleEntry(ThresholdRule.dynamic, ("threshold", "steps")),
    "static": RuleEntry(ThresholdRule.static, ("steps",)),
    "sequential": RuleEntry(SequentialRule.from_config, ("steps",)),
    "entropy": RuleEntry(EntropyRule.from_config, ("steps",), whole_text=True),
    "entropy-bound": RuleEntry(EntropyBoundRule.from_config, ("steps", "entropy_bound"), whole_text=True),
}
RULE_SETTINGS = tuple(dict.fromkeys(name for entry in RULES.values() for name in entry.settings))


def acceptance_rule(config: DecodingConfig) -> AcceptanceRule:
    """The rule that `config` names. Raises UsageError for an unknown one, and for one of another way to decode."""
    entry = RULES.get(config.rule_name)
    if entry is None:
        raise UsageError(f"acceptance rule {config.rule_name!r} is unknown, known are: {', '.join(RULES)}")
    if entry.whole_text != config.whole_text:
        how = "whole texts" if entry.whole_text else "block by block"
        raise UsageError(f"acceptance rule {config.rule_name!r} decodes {how}, whole_text is {config.whole_text}")
    return entry.make(config)
