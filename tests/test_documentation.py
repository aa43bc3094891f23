"""Documents agree with the code where a machine can tell: links, flags, module names, the Python example."""

import re
from pathlib import Path

import pytest

from oled_jax.generate import build_parser
from oled_jax.machine import MEMORY_FRACTION_VARIABLE

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def known_flags() -> set[str]:
    return {flag for action in build_parser()._actions for flag in action.option_strings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#:\s]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_flags_that_the_readme_explains_exist():
    table = (ROOT / "README.md").read_text(encoding="utf-8").split("## Flags")[1].split("\n## ")[0]
    named = set(re.findall(r"--[a-z][a-z-]+", table))
    assert len(named) > 20
    assert named - known_flags() == set()


def test_modules_that_the_design_names_exist():
    table = (ROOT / "docs" / "design.md").read_text(encoding="utf-8").split("## Rooms")[1].split("\n## ")[0]
    named = [name for line in table.splitlines() if line.startswith("| `") for name in _names(line)]
    assert len(named) > 40
    assert [name for name in named if not (ROOT / "oled_jax" / name).exists()] == []


def _names(line: str) -> list[str]:
    """Paths in the first cell; a bare name after one with a folder is in that folder."""
    names = re.findall(r"`([^`]+)`", line.split("|")[1])
    folder = names[0].rpartition("/")[0]
    return [name if "/" in name or not folder else f"{folder}/{name}" for name in names]


@pytest.mark.slow
def test_the_python_example_runs(monkeypatch, capsys):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")  # that opening a model sets it ends with the test
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.S)
    exec(example, {})
    first, second, same, hit_rate = capsys.readouterr().out.splitlines()
    assert first == "eos The capital of Norway is Oslo."
    assert second == "First, 88 - 4 = 84. Then 84 + 47 = 131. Answer: 131 eos"
    assert same == "True"
    assert 0 < float(hit_rate) <= 1
