"""What commands that generate do between flags and the first token: they say the plan, and load the weights.

Notes go to standard error, and a bar where a person can see it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from oled_jax.cli import note
from oled_jax.engine import Engine
from oled_jax.loading import CacheOptions, OpenedModel, load_engine
from oled_jax.memory import MemoryPlan
from oled_jax.policies.base import Policy


def announce_plan(cache: CacheOptions, plan: MemoryPlan) -> None:
    """Says what the run will occupy, and which capacity it has."""
    for line in plan.lines():
        note(line)
    chosen = "" if cache.capacity is not None or plan.resident else ", chosen: the largest that fits"
    if cache.gigabytes is not None or cache.all_resident:
        chosen = ""
    note(f"expert cache: {cache.policy}, {plan.capacity:.4g} of {plan.num_experts} experts per layer{chosen}")


def load_announced(model: OpenedModel, cache: CacheOptions, plan: MemoryPlan) -> tuple[Engine, Policy | None]:
    """`load_engine` with a bar, and notes on what was chosen."""
    with _progress(plan.num_layers) as advance:
        engine, policy = load_engine(model, cache, plan, advance, _note_beside_bar)
    if engine.cpu_experts is not None:
        note(engine.cpu_experts.description)
        for sentence in engine.cpu_experts.notes:
            note(f"note: {sentence}")
    return engine, policy


def note_length(model: OpenedModel, length: int) -> None:
    """Warns of more positions than the model was made for."""
    longest = model.config.max_position_embeddings
    if length > longest:
        note(f"note: prompt and answer may take {length} positions, the model was made for {longest}")


@contextmanager
def _progress(num_layers: int) -> Iterator[Callable[[int], None]]:
    """A bar over the layers that are loaded, where a person can see it."""
    with tqdm(total=num_layers, desc="loading experts", unit="layer", file=sys.stderr, disable=None) as bar:
        yield lambda layer: bar.update()


def _note_beside_bar(text: str) -> None:
    """`note` while a bar may be on the screen."""
    tqdm.write(text, file=sys.stderr)
