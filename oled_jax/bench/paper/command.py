"""`python -m oled_jax.bench paper`: flags, the subject, one figure after the other. Wiring only."""

import argparse
import dataclasses
import os
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

import oled_jax
from oled_jax.bench.paper.checkpoint import CheckpointSubject
from oled_jax.bench.paper.estimates import Estimates
from oled_jax.bench.paper.published import NAMES, published_subject
from oled_jax.bench.paper.registry import BY_NUMBER, FIGURES, PaperFigure
from oled_jax.bench.paper.study import Study
from oled_jax.bench.paper.subject import WARM_UP, RunSettings, Subject
from oled_jax.bench.paper.writers import summary_lines, write_figure
from oled_jax.cli import CommandParser, add_carrier_flag, note, whole_number
from oled_jax.demo.shipped import LABEL
from oled_jax.errors import UsageError
from oled_jax.figures import check_plots
from oled_jax.loading import open_model
from oled_jax.machine import describe_machine, use_compilation_cache
from oled_jax.memory import page_bytes
from oled_jax.offload.carriers.registry import AUTO as CARRIER_AUTO
from oled_jax.offload.cpu_experts.registry import AUTO, BACKENDS

SUMMARY = "counterparts of the OLED-MoE paper's figures, as JSON, CSV and PNG"
REPEATS, QUICK_REPEATS = 3, 1
REQUESTS, QUICK_REQUESTS = 2, 1
DEFAULT_OUT = Path("paper")


def build_parser() -> CommandParser:
    """The flags."""
    parser = CommandParser(prog="python -m oled_jax.bench paper", description=SUMMARY)
    numbers = ", ".join(map(str, sorted(BY_NUMBER)))
    parser.add_argument(
        "--figure", type=whole_number(1), action="append", metavar="N",
        help=f"only this one of the paper's figures ({numbers}); may be given again",
    )  # fmt: skip
    parser.add_argument(
        "--model", default=LABEL, metavar=f"{LABEL}|DIR|{'|'.join(NAMES)}",
        help="the model in the package, a checkpoint, or a published size with random weights (default: demo)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="less of everything: to see that it works")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="where to write (default: paper)")
    parser.add_argument(
        "--profile", type=Path, action="append", default=[], metavar="JSON",
        help="hardware profile for estimates (python -m oled_jax.profile --json); one for each size of pages",
    )  # fmt: skip
    parser.add_argument(
        "--repeats",
        type=whole_number(1),
        metavar="N",
        help=f"default: {REPEATS}, quick: {QUICK_REPEATS}",
    )
    parser.add_argument(
        "--requests", type=whole_number(1), metavar="N",
        help=f"measured in every run, after {WARM_UP} (default: {REQUESTS}; quick or synthetic: {QUICK_REQUESTS})",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=whole_number(1), metavar="N",
        help="of a random model, its dense ones included (default: as many as memory holds)",
    )  # fmt: skip
    parser.add_argument("--cpu-experts", choices=(AUTO, *BACKENDS), default=AUTO, help="backend of misses on the CPU")
    parser.add_argument("--cpu-threads", type=whole_number(1), metavar="N", help="its threads")
    add_carrier_flag(parser)
    return parser


def command(argv: Sequence[str]) -> None:
    """Makes the figures. Raises UsageError for bad flags and for what does not fit."""
    options = build_parser().parse(argv)
    figures = _chosen(options.figure)
    check_plots(options.out)
    subject = _subject(options)
    study = Study(subject=subject, estimates=Estimates(subject, options.profile, is_demo=options.model == LABEL))
    if not study.capacities:
        raise UsageError(f"--model {options.model}: the device has no room for any of the paper's capacities")
    use_compilation_cache()
    note(subject.description)
    for figure in figures:
        _make(figure, study, options)


def _chosen(numbers: Sequence[int] | None) -> list[PaperFigure]:
    """In the order of the paper."""
    unknown = [number for number in numbers or () if number not in BY_NUMBER]
    if unknown:
        known = ", ".join(map(str, sorted(BY_NUMBER)))
        raise UsageError(f"--figure {unknown[0]}: there are counterparts of figures {known}")
    return [figure for figure in FIGURES if numbers is None or set(figure.numbers) & set(numbers)]


def _subject(options: argparse.Namespace) -> Subject:
    quick = options.quick
    settings = RunSettings(
        repeats=options.repeats or (QUICK_REPEATS if quick else REPEATS),
        requests=options.requests or (QUICK_REQUESTS if quick or options.model in NAMES else REQUESTS),
        backend=options.cpu_experts,
        threads=options.cpu_threads,
        carrier=options.carrier or CARRIER_AUTO,
        quick=quick,
    )
    if options.model in NAMES:
        return published_subject(options.model, settings, options.layers)
    if options.layers is not None:
        raise UsageError(
            f"--layers: --model {options.model} has its own layers; only {' and '.join(NAMES)} take a number"
        )
    return CheckpointSubject(open_model(None if options.model == LABEL else options.model), settings)


def _make(figure: PaperFigure, study: Study, options: argparse.Namespace) -> None:
    started, load = time.monotonic(), os.getloadavg()
    findings = figure.make(study)
    device = jax.local_devices()[0]
    described = {
        "version": oled_jax.__version__,
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": time.monotonic() - started,
        "machine": describe_machine(device),
        "load_average": list(load),
        "subject": _described(study.subject),
        "settings": _settings(study, options),
        "estimated_with": study.estimates.origins,
    }
    label = f"{study.subject.label}, {device.device_kind}"
    for path in write_figure(figure, findings, described, options.out, label):
        note(f"wrote {path}")
    print(f"figure {' and '.join(map(str, figure.numbers))}: {figure.here}")
    for line in summary_lines(findings):
        print(line, flush=True)


def _described(subject: Subject) -> dict[str, Any]:
    config = subject.config
    return {
        "label": subject.label,
        "description": subject.description,
        "num_moe_layers": config.num_moe_layers,
        "num_experts": config.num_experts,
        "top_k": config.num_experts_per_tok,
        "page_bytes": page_bytes(config),
        "dtype": config.dtype,
        "block_length": subject.block_length,
    }


def _settings(study: Study, options: argparse.Namespace) -> dict[str, Any]:
    """What it takes to make the figure again."""
    return {
        **dataclasses.asdict(study.subject.settings),
        "model": options.model,
        "layers": options.layers,
        "warm_up_batches": WARM_UP,
        "profiles": [str(path) for path in options.profile],
        "decoding": study.subject.decoding_settings(),
        "works": {work.workload: study.subject.described_work(work) for work in study.works},
    }
