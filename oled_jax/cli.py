"""What all commands share: groups of flags, the one place that turns errors into exit codes, and notes.

Standard output belongs to a command's result; everything said here goes to standard error.
"""

import argparse
import contextlib
import io
import math
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from oled_jax.config import DTYPES, DecodingConfig
from oled_jax.decode.registry import RULES
from oled_jax.decoding_options import decoding_for
from oled_jax.errors import UsageError
from oled_jax.loading import CPU_OFF, CacheOptions, OpenedModel
from oled_jax.models.registry import FAMILIES, decoding_modes
from oled_jax.offload.carriers.registry import AUTO as CARRIER_AUTO
from oled_jax.offload.carriers.registry import MOVERS
from oled_jax.offload.cpu_experts.registry import AUTO, BACKENDS

EXIT_FAILURE, EXIT_USAGE, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"  # how XLA begins the message of a failed allocation


class CommandParser(argparse.ArgumentParser):
    """An argument parser whose errors are `UsageError`s and whose flags may be spelled with underscores."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def parse(self, argv: Sequence[str] | None) -> argparse.Namespace:
        """Parses these words, or the process's own. Raises UsageError (`--help` and `--version` exit)."""
        given = sys.argv[1:] if argv is None else argv
        return self.parse_args([_with_hyphens(word) for word in given])

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _with_hyphens(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def run_command(name: str, command: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None) -> int:
    """Runs a command and returns its exit code.

    0; 1 if memory ran out; 2 for a user's mistake (one line on standard error); 130 after Ctrl-C; 141 if
    nobody reads standard output any more. Every other exception is a defect and passes through.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            command(argv)
            sys.stdout.flush()
    except UsageError as error:
        return _fail(name, str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _fail(name, "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and OUT_OF_MEMORY not in str(error):
            raise
        reason = (str(error).splitlines() or ["no more host memory"])[0]
        return _fail(name, f"memory ran out: lower --expert-cache or --gen-length ({reason})", EXIT_FAILURE)
    return 0


def _fail(name: str, message: str, code: int) -> int:
    print(f"{name}: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {message}", file=sys.stderr)


def _discard_output() -> None:
    """Points standard output at nothing, or the interpreter would complain when it flushes at exit."""
    with contextlib.suppress(io.UnsupportedOperation, AttributeError), open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), sys.stdout.fileno())


def note(text: str) -> None:
    """One line for the user that is no part of the result."""
    print(text, file=sys.stderr)


def whole_number(least: int, most: int | None = None) -> Callable[[str], int]:
    """An argparse type that names the allowed range."""
    allowed = f"at least {least}" if most is None else f"from {least} to {most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, it must be {allowed}") from None
        if value < least or (most is not None and value > most):
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {allowed}")
        return value

    return parse


def number(least: float, most: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argparse type that names the allowed range. above: `least` itself is not allowed."""
    allowed = f"{'above' if above else 'at least'} {least:g}"
    allowed += "" if most == math.inf else f" and at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number, it must be {allowed}") from None
        if not least <= value <= most or value == math.inf or (above and value == least):
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {allowed}")
        return value

    return parse


def optional_number(least: float, most: float) -> Callable[[str], float | None]:
    """Like `number`; the word none gives None."""
    parse_number = number(least, most)

    def parse(text: str) -> float | None:
        return None if text.lower() == "none" else parse_number(text)

    return parse


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="DIR_OR_HUB_ID",
        help="directory (Hugging Face or converted) or hub id (org/name); without it, the small model in the package",
    )
    group.add_argument("--dtype", choices=DTYPES, help="dtype of all weights (default: the checkpoint's)")
    group.add_argument(
        "--family",
        choices=[family.name for family in FAMILIES],
        help="decode as this family does, where config.json does not say: llada21 for a LLaDA2.1 checkpoint whose "
        "model_type is llada2_moe (default: by model_type)",
    )


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("expert cache")
    group.add_argument(
        "--expert-cache",
        metavar="N|auto|all",
        help="experts per MoE layer in device memory, on average; auto: as many as fit (default: auto)",
    )
    group.add_argument(
        "--expert-cache-gb",
        type=number(0.0, above=True),
        metavar="GB",
        help="device memory for experts instead, 10^9 bytes, spare slots included",
    )
    group.add_argument(
        "--policy",
        default="oled",
        metavar="NAME[:OPTION=VALUE...]",
        help="cache policy (default: oled); list: show them; all: keep every expert resident",
    )
    group.add_argument(
        "--cpu-experts",
        choices=(CPU_OFF, AUTO, *BACKENDS),
        help="what computes the misses that a policy leaves to the CPU; auto: the fastest by a short "
        "measurement (default: auto with a GPU or a policy that needs it, else off)",
    )
    group.add_argument(
        "--cpu-threads",
        type=whole_number(1),
        metavar="N",
        help="worker threads of the CPU experts (default: physical cores minus two)",
    )
    add_carrier_flag(group)


