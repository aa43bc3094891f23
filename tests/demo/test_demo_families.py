"""The demo's questions: deterministic, split by parameters, and judged rightly."""

import dataclasses
import itertools
import random

import pytest

from oled_jax.demo.families import BY_NAME, DEMO_FAMILIES, check_answer, held_out_items, training_items
from oled_jax.demo.items import draw_item, is_held_out
from oled_jax.demo.questions import is_multiple_choice
from oled_jax.demo.sandbox import run_function

ALL = [(family, template) for family in DEMO_FAMILIES for template in family.templates]


def test_there_are_sixty_templates_with_unique_names():
    assert len(ALL) >= 60
    assert len({template.name for _, template in ALL}) == len(ALL)


@pytest.mark.parametrize(("family", "template"), ALL, ids=[template.name for _, template in ALL])
def test_every_template_has_valid_items_of_both_splits(family, template):
    rng = random.Random(1)
    for split in ("train", "held_out"):
        for _ in range(1 if family.name == "code" else 10):
            draft = template.draw(rng)
            assert "{" not in draft.prompt + draft.answer
            item = draw_item(family.name, template, rng, split)
            assert check_answer(item, item.answer), item


def test_items_depend_on_the_seed_alone():
    first, again, other = (list(itertools.islice(training_items(random.Random(seed)), 50)) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert held_out_items(BY_NAME["qa"], 20) == held_out_items(BY_NAME["qa"], 20)
    assert held_out_items(BY_NAME["qa"], 20, seed=1) != held_out_items(BY_NAME["qa"], 20)


def test_training_never_sees_a_held_out_prompt():
    trained = {item.prompt for item in itertools.islice(training_items(random.Random(0)), 20000)}
    held_out = [item.prompt for family in DEMO_FAMILIES for item in held_out_items(family, 60)]
    assert not trained & set(held_out)
    assert len(set(held_out)) > 0.95 * len(held_out)


def test_one_parameter_tuple_in_sixteen_is_held_out():
    share = sum(is_held_out("math-twice", (number,)) for number in range(8000)) / 8000
    assert 0.05 < share < 0.075


def test_wordings_of_a_template_vary():
    for family, template in ALL:
        rng = random.Random(5)
        openings = {template.draw(rng).prompt.split()[0] for _ in range(40)}
        assert len(openings) > 1, (family.name, template.name)


WRONG = {
    "math": ("", "Answer: ", "First, 1 + 1 = 2. Answer: 99999", "no idea"),
    "code": ("", "def f(x):\n    return x", "import os", "print(1)"),
    "qa": ("", "The answer is E.", "I do not know."),
    "stories": ("", "A tale.", "Once Ella and Milo saw a red and a blue thing."),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_are_refused(name):
    items = held_out_items(BY_NAME[name], 8)
    for item, other in itertools.pairwise(items):
        for text in (*WRONG[name], other.answer if other.answer != item.answer else ""):
            if name == "qa" and is_multiple_choice(item) and text == other.answer:
                continue  # another question's letter may be the right one
            assert not check_answer(item, text), (item, text)


def test_multiple_choice_is_judged_by_its_letter():
    item = next(item for item in held_out_items(BY_NAME["qa"], 16) if is_multiple_choice(item))
    right = item.expected["letter"]
    for letter in "ABCD":
        assert check_answer(item, f"It is so, so the answer is {letter}.") == (letter == right)


def test_a_hedged_fact_is_wrong():
    item = next(item for item in held_out_items(BY_NAME["qa"], 16) if "value" in item.expected)
    assert not check_answer(item, f"{item.expected['value']} or {item.expected['others'][0]}")


def test_a_story_must_keep_name_and_color():
    item = next(item for item in held_out_items(BY_NAME["stories"], 8))
    good = f"A {item.expected['hero']} named Ella saw a red {item.expected['thing']}. Ella smiled."
    item = dataclasses.replace(item, expected={key: item.expected[key] for key in ("hero", "thing")})
    assert check_answer(item, good)
    assert not check_answer(item, good.replace("Ella smiled", "Milo smiled"))
    assert not check_answer(item, f"{good} The blue {item.expected['thing']} was hers.")
    assert not check_answer(item, good.replace(item.expected["hero"], "dragon"))
    asked = dataclasses.replace(item, expected={**item.expected, "name": "Milo"})
    assert not check_answer(asked, good)


def test_model_code_runs_apart_and_within_limits():
    assert run_function("def f(x):\n    return x + 1", "f", [1, 2]) == [2, 3]
    for source in (
        "def f(x):\n    while True:\n        pass",
        "import os\ndef f(x):\n    return 1",
        "def f(x):\n    return open('/etc/passwd').read()",
        "def f(x):\n    return x.__class__",
        "def g(x):\n    return x",
        "def f(x:\n    return x",
    ):
        assert run_function(source, "f", [1]) is None, source
