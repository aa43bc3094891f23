"""Family "math": word problems, worked one operation at a time. The check reads the number after "Answer:"."""

import dataclasses
import operator
import random
import re
from collections.abc import Callable, Mapping

from oled_jax.demo.items import Draft, Item, Template

NAMES = (
    "Ana", "Ben", "Carla", "Dan", "Emma", "Finn", "Gina", "Hugo", "Ines", "Jack", "Kira", "Leo", "Maya", "Noah",
    "Olga", "Paul", "Rosa", "Sam", "Tara", "Vera",
)  # fmt: skip
THINGS = (
    "apples", "books", "cards", "coins", "cookies", "eggs", "flowers", "lemons", "marbles", "pencils", "plums",
    "shells", "stamps", "stickers", "stones", "toys",
)  # fmt: skip
BOXES = ("bags", "baskets", "boxes", "crates", "jars", "packs", "trays")
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
}
STEP_WORDS = (("First,", "Then", "Finally,"), ("Step 1:", "Step 2:", "Step 3:"), ("We have", "Next,", "So"))
FINAL = re.compile(r"Answer:\s*(-?\d+)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Problem:
    """A word problem.

    Args:
      wordings: texts with {number names}, {n}, {m} for two people, {t} for things, {b} for boxes.
      ranges: name of each free number with its least and greatest value.
      given: numbers that the text states but that follow from free ones, as "z = x * y".
      steps: the solution, in the same notation; the last result is the answer.
    """

    name: str
    wordings: tuple[str, ...]
    ranges: Mapping[str, tuple[int, int]]
    given: tuple[str, ...] = ()
    steps: tuple[str, ...]

    def draw(self, rng: random.Random) -> Draft:
        """A problem whose numbers are all at least 1, and whose differences are."""
        numbers = self._numbers(rng)
        while numbers is None:
            numbers = self._numbers(rng)
        n, m = rng.sample(NAMES, 2)
        words = {"n": n, "m": m, "t": rng.choice(THINGS), "b": rng.choice(BOXES)}
        openings = rng.choice(STEP_WORDS)
        solution = []
        for opening, step in zip(openings, self.steps, strict=False):
            result, left, sign, right = _parse(step)
            solution.append(f"{opening} {numbers[left]} {sign} {numbers[right]} = {numbers[result]}.")
        answer = numbers[_parse(self.steps[-1])[0]]
        named = {name: value for name, value in numbers.items() if not name.isdecimal()}
        return Draft(
            prompt=rng.choice(self.wordings).format(**words, **named),
            answer=f"{' '.join(solution)} Answer: {answer}",
            key=tuple(numbers[name] for name in self.ranges),
            expected={"answer": answer},
        )

    def _numbers(self, rng: random.Random) -> dict[str, int] | None:
        """Values by name, constants ("2") included; None if some value is below 1."""
        numbers = {name: rng.randint(*span) for name, span in self.ranges.items()}
        for formula in (*self.given, *self.steps):
            result, left, sign, right = _parse(formula)
            for operand in (left, right):
                if operand.isdecimal():
                    numbers[operand] = int(operand)
            numbers[result] = OPERATIONS[sign](numbers[left], numbers[right])
        return numbers if min(numbers.values()) >= 1 else None


def _parse(formula: str) -> tuple[str, str, str, str]:
    result, _, left, sign, right = formula.split()
    return result, left, sign, right


def check(item: Item, text: str) -> bool:
    """Whether the last "Answer:" of the text is the right number."""
    found = FINAL.findall(text)
    return bool(found) and int(found[-1]) == item.expected["answer"]


def _problem(
    name: str,
    *wordings: str,
    steps: tuple[str, ...],
    given: tuple[str, ...] = (),
    **ranges: tuple[int, int],
) -> Template:
    problem = Problem(name=f"math-{name}", wordings=wordings, ranges=ranges, given=given, steps=steps)
    return Template(name=problem.name, draw=problem.draw)


TEMPLATES = (
    _problem(
        "gain-lose",
        "{n} has {x} {t}. {n} finds {y} more and gives {z} to {m}. How many {t} does {n} have now?",
        "There are {x} {t} in a box. {n} puts in {y} more, then {m} takes out {z}. How many are left?",
        "{n} starts with {x} {t}, gets {y} more and loses {z}. How many {t} are left?",
        x=(2, 60), y=(2, 40), z=(2, 50), steps=("s = x + y", "r = s - z"),
    ),
    _problem(
        "lose-gain",
        "{n} had {x} {t}. {n} sold {y} of them and later bought {z}. How many {t} does {n} have?",
        "A shop has {x} {t}. It sells {y} and then {z} more arrive. How many {t} does the shop have?",
        x=(10, 90), y=(2, 60), z=(2, 60), steps=("r = x - y", "s = r + z"),
    ),
    _problem(
        "boxes-extra",
        "{n} has {x} {b} with {y} {t} each, and {z} loose {t}. How many {t} are there in all?",
        "There are {y} {t} in each of {x} {b}, and {z} more on the table. How many {t} in total?",
        x=(2, 10), y=(2, 10), z=(2, 50), steps=("p = x * y", "s = p + z"),
    ),
    _problem(
        "boxes-eaten",
        "{n} buys {x} {b} of {y} {t}. {m} takes {z} of them. How many {t} remain?",
        "{x} {b} hold {y} {t} each. If {z} {t} get lost, how many {t} remain?",
        x=(2, 10), y=(2, 10), z=(2, 40), steps=("p = x * y", "r = p - z"),
    ),
    _problem(
        "share-keep",
        "{n} shares {t_total} {t} equally among {x} friends. Each friend then finds {z} more. "
        "How many {t} does each friend have?",
        "{t_total} {t} are split into {x} equal groups, and {z} are added to each group. "
        "How many {t} are in a group?",
        x=(2, 10), y=(2, 10), z=(2, 30), given=("t_total = x * y",), steps=("q = t_total / x", "s = q + z"),
    ),
    _problem(
        "share-used",
        "{t_total} {t} are packed into {x} {b}, the same number in each. {m} takes {z} from one of them. "
        "How many {t} stay in it?",
        "{n} puts {t_total} {t} into {x} equal {b} and then removes {z} from the first. How many are left there?",
        x=(2, 10), y=(3, 10), z=(1, 8), given=("t_total = x * y",), steps=("q = t_total / x", "r = q - z"),
    ),
    _problem(
        "three-sum",
        "{n} collects {x} {t} on Monday, {y} on Tuesday and {z} on Wednesday. How many {t} is that altogether?",
        "A class has {x} red, {y} blue and {z} green {t}. How many {t} does it have in total?",
        x=(2, 50), y=(2, 50), z=(2, 50), steps=("s = x + y", "u = s + z"),
    ),
    _problem(
        "two-lost",
        "{n} has {x} {t}. {m} borrows {y} and {z} break. How many good {t} does {n} still have?",
        "Of {x} {t}, {y} are sold and {z} are given away. How many {t} are left?",
        x=(20, 99), y=(2, 50), z=(2, 40), steps=("r = x - y", "q = r - z"),
    ),
    _problem(
        "twice",
        "{n} has {x} {t}. {m} has twice as many. How many {t} do they have together?",
        "{m} has two times as many {t} as {n}, who has {x}. How many {t} do both have?",
        x=(3, 60), steps=("p = 2 * x", "s = p + x"),
    ),
    _problem(
        "times-as-many",
        "{n} has {x} {t}. {m} has {y} times as many. How many {t} do they have together?",
        "{m} owns {y} times as many {t} as {n}. {n} owns {x}. How many {t} is that in all?",
        x=(2, 10), y=(3, 9), steps=("p = y * x", "s = p + x"),
    ),
    _problem(
        "more-than",
        "{n} has {x} {t}. {m} has {y} more than {n}. How many {t} do they have together?",
        "{m} picked {y} more {t} than {n}. {n} picked {x}. How many {t} did both pick?",
        x=(2, 50), y=(2, 40), steps=("s = x + y", "u = s + x"),
    ),
    _problem(
        "fewer-than",
        "{n} has {x} {t}. {m} has {y} fewer than {n}. How many {t} do they have together?",
        "{m} found {y} fewer {t} than {n}. {n} found {x}. How many {t} did they find in all?",
        x=(10, 70), y=(2, 50), steps=("r = x - y", "s = r + x"),
    ),
    _problem(
        "change",
        "{n} buys {x} {t} for {y} dollars each and pays with {z} dollars. How many dollars come back?",
        "One of the {t} costs {y} dollars. {n} takes {x} and hands over {z} dollars. How much change is due?",
        x=(2, 9), y=(2, 9), z=(20, 100), steps=("p = x * y", "r = z - p"),
    ),
    _problem(
        "two-prices",
        "{n} buys {x} {t} at {y} dollars each and a hat for {z} dollars. What does {n} pay?",
        "A ticket costs {y} dollars. {n} buys {x} tickets and a drink for {z} dollars. How much is it?",
        x=(2, 10), y=(2, 10), z=(2, 40), steps=("p = x * y", "s = p + z"),
    ),
    _problem(
        "two-products",
        "{n} has {x} {b} of {y} {t} and {u} {b} of {v} {t}. How many {t} does {n} have?",
        "There are {x} rows of {y} {t} and {u} rows of {v} {t}. How many {t} are there?",
        x=(2, 9), y=(2, 9), u=(2, 9), v=(2, 9), steps=("p = x * y", "q = u * v", "s = p + q"),
    ),
    _problem(
        "weeks",
        "{n} reads {x} pages a day. How many pages are left of a book of {z} pages after {y} days?",
        "A book has {z} pages. {n} reads {x} pages on each of {y} days. How many pages remain?",
        x=(2, 10), y=(2, 9), z=(40, 150), steps=("p = x * y", "r = z - p"),
    ),
    _problem(
        "ages",
        "{n} is {x} years old. {m} is {y} years older. How old will {m} be in {z} years?",
        "{m} is {y} years older than {n}, who is {x}. What will be the age of {m} in {z} years?",
        x=(2, 50), y=(2, 30), z=(2, 20), steps=("s = x + y", "u = s + z"),
    ),
    _problem(
        "distance",
        "{n} walks {x} km a day for {y} days and {m} walks {z} km. How many km do they walk together?",
        "A bus drives {x} km in an hour for {y} hours and then {z} km more. How far does it go?",
        x=(2, 10), y=(2, 10), z=(2, 60), steps=("p = x * y", "s = p + z"),
    ),
    _problem(
        "legs",
        "A farm has {x} hens and {y} cows. How many legs do they have? Hens have 2 legs and cows have 4.",
        "{n} counts the legs of {x} birds with 2 legs and {y} dogs with 4 legs. How many legs are there?",
        x=(2, 30), y=(2, 20), steps=("p = 2 * x", "q = 4 * y", "s = p + q"),
    ),
    _problem(
        "half",
        "{n} has {d} {t} and gives half of them to {m}. Then {n} gets {z} more. How many {t} does {n} have?",
        "Half of {d} {t} are sold, and {z} new ones arrive. How many {t} are there now?",
        x=(2, 50), z=(2, 50), given=("d = 2 * x",), steps=("q = d / 2", "s = q + z"),
    ),
    _problem(
        "join-share",
        "{n} has {y} {t} and {m} has {z}. They share all of them equally. How many {t} does each get?",
        "{y} red and {z} blue {t} are put into 2 equal groups. How many {t} are in each group?",
        x=(3, 50), y=(2, 60), given=("d = 2 * x", "z = d - y"), steps=("s = y + z", "q = s / 2"),
    ),
    _problem(
        "rows-needed",
        "{n} needs {z} {t} and has {x} {b} of {y}. How many {t} are missing?",
        "{z} guests come and there are {x} tables with {y} chairs. How many chairs are missing?",
        x=(2, 9), y=(2, 9), z=(30, 110), steps=("p = x * y", "r = z - p"),
    ),
)  # fmt: skip
