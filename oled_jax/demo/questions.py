"""Family "qa": questions about `facts.py`, open and with four choices. The check compares the stated fact.

A held-out item is a fact under a wording, or a list of choices, that training never sees together; the fact
itself is seen under other wordings, since nobody can infer a capital.
"""

import dataclasses
import random
import re
from collections.abc import Iterable, Mapping

from oled_jax.demo.facts import CAPITALS, CONTINENTS, ELEMENTS, UNITS
from oled_jax.demo.items import Draft, Item, Template

LETTERS = "ABCD"
LAYOUTS = ("{q}\n{lines}", "{q} Choose one: {row}", "Choose the right answer. {q}\n{lines}", "{q} {row}")
CHOICE = re.compile(r"answer is ([A-D])\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Relation:
    """A relation between two things.

    Args:
      facts: subject to value; values need not differ.
      questions: wordings with {s}, the subject.
      statement: how the answer begins, with {s} and {v}.
    """

    name: str
    facts: Mapping[str, str]
    questions: tuple[str, ...]
    statement: str

    def draw_open(self, rng: random.Random) -> Draft:
        subject, wording = rng.choice(list(self.facts)), rng.choice(self.questions)
        value = self.facts[subject]
        return Draft(
            prompt=wording.format(s=subject),
            answer=_capitalised(self.statement.format(s=subject, v=value)) + ".",
            key=(subject, wording),
            expected={"value": value, "others": _others(self.facts.values(), value)},
        )

    def draw_choice(self, rng: random.Random) -> Draft:
        subject, wording = rng.choice(list(self.facts)), rng.choice(self.questions)
        value = self.facts[subject]
        choices = [value, *rng.sample(_others(self.facts.values(), value), 3)]
        rng.shuffle(choices)
        labelled = [f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True)]
        question = wording.format(s=subject)
        prompt = rng.choice(LAYOUTS).format(q=question, lines="\n".join(labelled), row=" ".join(labelled))
        letter = LETTERS[choices.index(value)]
        stated = _capitalised(self.statement.format(s=subject, v=value))
        return Draft(
            prompt=prompt,
            answer=f"{stated}, so the answer is {letter}.",
            key=(subject, wording, tuple(choices)),
            expected={"letter": letter},
        )


def _others(values: Iterable[str], value: str) -> list[str]:
    return sorted(set(values) - {value})


def _capitalised(text: str) -> str:
    return text[0].upper() + text[1:]


def check(item: Item, text: str) -> bool:
    """Multiple choice: the last "answer is X" names the right letter. Open: the value stands in the text as a
    word, and no other value of the relation does after it is taken out."""
    letter = item.expected.get("letter")
    if letter is not None:
        found = CHOICE.findall(text)
        return bool(found) and found[-1] == letter
    value = item.expected["value"]
    if not _has_word(text, value):
        return False
    rest = text.replace(value, " ")
    return not any(_has_word(rest, other) for other in item.expected["others"])


def _has_word(text: str, word: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None


def is_multiple_choice(item: Item) -> bool:
    """Whether the item lists choices."""
    return "letter" in item.expected


RELATIONS = (
    Relation(
        name="capital",
        facts=CAPITALS,
        questions=("What is the capital of {s}?", "Which city is the capital of {s}?", "Name the capital of {s}.",
                   "{s} has which capital?", "Tell me the capital city of {s}.", "What city is the capital of {s}?"),
        statement="the capital of {s} is {v}",
    ),
    Relation(
        name="country",
        facts={city: country for country, city in CAPITALS.items()},
        questions=("Which country has the capital {s}?", "{s} is the capital of which country?",
                   "Of which country is {s} the capital?", "Name the country whose capital is {s}.",
                   "In which country is the capital {s}?"),
        statement="{s} is the capital of {v}",
    ),
    Relation(
        name="continent",
        facts={country: continent for continent, members in CONTINENTS.items() for country in members},
        questions=("On which continent is {s}?", "Which continent does {s} belong to?", "{s} lies on which continent?",
                   "Name the continent of {s}.", "What continent is {s} part of?"),
        statement="{s} is in {v}",
    ),
    Relation(
        name="symbol",
        facts={name: symbol for name, (symbol, _) in ELEMENTS.items()},
        questions=("What is the chemical symbol of {s}?", "Which symbol does {s} have?", "Give the symbol for {s}.",
                   "What is the symbol for the element {s}?", "How is {s} written in chemistry?"),
        statement="the symbol of {s} is {v}",
    ),
    Relation(
        name="element",
        facts={symbol: name for name, (symbol, _) in ELEMENTS.items()},
        questions=("Which element has the symbol {s}?", "What element is {s}?", "Name the element with the symbol {s}.",
                   "{s} is the symbol of which element?", "What does {s} stand for in chemistry?"),
        statement="{s} is the symbol of {v}",
    ),
    Relation(
        name="number",
        facts={name: str(number) for name, (_, number) in ELEMENTS.items()},
        questions=("What is the atomic number of {s}?", "Which atomic number does {s} have?",
                   "Give the atomic number of {s}.", "How many protons does {s} have?",
                   "What number does {s} have in the periodic table?"),
        statement="the atomic number of {s} is {v}",
    ),
    Relation(
        name="by-number",
        facts={f"atomic number {number}": name for name, (_, number) in ELEMENTS.items()},
        questions=("Which element has {s}?", "What element has {s}?", "Name the element with {s}.",
                   "{s} belongs to which element?"),
        statement="the element with {s} is {v}",
    ),
    Relation(
        name="unit",
        facts={f"{small} are in one {large}": str(count) for count, small, large in UNITS},
        questions=("How many {s}?", "Tell me how many {s}.", "What number of {s}?", "Say how many {s}."),
        statement="{v} {s}",
    ),
)  # fmt: skip

TEMPLATES = tuple(
    template
    for relation in RELATIONS
    for template in (
        Template(name=f"qa-{relation.name}", draw=relation.draw_open),
        Template(name=f"qa-{relation.name}-choice", draw=relation.draw_choice),
    )
)
