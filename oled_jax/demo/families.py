"""The four families of questions: templates and check of each. The way in for training, benches and tests."""

import dataclasses
import random
from collections.abc import Callable, Iterator

from oled_jax.demo import code_tasks, math_problems, questions, stories
from oled_jax.demo.items import Item, Template, draw_item


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoFamily:
    """A family of questions.

    Attributes:
      check: whether a text answers an item of this family.
      share: part of the training items.
    """

    name: str
    templates: tuple[Template, ...]
    check: Callable[[Item, str], bool]
    share: float


DEMO_FAMILIES = (
    DemoFamily(name="math", templates=math_problems.TEMPLATES, check=math_problems.check, share=0.42),
    DemoFamily(name="code", templates=code_tasks.TEMPLATES, check=code_tasks.check, share=0.12),
    DemoFamily(name="qa", templates=questions.TEMPLATES, check=questions.check, share=0.30),
    DemoFamily(name="stories", templates=stories.TEMPLATES, check=stories.check, share=0.16),
)
BY_NAME = {family.name: family for family in DEMO_FAMILIES}
CHOICE_WEIGHT = 2.0  # a multiple-choice template against any other: it is the hardest to learn


def check_answer(item: Item, text: str) -> bool:
    """Whether `text` answers the item."""
    return BY_NAME[item.family].check(item, text)


def training_items(rng: random.Random) -> Iterator[Item]:
    """Endless, the families mixed by their shares. Draws from `rng` as it goes."""
    shares = [family.share for family in DEMO_FAMILIES]
    weights = {family.name: [_weight(template) for template in family.templates] for family in DEMO_FAMILIES}
    while True:
        (family,) = rng.choices(DEMO_FAMILIES, shares)
        (template,) = rng.choices(family.templates, weights[family.name])
        yield draw_item(family.name, template, rng, "train")


def held_out_items(family: DemoFamily, count: int, seed: int = 0) -> list[Item]:
    """The first `count` evaluation items of a family, its templates in turn; repeats only where 50 draws from
    a template found nothing new."""
    rng = random.Random(f"{family.name}/{seed}")
    items: list[Item] = []
    seen: set[str] = set()
    for number in range(count):
        template = family.templates[number % len(family.templates)]
        for _ in range(50):
            item = draw_item(family.name, template, rng, "held_out")
            if item.prompt not in seen:
                break
        items.append(item)
        seen.add(item.prompt)
    return items


def _weight(template: Template) -> float:
    return CHOICE_WEIGHT if template.name.endswith("-choice") else 1.0
