"""`python -m oled_jax.generate`: one prompt in, its continuation out. Wiring only."""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

import oled_jax
from oled_jax.cli import (
    CommandParser,
    add_cache_flags,
    add_decoding_flags,
    add_model_flags,
    cache_options,
    decoding_options,
    note,
    run_command,
)
from oled_jax.config import DecodingConfig
from oled_jax.decode.events import Result
from oled_jax.decoding_options import effective_settings
from oled_jax.demo import shipped
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.load import CacheOptions, OpenedModel, RunShape, load_engine, open_model, plan_run
from oled_jax.machine import use_compilation_cache
from oled_jax.memory import MemoryPlan, format_bytes
from oled_jax.policies.registry import describe_policies, parse_policy
from oled_jax.prompts import add_prompt_flags, check_prompt_flags, describe_prompt, read_prompt
from oled_jax.report import (
    STDOUT,
    Request,
    cache_line,
    check_json_target,
    request_line,
    statistics_object,
    write_json,
)
from oled_jax.traces.files import check_trace_target

NAME = "oled_jax.generate"


def build_parser() -> CommandParser:
    """The command's flags."""
    parser = CommandParser(
        prog=f"python -m {NAME}",
        description="Generates text with a mixture-of-experts block-diffusion model whose experts are paged.",
    )
    parser.add_argument("--version", action="version", version=oled_jax.__version__)
    add_model_flags(parser)
    add_prompt_flags(parser)
    add_decoding_flags(parser)
    add_cache_flags(parser)
    parser.add_argument(
        "--stats-json",
        metavar="FILE|-",
        help="write the statistics; with - standard output holds nothing else",
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="record what every pass routes, for the locality report and the simulator"
    )
    parser.add_argument(
        "--trace-hidden",
        action="store_true",
        help="record as well how similar each layer's input is to those of the eight passes before",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (`cli.run_command`)."""
    return run_command(NAME, _generate, argv)


def _generate(argv: Sequence[str] | None) -> None:
    options = build_parser().parse(argv)
    if options.policy == "list":
        print(describe_policies())
        return
    cache = cache_options(options)
    check_prompt_flags(options)
    check_json_target(options.stats_json)
    _check_trace_flags(options)
    model = open_model(options.model, options.dtype)
    if model.shipped:
        note(shipped.NOTICE)
    prompt = _prompt(options, model)
    decoding = decoding_options(options, model)
    _note_length(model, len(prompt) + decoding.gen_length)
    use_compilation_cache()
    shape = RunShape.of([len(prompt)], decoding)
    plan = plan_run(model, cache, shape, jax.local_devices()[0])
    for line in _plan_lines(cache, plan):
        note(line)
    with _progress(plan.num_layers) as advance:
        engine, policy = load_engine(model, cache, plan, advance, _note_beside_bar)
    if engine.cpu_experts is not None:
        note(engine.cpu_experts.description)
        for sentence in engine.cpu_experts.notes:
            note(f"note: {sentence}")
    settings = _settings(options, model, cache, decoding, shape, plan) | _engine_settings(engine)
    with closing(engine), _recording(options, engine, model, decoding, settings):
        (result,) = engine.generate([prompt], decoding)
    if policy is not None:
        for sentence in policy.notes:
            note(f"policy {policy.name}: {sentence}")
    request = Request(prompt_tokens=len(prompt), result=result, text=_text(model, result))
    _report(options, engine, model, cache, settings, request)


def _check_trace_flags(options: argparse.Namespace) -> None:
    if options.trace is None:
        if options.trace_hidden:
            raise UsageError("--trace-hidden has no effect without --trace FILE")
        return
    if options.trace == STDOUT:
        raise UsageError("--trace -: a trace is a file of its own, give it a name")
    if options.stats_json is not None and Path(options.trace).resolve() == Path(options.stats_json).resolve():
        raise UsageError("--trace and --stats-json name the same file: give two")
    check_trace_target(Path(options.trace))


@contextmanager
def _recording(
    options: argparse.Namespace,
    engine: Engine,
    model: OpenedModel,
    decoding: DecodingConfig,
    settings: dict[str, Any],
) -> Iterator[None]:
    """Records what the engine does inside, if the user asked for it."""
    if options.trace is None:
        yield
        return
    with engine.record(
        options.trace, decoding, hidden=options.trace_hidden, model=model.label, settings=settings
    ) as trace:
        yield
    note(f"trace: {trace.num_passes} passes, {format_bytes(trace.num_bytes)}, in {options.trace}")


def _prompt(options: argparse.Namespace, model: OpenedModel) -> list[int]:
    default = shipped.PROMPT if model.shipped else None
    return read_prompt(options, model.codec, model.config.vocab_size, default)


def _note_length(model: OpenedModel, length: int) -> None:
    longest = model.config.max_position_embeddings
    if length > longest:
        note(f"note: prompt and answer may take {length} positions, the model was made for {longest}")


def _plan_lines(cache: CacheOptions, plan: MemoryPlan) -> Iterator[str]:
    yield from plan.lines()
    chosen = "" if cache.capacity is not None or plan.resident else ", chosen: the largest that fits"
    if cache.gigabytes is not None or cache.all_resident:
        chosen = ""
    yield f"expert cache: {cache.policy}, {plan.capacity:.4g} of {plan.num_experts} experts per layer{chosen}"


@contextmanager
def _progress(num_layers: int) -> Iterator[Callable[[int], None]]:
    """A bar over the layers that are loaded, where a person can see it."""
    with tqdm(total=num_layers, desc="loading experts", unit="layer", file=sys.stderr, disable=None) as bar:
        yield lambda layer: bar.update()


def _note_beside_bar(text: str) -> None:
    """`note` while a bar may be on the screen."""
    tqdm.write(text, file=sys.stderr)


def _text(model: OpenedModel, result: Result) -> str | None:
    return model.codec.decode(result.output_ids) if model.codec.available else None


def _settings(
    options: argparse.Namespace,
    model: OpenedModel,
    cache: CacheOptions,
    decoding: DecodingConfig,
    shape: RunShape,
    plan: MemoryPlan,
) -> dict[str, Any]:
    """Every effective value."""
    return {
        **effective_settings(decoding),
        **describe_prompt(options, model.codec),
        "family": model.family.name,
        "dtype": model.config.dtype,
        "policy": cache.policy,
        "policy_options": dataclasses.asdict(parse_policy(cache.policy)[1]),
        "expert_cache": plan.capacity,
        "spare_slots": plan.spare,
        "batch": shape.batch,
        "kv_positions": shape.kv_positions,
        "prefill_chunk": shape.chunk,
    }


def _engine_settings(engine: Engine) -> dict[str, Any]:
    """The carrier and the CPU backend that were chosen; null where every page is resident or every miss transferred."""
    cpu, mover = engine.cpu_experts, engine.mover
    return {
        "carrier": mover.name if mover else None,
        "cpu_experts": cpu.name if cpu else None,
        "cpu_threads": cpu.threads if cpu else None,
    }


def _report(
    options: argparse.Namespace,
    engine: Engine,
    model: OpenedModel,
    cache: CacheOptions,
    settings: dict[str, Any],
    request: Request,
) -> None:
    statistics = statistics_object(
        engine, model=model.label, policy=cache.policy, settings=settings, requests=[request]
    )
    if options.stats_json != STDOUT:
        as_text = request.text is not None and options.prompt_ids is None
        print(request.text if as_text else ",".join(map(str, request.result.output_ids)), flush=True)
    if options.stats_json is not None:
        write_json(statistics, options.stats_json)
    note(request_line(request))
    note(cache_line(statistics["cache"], engine.config.num_experts))


if __name__ == "__main__":
    sys.exit(main())
