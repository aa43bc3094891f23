"""`python -m oled_jax.sim FILE`: a routing trace under policies, capacities and hardware of choice. Wiring only."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

import oled_jax
from oled_jax.cli import CommandParser, note, number, run_command, whole_number
from oled_jax.errors import UsageError
from oled_jax.figures import check_plots
from oled_jax.policies.registry import describe_policies
from oled_jax.report import STDOUT, check_json_target, write_json, write_text
from oled_jax.sim.cells import Cell, chosen_cells
from oled_jax.sim.grid import CellResult, Machine, run_grid, trial_policy
from oled_jax.sim.hardware import Hardware, of_bandwidths, read_hardware
from oled_jax.sim.plots import write_plots
from oled_jax.sim.tables import assumption_lines, csv_text, grid_object, summary_tables
from oled_jax.sim.timing import Carrier, TimeOptions
from oled_jax.traces.files import open_trace
from oled_jax.traces.trace import TraceHeader

NAME = "oled_jax.sim"
ON, OFF = "on", "off"
CPU_FIGURES, DEVICE_FIGURES = ("cpu_gbs", "cpu_token_us"), ("h2d_gbs", "device_gbs")


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(
        prog=f"python -m {NAME}",
        description="Replays a routing trace under cache policies, with the engine's own manager, policies and tables, "
        "and estimates the time on a machine of choice.",
    )
    parser.add_argument("trace", metavar="FILE", nargs="?", help="routing trace (generate --trace, or traces synth)")
    parser.add_argument("--version", action="version", version=oled_jax.__version__)
    parser.add_argument(
        "--policy",
        default="oled",
        metavar="A,B,...",
        help="policies, each NAME[:OPTION=VALUE...] (default: oled); list: show them",
    )
    parser.add_argument(
        "--capacity",
        metavar="N,P%%,all",
        help="experts per MoE layer in device memory, on average: numbers, percentages, or all",
    )
    _add_machine_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", metavar="FILE|-", help="write everything; with - standard output holds nothing else")
    group.add_argument("--csv", metavar="FILE|-", help="write a line for each cell and kind of passes")
    group.add_argument("--out", type=Path, metavar="DIR", help="write plots (PNG) there")
    group.add_argument(
        "--jobs", type=whole_number(1), metavar="N", help="processes side by side (default: as many as CPUs)"
    )
    return parser


def _add_machine_flags(parser: CommandParser) -> None:
    group = parser.add_argument_group(
        "machine",
        "A profile, or bandwidths in 10^9 bytes a second; what is left out is that of one H200, scaled by the size of "
        "a page. The rest is 0 unless given.",
    )
    positive, time = number(0.0, above=True), number(0.0)

    def add(name: str, kind: Callable[[str], Any], metavar: str, text: str) -> None:
        group.add_argument(name, type=kind, metavar=metavar, help=text)

    add("--profile", Path, "JSON", "hardware profile for pages of this size (python -m oled_jax.profile --json)")
    add("--h2d-gbs", positive, "G", "transfers from host to device")
    add("--cpu-gbs", positive, "G", "weights that the CPU computes with")
    add("--cpu-token-us", time, "U", "what each token adds to an expert on the CPU")
    add("--device-gbs", positive, "G", "weights that the device computes with")
    group.add_argument(
        "--cpu-experts", choices=(ON, OFF), help="whether policies may leave misses to the CPU (default: on)"
    )
    group.add_argument(
        "--carrier",
        choices=[carrier.value for carrier in Carrier],
        help="native: transfers overlap with the FFN of resident pages (default: the profile's, else portable)",
    )
    group.add_argument("--trunk-us", type=time, default=0.0, metavar="U", help="a layer without its routed experts")
    group.add_argument("--planning-us", type=time, default=0.0, metavar="U", help="planning a layer, callback included")
    group.add_argument("--head-us", type=time, default=0.0, metavar="U", help="a pass outside its layers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _simulate, argv)


def _simulate(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    if options.policy == "list":
        print(describe_policies())
        return
    _check_output(options)
    if options.trace is None:
        raise UsageError("the trace is missing: give the file to replay")
    path = Path(options.trace)
    trace = open_trace(path)
    cells = chosen_cells(options.policy, options.capacity, trace.header.num_experts)
    machine = _machine(options, trace.header)
    _check_machine_flags(options, trace.header, cells, machine)
    if options.out is not None:
        check_plots(options.out)
    for line in assumption_lines(machine):
        note(line)
    with _progress(len(cells)) as done:
        results = run_grid(path, cells, machine, jobs=options.jobs or len(os.sched_getaffinity(0)), done=done)
    for sentence in dict.fromkeys(f"policy {result.cell.policy}: {s}" for result in results for s in result.notes):
        note(sentence)
    note(_speed(results, len(trace) * trace.header.num_layers))
    _report(options, grid_object(results, trace, path, machine))


def _check_output(options: argparse.Namespace) -> None:
    if options.json == STDOUT and options.csv == STDOUT:
        raise UsageError("--json - and --csv - both want standard output: give one of them a file")
    check_json_target(options.json)
    check_json_target(options.csv)


def _machine(options: argparse.Namespace, header: TraceHeader) -> Machine:
    hardware = _hardware(options, header)
    if options.carrier is not None and hardware.carrier not in (None, options.carrier):
        raise UsageError(
            f"--profile {options.profile} was measured with the {hardware.carrier} carrier: leave out --carrier, "
            f"or measure with {options.carrier}"
        )
    return Machine(
        hardware=hardware,
        options=TimeOptions(
            carrier=Carrier(options.carrier or hardware.carrier or Carrier.PORTABLE),
            trunk_us=options.trunk_us,
            planning_us=options.planning_us,
            head_us=options.head_us,
        ),
        cpu_available=options.cpu_experts != OFF,
    )


def _hardware(options: argparse.Namespace, header: TraceHeader) -> Hardware:
    if options.profile is None:
        figures = {name: getattr(options, name) for name in (*CPU_FIGURES, *DEVICE_FIGURES)}
        return of_bandwidths(header.page_bytes, **figures)
    given = _given(options, (*CPU_FIGURES, *DEVICE_FIGURES))
    if given:
        raise UsageError(f"--profile has all the figures: leave out {given}")
    return read_hardware(options.profile, header)


def _given(options: argparse.Namespace, names: Sequence[str]) -> str:
    """Those of the flags that were given, as a user writes them."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(options, name) is not None)


