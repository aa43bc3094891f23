"""`bench accuracy`: how many held-out questions of the demo families a model answers, and tokens per pass.

The path is that of `generate`: the same opening, planning, engine and decoding settings. Batches are equal in
shape, and the items are fixed by a seed, so results repeat.
"""

import argparse
import dataclasses
import datetime
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

import jax

from oled_jax.cli import (
    CommandParser,
    add_cache_flags,
    add_decoding_flags,
    add_model_flags,
    cache_options,
    decoding_options,
    note,
    whole_number,
)
from oled_jax.config import DecodingConfig
from oled_jax.decode.events import Result
from oled_jax.decoding_options import effective_settings
from oled_jax.demo.families import BY_NAME, DEMO_FAMILIES, check_answer, held_out_items
from oled_jax.demo.items import Item
from oled_jax.demo.questions import is_multiple_choice
from oled_jax.engine import Engine
from oled_jax.errors import UsageError
from oled_jax.loading import RunShape, load_engine, open_model, plan_run
from oled_jax.machine import describe_machine, use_compilation_cache
from oled_jax.passes import PassKind
from oled_jax.report import GROUPS, STDOUT, cache_line, cache_object, check_json_target, write_json
from oled_jax.text import TextCodec

SUMMARY = "held-out questions answered by the model, by family, and tokens per pass"
DEFAULT_ITEMS, DEFAULT_BATCH = 128, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the model said to one item, and whether it is right."""

    item: Item
    text: str
    result: Result
    right: bool


def answer_items(
    engine: Engine,
    codec: TextCodec,
    decoding: DecodingConfig,
    items: Sequence[Item],
    batch: int,
    enough: Callable[[], bool] = lambda: False,
) -> list[Answer]:
    """Answers items in batches of equal size (the last is filled up with prompts whose answers are dropped).

    Args:
      enough: asked before each batch; True ends early, with the answers so far.
    """
    prompts = [codec.encode_prompt(item.prompt) for item in items]
    answers: list[Answer] = []
    for start in range(0, len(items), batch):
        if enough():
            break
        chosen = prompts[start : start + batch]
        padded = [*chosen, *[chosen[0]] * (batch - len(chosen))]
        for item, result in zip(items[start : start + batch], engine.generate(padded, decoding), strict=False):
            text = codec.decode(result.output_ids)
            answers.append(Answer(item=item, text=text, result=result, right=check_answer(item, text)))
    return answers


def scores(answers: Sequence[Answer]) -> dict[str, Any]:
    """Counts and rates of some answers, as the JSON holds them.

    `tokens_per_pass` counts denoise and edit passes; `tokens_per_forward` commit passes too.
    """
    passes = {kind: sum(answer.result.passes.get(kind, 0) for answer in answers) for kind in PassKind}
    tokens = sum(len(answer.result.output_ids) for answer in answers)
    denoising = passes[PassKind.DENOISE] + passes[PassKind.EDIT]
    right = sum(answer.right for answer in answers)
    return {
        "items": len(answers),
        "right": right,
        "accuracy": right / len(answers) if answers else None,
        "tokens": tokens,
        "passes": {kind.value: count for kind, count in passes.items()},
        "tokens_per_pass": tokens / denoising if denoising else None,
        "tokens_per_forward": tokens / (denoising + passes[PassKind.COMMIT]) if denoising else None,
    }


def summarise(answers: Sequence[Answer]) -> dict[str, dict[str, Any]]:
    """Scores by family, of multiple choice alone ("qa choice") and of everything ("all")."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.item.family, []).append(answer)
    choice = [answer for answer in answers if is_multiple_choice(answer.item)]
    return {name: scores(chosen) for name, chosen in {**groups, "qa choice": choice, "all": answers}.items() if chosen}


def score_line(name: str, score: Mapping[str, Any]) -> str:
    """One line for people."""
    per_pass = "-" if score["tokens_per_pass"] is None else f"{score['tokens_per_pass']:.2f}"
    return (
        f"{name:10} {score['right']:4} of {score['items']:4} right ({score['accuracy']:6.1%}), "
        f"{per_pass} tokens per pass"
    )


def build_parser() -> CommandParser:
    """The bench's flags."""
    parser = CommandParser(prog="python -m oled_jax.bench accuracy", description=SUMMARY)
    add_model_flags(parser)
    add_cache_flags(parser)
    add_decoding_flags(parser)
    group = parser.add_argument_group("bench")
    group.add_argument(
        "--limit", type=whole_number(1), default=DEFAULT_ITEMS, metavar="N", help="questions of each family"
    )
    group.add_argument("--families", default=",".join(BY_NAME), metavar="A,B", help="families, separated by commas")
    group.add_argument("--batch", type=whole_number(1), default=DEFAULT_BATCH, metavar="N", help="prompts at once")
    group.add_argument("--show", type=whole_number(0), default=0, metavar="N", help="answers of each family to print")
    group.add_argument("--json", metavar="FILE|-", help="write the scores and every answer")
    return parser


def command(argv: Sequence[str]) -> None:
    """Runs the bench. Raises UsageError for bad flags or a model without a tokenizer."""
    options = build_parser().parse(argv)
    cache = cache_options(options)
    check_json_target(options.json)
    items = _items(options)
    model = open_model(options.model, options.dtype, options.family)
    if not model.codec.has_chat_template:
        raise UsageError(f"model {model.label} has no chat template: the questions need one")
    decoding = decoding_options(options, model)
    use_compilation_cache()
    lengths = [max(len(model.codec.encode_prompt(item.prompt)) for item in items)] * options.batch
    plan = plan_run(model, cache, RunShape.of(lengths, decoding), jax.local_devices()[0])
    engine, _ = load_engine(model, cache, plan)
    started = time.monotonic()
    with closing(engine):
        answers = answer_items(engine, model.codec, decoding, items, options.batch)
    summary = summarise(answers)
    out = sys.stderr if options.json == STDOUT else sys.stdout
    for family in DEMO_FAMILIES:
        for answer in [answer for answer in answers if answer.item.family == family.name][: options.show]:
            print(f"{'right' if answer.right else 'WRONG'}: {answer.item.prompt!r} -> {answer.text!r}", file=out)
    for name, score in summary.items():
        print(score_line(name, score), file=out)
    tokens = summary["all"]["tokens"]
    cached = {name: cache_object(engine, cache.policy, kinds, tokens) for name, kinds in GROUPS.items()}
    note(cache_line(cached["cache"], engine.config.num_experts))
    if options.json is not None:
        described = {
            "model": model.label,
            "machine": describe_machine(jax.local_devices()[0]),
            "date": datetime.date.today().isoformat(),
            "settings": {**effective_settings(decoding), "dtype": model.config.dtype, "batch": options.batch},
            "seconds": time.monotonic() - started,
            "scores": summary,
            **cached,
            "answers": [_answer_json(answer) for answer in answers],
        }
        write_json(described, options.json)


def _items(options: argparse.Namespace) -> list[Item]:
    names = options.families.split(",")
    for name in names:
        if name not in BY_NAME:
            raise UsageError(f"--families: there is no family {name!r}, there are {', '.join(BY_NAME)}")
    return [item for name in names for item in held_out_items(BY_NAME[name], options.limit)]


def _answer_json(answer: Answer) -> dict[str, Any]:
    return {
        "family": answer.item.family,
        "template": answer.item.template,
        "prompt": answer.item.prompt,
        "text": answer.text,
        "right": answer.right,
        "finish": answer.result.finish,
    }
