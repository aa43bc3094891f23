"""`python -m oled_jax.profile`: what moving and computing a page costs on this machine. Wiring only."""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

import oled_jax
from oled_jax.cli import CommandParser, add_carrier_flag, note, run_command, whole_number
from oled_jax.config import DTYPES, ModelConfig
from oled_jax.cost.cache import save_profile
from oled_jax.cost.measure import measure_full, profile_key
from oled_jax.cost.profile import HardwareProfile
from oled_jax.cost.table import profile_table
from oled_jax.errors import UsageError
from oled_jax.loading import open_model
from oled_jax.machine import prepare_runtime, use_compilation_cache
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf
from oled_jax.offload.cpu_experts.registry import AUTO, BACKENDS
from oled_jax.report import STDOUT, check_json_target, write_json

NAME = "oled_jax.profile"
DEFAULT_SIZE = "llada2-mini"


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(
        prog=f"python -m {NAME}",
        description="Measures transfers, CPU experts and the device's expert FFN for pages of one size, prints a "
        "table, and saves the profile for oled_jax.generate. No weights are read.",
    )
    parser.add_argument("--version", action="version", version=oled_jax.__version__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", metavar="DIR_OR_HUB_ID", help="pages of the size that this checkpoint has")
    size.add_argument(
        "--size",
        choices=PUBLISHED,
        help=f"pages of the size that a published checkpoint has (default: {DEFAULT_SIZE})",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the pages (default: the checkpoint's)")
    parser.add_argument(
        "--cpu-experts",
        choices=(AUTO, *BACKENDS),
        default=AUTO,
        help="backend of the CPU experts; auto: the fastest by a short measurement (default: auto)",
    )
    parser.add_argument(
        "--cpu-threads",
        type=whole_number(1),
        metavar="N",
        help="its worker threads (default: physical cores minus two)",
    )
    add_carrier_flag(parser)
    parser.add_argument("--json", metavar="FILE|-", help="write the profile; with - standard output holds nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _profile, argv)


def _profile(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    check_json_target(options.json)
    config = _config(options)
    use_compilation_cache()
    profile = measure_full(profile_key(config, options.cpu_experts, options.cpu_threads, options.carrier or AUTO), note)
    if options.json != STDOUT:
        print(profile_table(profile), flush=True)
    if options.json is not None:
        write_json(profile.as_json(), options.json)
    _save(profile)


def _config(options: argparse.Namespace) -> ModelConfig:
    """The model whose pages are measured; JAX is prepared for it."""
    if options.model is not None:
        config = open_model(options.model, options.dtype).config
        if config.num_moe_layers == 0:
            raise UsageError(f"model {options.model} has no routed experts: it has no pages to measure")
        return config
    config = config_from_hf(PUBLISHED[options.size or DEFAULT_SIZE])
    prepare_runtime(0)  # the scratch pages fit into what may be pinned anyway
    return dataclasses.replace(config, dtype=options.dtype or config.dtype)


def _save(profile: HardwareProfile) -> None:
    """For runs that ask for the same backend, and for those that name the one that auto chose."""
    for backend in sorted({profile.key.backend, profile.backend}):
        key = dataclasses.replace(profile.key, backend=backend)
        path = save_profile(dataclasses.replace(profile, key=key))
        if path is None:
            return
        note(f"saved for --cpu-experts {backend}: {path}")
    note(f"measured in {profile.seconds:.1f} s")


if __name__ == "__main__":
    sys.exit(main())
