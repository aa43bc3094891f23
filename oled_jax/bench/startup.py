"""`python -m oled_jax.bench startup`: from the start of a process to the first token, step by step.

Two processes with random weights of a published size run after each other. They share a folder for compiled programs,
empty before the first, so the first start is cold and the second warm. Seconds that weights take are told apart.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import jax
import numpy as np

from oled_jax import generate  # noqa: F401  what a user's command imports is part of its start
from oled_jax.bench.bed import Case, TestBed, fitting_layers
from oled_jax.cli import CommandParser, whole_number
from oled_jax.config import DecodingConfig
from oled_jax.decode.events import PassEvent
from oled_jax.errors import UsageError
from oled_jax.machine import CACHE_VARIABLE, describe_machine, prepare_runtime, process_age_s, use_compilation_cache
from oled_jax.memory import store_bytes
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf, family_named
from oled_jax.offload.carriers.registry import AUTO, MOVERS
from oled_jax.report import STDOUT, check_json_target, write_json

SUMMARY = "seconds from the start of a process to the first token, with cold and warm compilation cache"
# Seconds of each step, in order. `weights`: made, pinned and moved; a checkpoint of that size is read instead.
# `first_token`: programs compiled or found and loaded, the prompt's pass and the first pass over the block.
STEPS = ("imports", "device", "weights", "engine", "first_token")
CACHE_EVENTS = {
    "/jax/compilation_cache/cache_hits": "programs_found",
    "/jax/compilation_cache/cache_misses": "compiled",
}


def build_parser() -> CommandParser:
    """The flags; defaults are those of docs/performance.md."""
    parser = CommandParser(prog="python -m oled_jax.bench startup", description=SUMMARY)
    parser.add_argument("--size", choices=PUBLISHED, default="llada2-mini")
    parser.add_argument("--layers", type=whole_number(2), help="use only this many layers (default: as many as fit)")
    parser.add_argument("--block-length", type=whole_number(1), default=32)
    parser.add_argument("--prompt-tokens", type=whole_number(1), default=128)
    parser.add_argument("--expert-cache", type=whole_number(1), default=40)
    parser.add_argument("--policy", default="oled:dispatch=gpu", help="POLICY@BACKEND uses a CPU expert backend")
    parser.add_argument("--carrier", choices=(AUTO, *MOVERS), default=AUTO)
    parser.add_argument("--once", action="store_true", help="this process, with the compilation cache as it is")
    parser.add_argument("--json", metavar="FILE|-")
    return parser


def command(argv: Sequence[str]) -> None:
    """Runs the bench and prints its table."""
    options = build_parser().parse(argv)
    check_json_target(options.json)
    if options.once:
        starts = [_start(options) | {"start": "this process"}]
    else:
        with tempfile.TemporaryDirectory(prefix="oled_jax_programs_") as folder:
            starts = [_child(argv, folder) | {"start": name} for name in ("cold", "warm")]
    report = {
        "version": 1,
        "bench": "startup",
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "settings": vars(options),
        "starts": starts,
    }
    if options.json is not None:
        write_json(report, options.json)
    if options.json == STDOUT:
        return
    columns = ("start", *(f"{step}_s" for step in STEPS), "without_weights_s", *CACHE_EVENTS.values())
    print(" | ".join(columns))
    for start in starts:
        print(" | ".join(f"{start[name]:.2f}" if name.endswith("_s") else str(start[name]) for name in columns))


def _child(argv: Sequence[str], folder: str) -> dict[str, Any]:
    """One start in a process of its own. Raises UsageError if it fails, which it has explained."""
    words = [sys.executable, "-m", "oled_jax.bench", "startup", *argv, "--once", "--json", STDOUT]
    # As this process was: with `python -P` the installed package, not sources in the working directory.
    environment = os.environ | {CACHE_VARIABLE: folder} | ({"PYTHONSAFEPATH": "1"} if sys.flags.safe_path else {})
    ended = subprocess.run(words, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if ended.returncode:
        raise UsageError(f"the process that was to start ended with code {ended.returncode}")
    (start,) = json.loads(ended.stdout)["starts"]
    return dict(start)


def _start(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each step of this process, which must have done nothing before."""
    ends = [process_age_s()]
    cached = _count_programs()
    config = config_from_hf(PUBLISHED[options.size])
    config = dataclasses.replace(config, num_hidden_layers=options.layers or fitting_layers(config))
    prepare_runtime(store_bytes(config))
    use_compilation_cache()
    device = jax.local_devices()[0]
    ends.append(process_age_s())
    bed = TestBed(config)
    ends.append(process_age_s())
    case = Case.parse(options.policy, capacity=options.expert_cache, carrier=options.carrier, threads=None)
    family, length = family_named(config.family), options.block_length
    decoding = DecodingConfig(
        mask_id=family.default_mask_id, eos_id=family.default_eos_id,
        gen_length=length, block_length=length, steps=1,
    )  # fmt: skip
    with bed.engine(case) as engine:
        ends.append(process_age_s())
        events = engine.stream([[1] * options.prompt_tokens], decoding)
        next(event for event in events if isinstance(event, PassEvent))
        ends.append(process_age_s())
    seconds = np.diff([0.0, *ends]).tolist()
    found = {f"{step}_s": taken for step, taken in zip(STEPS, seconds, strict=True)}
    return {
        "layers": config.num_hidden_layers,
        **found,
        "without_weights_s": ends[-1] - found["weights_s"],
        **cached,
        "machine": describe_machine(device),
    }


def _count_programs() -> dict[str, int]:
    """Programs that this process finds compiled and that it compiles, by the names of `CACHE_EVENTS`, from now on."""
    cached = dict.fromkeys(CACHE_EVENTS.values(), 0)

    def count(event: str, **_: Any) -> None:
        if event in CACHE_EVENTS:
            cached[CACHE_EVENTS[event]] += 1

    jax.monitoring.register_event_listener(count)
    return cached
