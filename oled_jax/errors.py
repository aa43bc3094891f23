"""The errors that users meet. One module, so that every command treats them alike."""

from collections.abc import Sequence


class UsageError(ValueError):
    """A caller's mistake. Commands print it as one line and exit with code 2."""


class CheckpointError(UsageError):
    """A checkpoint that cannot be used.

    Args:
      source: the directory or file that was read.
      problems: every problem found, in reading order, not only the first.
    """

    def __init__(self, source: str, problems: Sequence[str]):
        self.source = source
        self.problems = list(problems)
        shown = "; ".join(self.problems)
        count = f"{len(self.problems)} problems: " if len(self.problems) > 1 else ""
        super().__init__(f"{source}: {count}{shown}")


class PolicyError(RuntimeError):
    """A cache policy broke a rule of the engine. The message names the policy and the rule."""
