"""`python -m oled_jax.traces synth|locality`: synthetic routing traces; how local any are. Wiring only."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import oled_jax
from oled_jax.cli import CommandParser, note, number, run_command, whole_number
from oled_jax.config import DTYPES
from oled_jax.errors import UsageError
from oled_jax.figures import check_plots
from oled_jax.memory import format_bytes
from oled_jax.models.published import PUBLISHED
from oled_jax.report import STDOUT, check_json_target, write_json
from oled_jax.traces.files import TraceWriter, check_trace_target, open_trace
from oled_jax.traces.locality import Locality
from oled_jax.traces.locality_meter import LocalityMeter, measure_locality
from oled_jax.traces.plots import write_plots
from oled_jax.traces.spec import SyntheticSpec, Targets, make_spec
from oled_jax.traces.synthetic import compare, synthesise
from oled_jax.traces.tables import locality_table, targets_table

NAME = "oled_jax.traces"
SYNTH, LOCALITY = "synth", "locality"


def build_parser() -> CommandParser:
    """The flags of both commands."""
    parser = CommandParser(
        prog=f"python -m {NAME}", description="Routing traces: making synthetic ones, looking at any."
    )
    parser.add_argument("--version", action="version", version=oled_jax.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="synth|locality")
    _add_synth_flags(commands.add_parser(SYNTH, help="write a synthetic trace", description=_SYNTH))
    _add_locality_flags(commands.add_parser(LOCALITY, help="say how local traces are", description=_LOCALITY))
    return parser


_SYNTH = "Writes a synthetic routing trace with set locality, and prints what it achieved (docs/locality.md)."
_LOCALITY = "Prints how local the routing of one or several traces is (docs/locality.md). Files of any size."


def _add_synth_flags(parser: argparse.ArgumentParser) -> None:
    """Flags named like the fields of `SyntheticSpec` and `Targets`. The namespace holds only those that were given."""

    def add(group: Any, flag: str, kind: Any, metavar: str, text: str, **options: Any) -> None:
        group.add_argument(flag, type=kind, metavar=metavar, help=text, default=argparse.SUPPRESS, **options)

    shape = parser.add_argument_group("shape", "Flags beside a preset replace what it says.")
    shape.add_argument("--preset", choices=tuple(PUBLISHED), help="shape and targets of a published model")
    add(shape, "--layers", whole_number(1), "L", "MoE layers", dest="num_layers")
    add(shape, "--experts", whole_number(1), "E", "experts per layer", dest="num_experts")
    add(shape, "--top-k", whole_number(1), "K", "experts per token")
    add(shape, "--block-length", whole_number(1), "T", "positions denoised together (default: 32)")
    add(shape, "--hidden-size", whole_number(1), "D", "of an expert (default: 2048)")
    add(shape, "--moe-intermediate-size", whole_number(1), "F", "of an expert (default: 512)")
    shape.add_argument("--dtype", choices=DTYPES, default=argparse.SUPPRESS, help="of an expert (default: bfloat16)")
    add(shape, "--vocab-size", whole_number(2), "V", "token ids, by Zipf's law (default: the preset's, or 8192)")
    add(shape, "--routed-scaling-factor", number(0.0, above=True), "S", "sum of a token's gates (default: 2.5)")
    length = parser.add_argument_group("length")
    add(length, "--iterations", whole_number(1), "N", "denoise passes after which the trace ends (default: 500)")
    add(length, "--requests", whole_number(1), "N", "whole requests, instead of --iterations")
    add(length, "--prompt-tokens", whole_number(0), "P", "prompt of each request (default: 64)")
    add(length, "--blocks", whole_number(1), "N", "generated blocks of each request (default: 8)")
    add(length, "--tokens-per-iteration", number(1.0), "X", "masks that a denoise pass fills, on average (default: 3)")
    targets = parser.add_argument_group("targets")
    add(targets, "--distinct-experts", number(1.0), "X", "activated by an iteration (default: as published, or usual)")
    share = number(0.0, 1.0)
    add(targets, "--adjacent-overlap", share, "X", "with the iteration before (default: 0.87)")
    add(targets, "--boundary-overlap", share, "X", "with the last iteration of the block before (default: 0.7)")
    add(targets, "--confidence-correlation", number(-1.0, 1.0), "X", "of confidence and kept routes (default: 0.3)")
    add(targets, "--layer-heterogeneity", share, "X", "spread of distinct experts over layers (default: 0.15)")
    add(targets, "--kept-decoded", share, "X", "routes kept by tokens decoded earlier (default: 0.8)")
    add(targets, "--kept-masked", share, "X", "by masked tokens (default: 0.79)")
    add(targets, "--kept-written", share, "X", "by tokens just written (default: 0.26)")
    add(parser, "--seed", whole_number(0, 2**32 - 1), "N", "of all random numbers (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the trace to write")


def _add_locality_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("traces", type=Path, nargs="+", metavar="FILE", help="traces, shown side by side")
    parser.add_argument("--json", metavar="FILE|-", help="write everything; with - standard output holds nothing else")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write plots (PNG) there")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _run, argv)


def _run(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    (_synth if options.command == SYNTH else _locality)(options)


def _synth(options: argparse.Namespace) -> None:
    spec = _spec(vars(options))
    check_trace_target(options.out)
    started = time.monotonic()
    note("looking for the parameters that give the targets ...")
    trace = synthesise(spec)
    meter = LocalityMeter(trace.header)
    with TraceWriter(options.out, trace.header) as writer:
        for pass_ in trace:
            writer.add(pass_)
            meter.add(pass_)
    found = meter.result()
    outcomes = compare(spec, found)
    print(targets_table(outcomes), flush=True)
    for each in outcomes:
        if each.missed:
            got = (
                "there is nothing to measure it by" if each.achieved != each.achieved else f"it is {each.achieved:.3g}"
            )
            note(f"warning: target {each.name} of {each.wanted:.3g} was missed: {got}")
    passes = ", ".join(f"{count} {kind.value}" for kind, count in found.passes.items() if count)
    seconds = time.monotonic() - started
    note(f"wrote {options.out}: {format_bytes(writer.num_bytes)}, passes: {passes}; in {seconds:.1f} s")


def _spec(given: Mapping[str, Any]) -> SyntheticSpec:
    fields, targets = ({field.name for field in dataclasses.fields(kind)} for kind in (SyntheticSpec, Targets))
    if "iterations" in given and "requests" in given:
        raise UsageError("--iterations and --requests both say how long the trace is: give one of them")
    values = {name: value for name, value in given.items() if name in fields}
    if "requests" in given:
        values["iterations"] = None
    return make_spec(given["preset"], {name: value for name, value in given.items() if name in targets}, **values)


def _locality(options: argparse.Namespace) -> None:
    check_json_target(options.json)
    names = _names(options.traces)
    if options.out is not None:
        check_plots(options.out)
    traces = [open_trace(path) for path in options.traces]
    found = dict(zip(names, map(measure_locality, traces), strict=True))
    if options.json != STDOUT:
        print(locality_table(names, list(found.values())), flush=True)
    if options.json is not None:
        described = [_described(path, name, found[name]) for path, name in zip(options.traces, names, strict=True)]
        write_json({"version": oled_jax.__version__, "traces": described}, options.json)
    if options.out is not None:
        for path in write_plots(found, options.out):
            note(f"wrote {path}")


def _names(paths: Sequence[Path]) -> list[str]:
    """What the traces are called: their files' names, with folders where those are not enough."""
    for names in ([path.stem for path in paths], [str(path) for path in paths]):
        if len(set(names)) == len(names):
            return names
    raise UsageError("a trace is named twice: give every file once")


def _described(path: Path, name: str, found: Locality) -> dict[str, Any]:
    return {"file": str(path), "name": name, "header": dataclasses.asdict(found.header), **found.as_json()}


if __name__ == "__main__":
    sys.exit(main())
