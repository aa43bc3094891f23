"""Family "code": a Python function from its signature and docstring. The check runs it."""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

from oled_jax.demo.items import Draft, Item, Template
from oled_jax.demo.sandbox import run_function

ARGUMENTS = {
    "number": ("x", "n", "value", "number"),
    "list": ("items", "values", "numbers"),
    "text": ("text", "s", "word"),
}
REQUESTS = ("Complete the function:", "Write this function:", "Finish this Python function:")
INPUTS: Mapping[str, Sequence[Any]] = {
    "number": (-7, 0, 1, 2, 5, 12, 30, 100),
    "list": ([], [3], [1, 2, 3, 4], [9, -4, 5, 5, 20], [12, 7, 30, 2, 18, 7]),
    "text": ("", "a", "level", "Hello World", "banana split"),
}
LETTERS = "aeioulnrst"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A function to write.

    Args:
      names: of the function; `{k}` and `{c}` are a number and a letter drawn for the item.
      docstrings: what it does, in several wordings; `{a}` is the argument.
      body: its lines, without indentation.
      argument: kind of the argument, a key of `INPUTS`.
      numbers: range of {k}.
    """

    name: str
    names: tuple[str, ...]
    docstrings: tuple[str, ...]
    body: tuple[str, ...]
    argument: str
    numbers: tuple[int, int] = (2, 99)

    def draw(self, rng: random.Random) -> Draft:
        words = {
            "k": rng.randint(*self.numbers),
            "c": rng.choice(LETTERS),
            "a": rng.choice(ARGUMENTS[self.argument]),
        }
        name = rng.choice(self.names).format(**words)
        described = rng.choice(self.docstrings).format(**words)
        head = f"def {name}({words['a']}):\n"
        body = "".join(f"    {line.format(**words)}\n" for line in self.body)
        numeric = "{k}" in self.docstrings[0]
        return Draft(
            prompt=f'{rng.choice(REQUESTS)}\n{head}    """{described}"""',
            answer=(head + body).rstrip("\n"),
            key=(words["k"],) if numeric else (name, words["a"], described),
            expected={
                "function": name,
                "inputs": INPUTS[self.argument],
                "outputs": self._outputs(name, head + body),
            },
        )

    def _outputs(self, name: str, source: str) -> tuple[Any, ...]:
        scope: dict[str, Any] = {}
        exec(source, scope)  # the template's own text, never a model's
        function = scope[name]
        return tuple(function(_copy(value)) for value in INPUTS[self.argument])


def _copy(value: Any) -> Any:
    return list(value) if isinstance(value, list) else value


def check(item: Item, text: str) -> bool:
    """Whether the text defines the function and it returns the right value for every input."""
    expected = item.expected
    outputs = run_function(text, expected["function"], expected["inputs"])
    return outputs is not None and outputs == _as_json(expected["outputs"])


def _as_json(values: Sequence[Any]) -> list[Any]:
    return [list(value) if isinstance(value, tuple) else value for value in values]


def _task(
    name: str, argument: str, names: tuple[str, ...], docstrings: tuple[str, ...], *body: str, **options: Any
) -> Template:
    task = Task(name=f"code-{name}", names=names, docstrings=docstrings, body=body, argument=argument, **options)
    return Template(name=task.name, draw=task.draw)


TEMPLATES = (
    _task("add", "number", ("add_{k}", "plus_{k}", "increase_by_{k}"),
          ("Return {a} plus {k}.", "Add {k} to {a}.", "Return the sum of {a} and {k}."), "return {a} + {k}"),
    _task("subtract", "number", ("subtract_{k}", "minus_{k}", "lower_by_{k}"),
          ("Return {a} minus {k}.", "Subtract {k} from {a}.", "Take {k} away from {a}."), "return {a} - {k}"),
    _task("multiply", "number", ("times_{k}", "multiply_by_{k}", "scale_{k}"),
          ("Return {a} times {k}.", "Multiply {a} by {k}.", "Return the product of {a} and {k}."), "return {a} * {k}"),
    _task("remainder", "number", ("mod_{k}", "remainder_{k}"),
          ("Return the remainder of {a} divided by {k}.", "Return {a} modulo {k}."), "return {a} % {k}"),
    _task("divisible", "number", ("is_multiple_of_{k}", "divisible_by_{k}"),
          ("Return True if {a} is a multiple of {k}.", "Tell whether {a} can be divided by {k}."),
          "return {a} % {k} == 0"),
    _task("greater", "number", ("above_{k}", "is_more_than_{k}"),
          ("Return True if {a} is greater than {k}.", "Tell whether {a} is more than {k}."), "return {a} > {k}"),
    _task("smaller", "number", ("below_{k}", "is_less_than_{k}"),
          ("Return True if {a} is less than {k}.", "Tell whether {a} is smaller than {k}."), "return {a} < {k}"),
    _task("cap", "number", ("at_most_{k}", "cap_{k}"),
          ("Return {a}, but at most {k}.", "Limit {a} to {k}."), "return min({a}, {k})"),
    _task("floor", "number", ("at_least_{k}", "raise_to_{k}"),
          ("Return {a}, but at least {k}.", "Return {a} or {k}, whichever is larger."), "return max({a}, {k})"),
    _task("distance", "number", ("distance_to_{k}", "far_from_{k}"),
          ("Return the distance between {a} and {k}.", "Return how far {a} is from {k}."), "return abs({a} - {k})"),
    _task("branch", "number", ("grow_or_reset_{k}", "step_{k}"),
          ("Return {a} plus 1 if {a} is less than {k}, else 0.", "Add 1 to {a} while it is below {k}, else return 0."),
          "if {a} < {k}:", "    return {a} + 1", "return 0"),
    _task("square-add", "number", ("square_plus_{k}", "squared_and_{k}"),
          ("Return the square of {a} plus {k}.", "Square {a} and add {k}."), "return {a} * {a} + {k}"),
    _task("first", "list", ("first_{k}", "take_{k}"),
          ("Return the first {k} elements of {a}.", "Take {k} elements from the start of {a}."),
          "return {a}[:{k}]", numbers=(1, 60)),
    _task("skip", "list", ("skip_{k}", "drop_{k}"),
          ("Return {a} without the first {k} elements.", "Drop {k} elements from the start of {a}."),
          "return {a}[{k}:]", numbers=(1, 60)),
    _task("filter-greater", "list", ("keep_above_{k}", "larger_than_{k}"),
          ("Return the elements of {a} that are greater than {k}.", "Keep only values of {a} above {k}."),
          "return [x for x in {a} if x > {k}]"),
    _task("map-add", "list", ("add_{k}_to_all", "shift_by_{k}"),
          ("Add {k} to every element of {a}.", "Return a list with {k} added to each element of {a}."),
          "return [x + {k} for x in {a}]"),
    _task("map-times", "list", ("multiply_all_by_{k}", "scale_list_{k}"),
          ("Multiply every element of {a} by {k}.", "Return a list of the elements of {a} times {k}."),
          "return [x * {k} for x in {a}]"),
    _task("count-value", "list", ("count_{k}", "how_many_{k}"),
          ("Count how often {k} occurs in {a}.", "Return the number of times {k} is in {a}."),
          "return {a}.count({k})"),
    _task("contains", "list", ("has_{k}", "contains_{k}"),
          ("Return True if {k} is in {a}.", "Tell whether {a} contains {k}."), "return {k} in {a}"),
    _task("sum-above", "list", ("sum_above_{k}", "total_over_{k}"),
          ("Return the sum of all elements of {a} above {k}.", "Add up the elements of {a} that are more than {k}."),
          "total = 0", "for x in {a}:", "    if x > {k}:", "        total += x", "return total"),
    _task("repeat", "text", ("repeat_{k}", "copy_{k}_times"),
          ("Return {a} repeated {k} times.", "Repeat {a} {k} times."), "return {a} * {k}", numbers=(2, 60)),
    _task("count-letter", "text", ("count_{c}", "number_of_{c}"),
          ("Count the letter {c} in {a}.", "Return how many times {c} occurs in {a}."), "return {a}.count('{c}')"),
    _task("ends", "text", ("ends_with_{c}", "last_is_{c}"),
          ("Return True if {a} ends with {c}.", "Tell whether the last letter of {a} is {c}."),
          "return {a}.endswith('{c}')"),
    _task("remove-letter", "text", ("remove_{c}", "without_{c}"),
          ("Return {a} without the letter {c}.", "Remove every {c} from {a}."), "return {a}.replace('{c}', '')"),
)  # fmt: skip
