"""One question with its answer, how templates make them, and which parameters training never sees.

Everything is a pure function of a random generator: the same seed gives the same items on every machine.
"""

import dataclasses
import hashlib
import random
from collections.abc import Callable, Mapping
from typing import Any, Literal

Split = Literal["train", "held_out"]
HELD_OUT_SHARE = 16  # one parameter tuple in this many is kept for evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """What a template makes of one draw.

    key: the parameters that decide whether the draw is held out. expected: what the family's check needs.
    """

    prompt: str
    answer: str
    key: tuple[Any, ...]
    expected: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """A kind of question.

    Args:
      name: unique over all families.
      draw: makes a draft from random numbers; wordings vary within it.
    """

    name: str
    draw: Callable[[random.Random], Draft]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Item:
    """A question that a model is trained on or judged by. `expected` is what the family's check reads."""

    family: str
    template: str
    prompt: str
    answer: str
    expected: Mapping[str, Any]


def is_held_out(template: str, key: tuple[Any, ...]) -> bool:
    """Whether these parameters belong to evaluation. A hash decides, so no list has to be kept."""
    digest = hashlib.blake2b(repr((template, key)).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw_item(family: str, template: Template, rng: random.Random, split: Split) -> Item:
    """Draws until the parameters are of the wanted split.

    Raises:
      RuntimeError: the template has no such parameters (4,000 draws found none).
    """
    for _ in range(4000):
        draft = template.draw(rng)
        if is_held_out(template.name, draft.key) == (split == "held_out"):
            return Item(
                family=family,
                template=template.name,
                prompt=draft.prompt,
                answer=draft.answer,
                expected=draft.expected,
            )
    raise RuntimeError(f"template {template.name} has no {split} parameters")