def _check_machine_flags(
    options: argparse.Namespace, header: TraceHeader, cells: Sequence[Cell], machine: Machine
) -> None:
    """Raises UsageError for a policy that cannot be built, and for flags without effect."""
    policies = [trial_policy(header, cell, machine) for cell in cells]
    about_cpu = _given(options, CPU_FIGURES)
    if about_cpu and options.cpu_experts == OFF:
        raise UsageError(f"{about_cpu} has no effect with --cpu-experts off")
    about_cpu = _given(options, (*CPU_FIGURES, "cpu_experts"))
    if about_cpu and machine.cpu_available and not any(policy is not None and policy.uses_cpu for policy in policies):
        raise UsageError(f"{about_cpu} has no effect: none of the policies leaves misses to the CPU")
    if options.h2d_gbs is not None and all(policy is None for policy in policies):
        raise UsageError("--h2d-gbs has no effect with --policy all: nothing is transferred")


@contextmanager
def _progress(cells: int) -> Iterator[Callable[[CellResult], None]]:
    """A bar over the cells, where a person can see it."""
    with tqdm(total=cells, desc="replaying", unit="cell", file=sys.stderr, disable=None) as bar:
        yield lambda result: bar.update()


def _speed(results: Sequence[CellResult], layer_iterations: int) -> str:
    seconds = sum(result.seconds for result in results)
    rate = layer_iterations * len(results) / seconds
    return f"replayed {len(results)} x {layer_iterations} layers, {rate:.0f} a second in each process"


def _report(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    cells = found["cells"]
    print(summary_tables(cells), file=sys.stderr if STDOUT in (options.json, options.csv) else sys.stdout, flush=True)
    if options.json is not None:
        write_json(found, options.json)
    if options.csv is not None:
        write_text(csv_text(cells), options.csv)
    if options.out is not None:
        for path in write_plots(cells, options.out, found["trace"]["model"]):
            note(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
