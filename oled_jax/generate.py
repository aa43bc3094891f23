"""`python -m oled_jax.generate`: prompts in, their continuations out. Wiring only."""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

import oled_jax
from oled_jax.batches import AnswerLines, Prompt
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
from oled_jax.decode.events import FinishEvent, Result
from oled_jax.decoding_options import effective_settings
from oled_jax.demo import shipped
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.loading import CacheOptions, OpenedModel, RunShape, open_model, plan_run
from oled_jax.machine import use_compilation_cache
from oled_jax.memory import MemoryPlan, format_bytes
from oled_jax.policies.registry import describe_policies, parse_policy
from oled_jax.prompts import add_prompt_flags, batch_size, check_prompt_flags, describe_prompt, read_prompts
from oled_jax.report import (
    STDOUT,
    Request,
    cache_line,
    check_json_target,
    request_line,
    statistics_object,
    totals_line,
    write_json,
)
from oled_jax.startup import announce_plan, load_announced, note_length
from oled_jax.terminal.choice import add_display_flags, check_display_flags, make_display
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
    add_display_flags(parser)
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
    check_display_flags(options)
    _check_trace_flags(options)
    model = open_model(options.model, options.dtype, options.family)
    if model.shipped:
        note(shipped.NOTICE)
    prompts = _prompts(options, model)
    decoding = decoding_options(options, model)
    lengths = [len(prompt.ids) for prompt in prompts]
    note_length(model, max(lengths) + decoding.gen_length)
    use_compilation_cache()
    shape = RunShape.of(lengths, decoding, batch_size(options, len(prompts)))
    plan = plan_run(model, cache, shape, jax.local_devices()[0])
    announce_plan(cache, plan)
    engine, policy = load_announced(model, cache, plan)
    settings = _settings(options, model, cache, decoding, shape, plan) | _engine_settings(engine)
    with contextlib.closing(engine), _recording(options, engine, model, decoding, settings):
        results = _decode(options, engine, model, prompts, decoding, shape.batch)
    if policy is not None:
        for sentence in policy.notes:
            note(f"policy {policy.name}: {sentence}")
    requests = [
        Request(id=prompt.id, prompt_tokens=len(prompt.ids), result=result, text=_text(model, result))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    _report(options, engine, model, cache, settings, requests)


def _decode(
    options: argparse.Namespace,
    engine: Engine,
    model: OpenedModel,
    prompts: Sequence[Prompt],
    decoding: DecodingConfig,
    batch: int,
) -> list[Result]:
    """Runs all prompts. Answers to a file's are written as they come."""
    lines = AnswerLines(prompts, model.codec)
    results: dict[int, Result] = {}
    display = make_display(options, engine, model.codec, mask_id=decoding.mask_id, prompt_length=len(prompts[0].ids))
    with contextlib.closing(display):
        for event in engine.stream([prompt.ids for prompt in prompts], decoding, batch=batch):
            display.show(event)
            if not isinstance(event, FinishEvent):
                continue
            results[event.row] = event.result
            if options.prompt_file is not None and options.stats_json != STDOUT:
                for line in lines.add(event.row, event.result):
                    print(line, flush=True)
    return [results[row] for row in range(len(prompts))]


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


def _prompts(options: argparse.Namespace, model: OpenedModel) -> list[Prompt]:
    default = shipped.PROMPT if model.shipped else None
    return read_prompts(options, model.codec, model.config.vocab_size, default)


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
        "mode": getattr(options, "mode", None),
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
    requests: Sequence[Request],
) -> None:
    statistics = statistics_object(engine, model=model.label, policy=cache.policy, settings=settings, requests=requests)
    if options.prompt_file is None and options.stats_json != STDOUT and not options.stream:
        (request,) = requests
        as_text = request.text is not None and options.prompt_ids is None
        print(request.text if as_text else ",".join(map(str, request.result.output_ids)), flush=True)
    if options.stats_json is not None:
        write_json(statistics, options.stats_json)
    note(request_line(requests[0]) if len(requests) == 1 else totals_line(statistics["totals"]))
    note(cache_line(statistics["cache"], engine.config.num_experts))


if __name__ == "__main__":
    sys.exit(main())