def add_carrier_flag(group: argparse._ActionsContainer) -> None:
    """`--carrier`; None: the user said nothing."""
    group.add_argument(
        "--carrier",
        choices=(CARRIER_AUTO, *MOVERS),
        help="what brings plans and pages to the device; auto: native where the extension is "
        "built, else portable (default: auto)",
    )


def cache_options(options: argparse.Namespace) -> CacheOptions:
    """The flags of `add_cache_flags`. Raises UsageError for contradictions and impossible values."""
    return CacheOptions.parse(
        options.policy,
        options.expert_cache,
        options.expert_cache_gb,
        cpu_experts=options.cpu_experts,
        cpu_threads=options.cpu_threads,
        carrier=options.carrier,
    )


def add_decoding_flags(parser: argparse.ArgumentParser) -> None:
    """Flags named like the fields of `DecodingConfig`. The namespace holds only those that were given."""
    group = parser.add_argument_group(
        "decoding", "Defaults: generation_config.json, else what the model card of the family recommends."
    )

    def add(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **options)

    add("--gen-length", "--max-new-tokens", dest="gen_length", type=whole_number(1), metavar="N",
        help="tokens to generate at most")  # fmt: skip
    add("--block-length", type=whole_number(1), metavar="N", help="positions denoised together")
    add("--rule", choices=tuple(RULES), help="which tokens a pass writes, of those that the model's family knows")
    add("--steps", type=whole_number(1), metavar="N",
        help="schedule: passes per block at most, per text (RND1); not LLaDA2.1")  # fmt: skip
    add("--mode", choices=decoding_modes(),
        help="thresholds by name (LLaDA2.1): quality: 0.7, editing 0.5; speed: 0.5, editing 0.0; "
        "--threshold and --editing-threshold go before")  # fmt: skip
    add("--threshold", type=number(0.0, 1.0), metavar="P", help="confidence above which a mask is filled")
    add("--editing-threshold", type=optional_number(0.0, 1.0), metavar="P|none",
        help="confidence above which a token is revised (LLaDA2.1)")  # fmt: skip
    add("--max-post-steps", type=whole_number(0), metavar="N",
        help="passes over a full block at most (LLaDA2.1)")  # fmt: skip
    add("--entropy-bound", type=number(0.0), metavar="NATS",
        help="joint uncertainty of tokens that are written together (rule entropy-bound)")  # fmt: skip
    add("--temperature", type=number(0.0), metavar="T", help="0: greedy")
    add("--top-k", type=whole_number(0), metavar="K", help="sample among the K likeliest tokens, 0: all")
    add(
        "--top-p",
        type=number(0.0, 1.0, above=True),
        metavar="P",
        help="sample among the likeliest tokens up to P",
    )
    add("--seed", type=whole_number(0, 2**32 - 1), metavar="N", help="of the random numbers")
    add(
        "--eos-early-stop",
        action=argparse.BooleanOptionalAction,
        help="stop inside a block once eos is final",
    )
    add(
        "--fold-commits",
        action=argparse.BooleanOptionalAction,
        help="store a finished block's keys and values in the next block's first pass (default: on a GPU; not RND1)",
    )
    add(
        "--pad-id", type=whole_number(0), metavar="ID", help="token behind the answer (RND1; default: the checkpoint's)"
    )
    group.add_argument("--mask-id", type=whole_number(0), metavar="ID", help="mask token (default: the checkpoint's)")
    group.add_argument(
        "--eos-id",
        type=whole_number(-1),
        metavar="ID",
        help="end token, -1: none (default: the checkpoint's)",
    )


def decoding_options(options: argparse.Namespace, model: OpenedModel) -> DecodingConfig:
    """What the flags of `add_decoding_flags` and the checkpoint say together. Raises UsageError for idle flags."""
    decoding, notes = decoding_for(model, vars(options))
    for sentence in notes:
        note(f"note: {sentence}")
    return decoding
