"""Evaluates an exported checkpoint by the path of `bench accuracy`: scores within a time limit, and locality."""

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from oled_jax.bench.accuracy import Answer, answer_items, score_line, summarise
from oled_jax.config import DecodingConfig
from oled_jax.demo.families import DEMO_FAMILIES, held_out_items
from oled_jax.demo.items import Item
from oled_jax.demo.training.vocabulary import EOS_ID, MASK_ID
from oled_jax.engine import Engine
from oled_jax.loading import CacheOptions, RunShape, load_engine, open_model, plan_run
from oled_jax.text import TextCodec
from oled_jax.traces.files import open_trace
from oled_jax.traces.locality_meter import measure_locality

SAMPLES = 3  # answers of each family that are printed


def evaluate(
    directory: Path,
    generation: Mapping[str, Any],
    *,
    items_each: int,
    batch: int,
    deadline: float,
    report: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Scores by family (`bench.accuracy.summarise`), as far as the time allows; prints samples.

    Args:
      directory: the checkpoint.
      generation: decoding settings.
      items_each: held-out items of each family.
      deadline: time.monotonic() after which no further batch is begun.
      report: takes one line for people.
    """
    items = {family.name: held_out_items(family, items_each) for family in DEMO_FAMILIES}
    everything = [item for chosen in items.values() for item in chosen]
    engine, codec, decoding = _load(directory, generation, everything, batch)
    answers: list[Answer] = []
    for name, chosen in items.items():
        found = answer_items(engine, codec, decoding, chosen, batch, lambda: time.monotonic() > deadline)
        for answer in found[:SAMPLES]:
            report(f"  {'right' if answer.right else 'WRONG'}: {answer.item.prompt!r} -> {answer.text!r}")
        if found:
            report(score_line(name, summarise(found)[name]))
        answers += found
    summary = summarise(answers) if answers else {}
    for name in ("qa choice", "all"):
        if name in summary:
            report(score_line(name, summary[name]))
    return summary


def locality(directory: Path, generation: Mapping[str, Any], *, prompts_each: int) -> dict[str, Any]:
    """The routing's locality over held-out items of all families, one at a time (`Locality.as_json`)."""
    items = [item for family in DEMO_FAMILIES for item in held_out_items(family, prompts_each)]
    engine, codec, decoding = _load(directory, generation, items, batch=1)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace"
        with engine.record(path, decoding):
            for item in items:
                engine.generate([codec.encode_prompt(item.prompt)], decoding)
        return measure_locality(open_trace(path)).as_json()


def _load(
    directory: Path, generation: Mapping[str, Any], items: Sequence[Item], batch: int
) -> tuple[Engine, TextCodec, DecodingConfig]:
    """An engine that holds every page, for batches of any of the items."""
    model = open_model(str(directory))
    decoding = DecodingConfig(mask_id=MASK_ID, eos_id=EOS_ID, **generation)
    longest = max(len(model.codec.encode_prompt(item.prompt)) for item in items)
    cache = CacheOptions.parse("all", None, None)
    plan = plan_run(model, cache, RunShape.of([longest] * batch, decoding), jax.local_devices()[0])
    engine, _ = load_engine(model, cache, plan)
    return engine, model.codec, decoding
