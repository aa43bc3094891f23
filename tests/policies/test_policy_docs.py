"""The pages in docs/policies name every policy, every option and its default."""

import dataclasses
import re
from pathlib import Path

import pytest

from oled_jax.policies.registry import POLICIES

DOCS = Path(__file__).parents[2] / "docs" / "policies"
INDEX = (DOCS / "README.md").read_text()


def page_of(name):
    row = next(line for line in INDEX.splitlines() if line.startswith(f"| `{name}` |"))
    link = re.search(r"\((.+\.md)\)", row)
    return link and (DOCS / link[1]).read_text()


def test_the_index_lists_the_registry_in_its_order():
    assert re.findall(r"^\| `([a-z+-]+)` \|", INDEX, re.MULTILINE) == list(POLICIES)


@pytest.mark.parametrize("name", [name for name, entry in POLICIES.items() if not entry.is_reference])
def test_the_page_has_every_option_with_its_default(name):
    page = page_of(name)
    assert all(word in page for word in ("**Keeps.**", "**Moves.**", "**Source.**", "prefill"))
    for field in dataclasses.fields(POLICIES[name].options):
        default = "auto" if field.default is None else field.default
        shown = f"`{default}`" if isinstance(default, str) else str(default)
        assert re.search(rf"^\| `{field.name}` \| {re.escape(shown)} \|", page, re.MULTILINE), field.name
