"""Records routing traces of the model in the package, on which oled+ was chosen and judged.

    python scripts/record_demo_traces.py --out DIR [--items 40] [--batch 4]

Writes DIR/chosen.trace from questions of the training split, on which constants may be chosen, and DIR/held-out.trace
from held-out questions, of which tables are made. Both hold questions of all four families, shuffled, one request after
the other; with --batch N a second pair, chosen-xN.trace and held-out-xN.trace, has N requests at a time. Every expert
is resident meanwhile: a policy does not change what is routed.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import jax

from oled_jax.cli import CommandParser, add_decoding_flags, add_model_flags, decoding_options, note, whole_number
from oled_jax.config import DecodingConfig
from oled_jax.demo.families import DEMO_FAMILIES, held_out_items
from oled_jax.demo.items import Item, draw_item
from oled_jax.engine import Engine
from oled_jax.loading import CacheOptions, RunShape, load_engine, open_model, plan_run
from oled_jax.machine import use_compilation_cache

SEED = 6


def chosen_items(count: int) -> list[Item]:
    """Questions of the training split, `count` of each family, its templates in turn."""
    rng = random.Random(SEED)
    return [
        draw_item(family.name, family.templates[number % len(family.templates)], rng, "train")
        for family in DEMO_FAMILIES
        for number in range(count)
    ]


def judged_items(count: int) -> list[Item]:
    """Held-out questions, `count` of each family."""
    return [item for family in DEMO_FAMILIES for item in held_out_items(family, count, seed=SEED)]


def record(
    engine: Engine, decoding: DecodingConfig, prompts: Sequence[Sequence[int]], batch: int, path: Path, model: str
) -> None:
    """Answers the prompts, `batch` at a time, into one trace; a last batch that is not full is left out."""
    with engine.record(path, decoding, model=model, settings={"requests": len(prompts), "batch": batch}) as writer:
        for start in range(0, len(prompts) - batch + 1, batch):
            engine.generate(prompts[start : start + batch], decoding)
    note(f"{path}: {writer.num_passes} passes, {writer.num_bytes / 1e6:.1f} MB")


def main() -> None:
    parser = CommandParser(prog="record_demo_traces.py", description=__doc__.splitlines()[0])
    add_model_flags(parser)
    add_decoding_flags(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--items", type=whole_number(1), default=40, metavar="N", help="questions of each family")
    parser.add_argument("--batch", type=whole_number(1), default=1, metavar="N", help="more traces, N requests at once")
    options = parser.parse(None)
    options.out.mkdir(parents=True, exist_ok=True)
    model = open_model(options.model, options.dtype)
    decoding = decoding_options(options, model)
    use_compilation_cache()
    sets = {"chosen": chosen_items(options.items), "held-out": judged_items(options.items)}
    prompts = {}
    for name, items in sets.items():
        random.Random(SEED).shuffle(items)
        prompts[name] = [model.codec.encode_prompt(item.prompt) for item in items]
    longest = [max(len(prompt) for group in prompts.values() for prompt in group)] * options.batch
    cache = CacheOptions.parse("all", None, None)
    plan = plan_run(model, cache, RunShape.of(longest, decoding), jax.local_devices()[0])
    engine, _ = load_engine(model, cache, plan)
    for name, group in prompts.items():
        record(engine, decoding, group, 1, options.out / f"{name}.trace", model.label)
        if options.batch > 1:
            path = options.out / f"{name}-x{options.batch}.trace"
            record(engine, decoding, group, options.batch, path, model.label)


if __name__ == "__main__":
    main()
