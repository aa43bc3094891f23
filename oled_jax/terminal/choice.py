"""`--stream` and `--visualize`: which display a run gets."""

import argparse
import sys

from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.report import STDOUT
from oled_jax.terminal.status import Status
from oled_jax.terminal.stream import BlockStream, Display, Nothing
from oled_jax.text import TextCodec


def add_display_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("terminal")
    group.add_argument("--stream", action="store_true", help="print each block as soon as it is final")
    group.add_argument(
        "--visualize",
        action="store_true",
        help="show the denoising on standard error: masks, how sure each token is, edits; one line per pass where "
        "that is no terminal",
    )


def check_display_flags(options: argparse.Namespace) -> None:
    """Raises UsageError for contradictions; needs no model."""
    if options.stream and options.visualize:
        raise UsageError("--stream and --visualize are two displays: give one")
    if options.stream and options.stats_json == STDOUT:
        raise UsageError("--stream has no effect with --stats-json -: standard output holds the statistics alone")
    for name in ("stream", "visualize"):
        if getattr(options, name) and options.prompt_file is not None:
            raise UsageError(f"--{name} has no effect with --prompt-file: each answer is printed when it is whole")


def make_display(
    options: argparse.Namespace, engine: Engine, codec: TextCodec, *, mask_id: int, prompt_length: int
) -> Display:
    """The display that the flags ask for. A prompt of ids is answered in ids.

    Args:
      mask_id, prompt_length: of the run, of its only prompt.
    """
    readable = codec if codec.available and options.prompt_ids is None else None
    if options.stream:
        return BlockStream(sys.stdout, readable, Status(engine.statistics))
    if options.visualize:
        from oled_jax.terminal.denoising import Denoising  # rich is imported where it is needed

        return Denoising(readable, mask_id, prompt_length, Status(engine.statistics))
    return Nothing()
