"""Runs a small function that a model wrote: no imports, few builtins, a process of its own with limits.

Good against accidents (endless loops, memory) and against text that reaches for the system. It is no security
boundary for hostile code.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

SECONDS = 5.0
ALLOWED_BUILTINS = (
    "abs", "all", "any", "bool", "dict", "divmod", "enumerate", "float", "int", "len", "list", "map", "max",
    "min", "range", "reversed", "round", "set", "sorted", "str", "sum", "tuple", "zip", "True", "False", "None",
)  # fmt: skip
FORBIDDEN = (ast.Import, ast.ImportFrom, ast.Global, ast.Nonlocal, ast.AsyncFunctionDef, ast.Await)
RUNNER = """
import builtins, json, resource, sys
job = json.load(sys.stdin)
resource.setrlimit(resource.RLIMIT_CPU, (2, 2))
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
names = [name for name in job["builtins"] if hasattr(builtins, name)]
scope = {"__builtins__": {name: getattr(builtins, name) for name in names}}
exec(compile(job["source"], "answer", "exec"), scope)
json.dump([scope[job["function"]](value) for value in job["inputs"]], sys.stdout)
"""


def run_function(source: str, function: str, inputs: Sequence[Any]) -> list[Any] | None:
    """What `function` of `source` returns for each input, as JSON would hold it.

    Returns:
      None if the source is not allowed, does not define the function, raises, or does not end in time.
    """
    if not _is_allowed(source):
        return None
    job = {"source": source, "function": function, "inputs": list(inputs), "builtins": ALLOWED_BUILTINS}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", RUNNER],
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, json.JSONDecodeError):
        return None


def _is_allowed(source: str) -> bool:
    """One or more function definitions and nothing else that could act; no names with two underscores."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    if not tree.body or not all(isinstance(node, ast.FunctionDef) for node in tree.body):
        return False
    for node in ast.walk(tree):
        if isinstance(node, FORBIDDEN):
            return False
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if "__" in name or name in ("format", "format_map"):
            return False
    return True
