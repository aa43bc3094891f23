"""`python -m oled_jax.bench NAME`: hands the remaining words to the bench of that name."""

import sys
from collections.abc import Callable, Mapping, Sequence

from oled_jax.bench import accuracy, speed, startup
from oled_jax.bench.paper import command as paper
from oled_jax.cli import run_command
from oled_jax.errors import UsageError

NAME = "oled_jax.bench"
# name: (what it measures, the command)
BENCHES: Mapping[str, tuple[str, Callable[[Sequence[str]], None]]] = {
    "accuracy": (accuracy.SUMMARY, accuracy.command),
    "paper": (paper.SUMMARY, paper.command),
    "speed": (speed.SUMMARY, speed.command),
    "startup": (startup.SUMMARY, startup.command),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a bench; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _dispatch, argv)


def _dispatch(argv: Sequence[str] | None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: python -m {NAME} NAME [flags]\n")
        for name, (summary, _) in BENCHES.items():
            print(f"  {name:12} {summary}")
        return
    if words[0] not in BENCHES:
        raise UsageError(f"there is no bench {words[0]!r}, there are: {', '.join(BENCHES)}")
    BENCHES[words[0]][1](words[1:])


if __name__ == "__main__":
    sys.exit(main())
