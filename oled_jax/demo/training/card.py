"""The model card: README.md of the shipped checkpoint, written from the run's record and the measured scores."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from oled_jax.demo.families import DEMO_FAMILIES
from oled_jax.demo.items import HELD_OUT_SHARE

DESCRIPTIONS = {
    "math": "word problems, worked one operation at a time",
    "code": "a small Python function from its signature and docstring; the check runs it",
    "qa": "questions about elements, capitals, continents and units, open and with four choices",
    "stories": "open-ended short stories; the check asks for both things, one name, one colour",
}
# What a prototype of the same shape showed after 78 M tokens.
PROTOTYPE = {
    "distinct": 36, "adjacent": 0.79, "boundary": 0.32, "decoded": 0.79, "masked": 0.75, "just_written": 0.22,
}  # fmt: skip
OVERLAPS = ("adjacent", "boundary")
HEADER = """---
license: apache-2.0
library_name: oled_jax
pipeline_tag: text-generation
---
# The demo model of oled_jax

A mixture-of-experts block-diffusion language model of the LLaDA2 architecture, small enough to ship with the package.
It writes the four kinds of text below, asked for in the wordings it was trained on, and nothing else: other prompts get
nonsense or a wrong answer of one of these kinds. Its purpose is to show the cache of experts on a model that
really denoises: routing, confidence and reuse are those of trained weights.
"""


def model_card(
    config: Mapping[str, Any],
    parameters: int,
    *,
    record: Mapping[str, Any],
    benches: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The card's text.

    Args:
      config: `config.json`.
      parameters: number of weights.
      record: of the training state: date, commands, steps, tokens, seconds, device; `scores` of the evaluation that
        ended the training and `locality` (`traces.locality.Locality.as_json`) where they were measured.
      benches: JSON objects of `bench accuracy`, over the same questions with different caches.
    """
    sections = [HEADER, _shape(config, parameters), _data(), _training(record)]
    sections += [_scores(benches, record, config["num_experts"])] if benches or record.get("scores") else []
    sections += [_locality(record["locality"], config["num_experts"], record)] if record.get("locality") else []
    return "\n".join(sections)


def without_paths(command: str) -> str:
    """The command with a placeholder for every path among its arguments: a card names no machine's folders."""
    script, *words = shlex.split(command)[1:]
    shown = ["python", f"scripts/{PurePath(script).name}"]
    for word in words:
        flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if "/" not in value:
            shown.append(shlex.quote(word))
            continue
        named = flag or next((earlier for earlier in reversed(shown) if earlier.startswith("--")), "--path")
        shown.append(f"{flag}{equals}{named.removeprefix('--').replace('-', '_').upper()}_DIR")
    return " ".join(shown)


def _shape(config: Mapping[str, Any], parameters: int) -> str:
    layers = config["num_hidden_layers"]
    return f"""## Model
{parameters / 1e6:.1f} M parameters in bfloat16; hidden size {config["hidden_size"]}; {layers} layers, \
{layers - config["first_k_dense_replace"]} of them with routed experts: {config["num_experts"]} of width \
{config["moe_intermediate_size"]}, top-{config["num_experts_per_tok"]} out of {config["topk_group"]} of
{config["n_group"]} groups, and one shared expert. Vocabulary {config["vocab_size"]} (byte-level BPE, single digits). \
Block length 16, threshold 0.9
(`generation_config.json`). More on the model, and how to train it again: docs/demo-model.md of the repository.
"""


def _data() -> str:
    count = sum(len(family.templates) for family in DEMO_FAMILIES)
    rows = "\n".join(f"| {f.name} | {len(f.templates)} | {DESCRIPTIONS[f.name]} |" for f in DEMO_FAMILIES)
    return f"""## Data
Synthetic, made by the package itself from a seed (`oled_jax.demo`): {count} templates in varied wording. One
parameter tuple in {HELD_OUT_SHARE} is held out: evaluation uses those only. Facts of the family qa are all seen in
training, under other wordings.

| family | templates | what |
| --- | --- | --- |
{rows}
"""


def _training(record: Mapping[str, Any]) -> str:
    commands = "\n    ".join(without_paths(command) for command in record["command"])
    return f"""## Training
Trained on {record["date"]} by

    {commands}

Block diffusion: a noisy and a clean copy of each text, loss on masked answer positions weighted by
1 / max(t, 1/3), AdamW with a cosine over wall time, experts balanced by their selection bias (no auxiliary loss).
{record["steps"]} steps, {record["tokens"] / 1e6:.0f} M tokens ({record["answers"] / 1e6:.0f} M of them learnt),
{record["seconds"] / 60:.1f} minutes of steps on {record["device"]}.
"""


def _scores(benches: Sequence[Mapping[str, Any]], record: Mapping[str, Any], num_experts: int) -> str:
    ended = record.get("scores")
    parts = ["## Scores\nHeld-out questions, temperature 0, threshold 0.9, block 16."]
    if benches:
        parts += [_bench_lines(benches, num_experts), _table([_name(bench) for bench in benches], benches)]
    if len(benches) > 1:
        texts = zip(*([answer["text"] for answer in bench["answers"]] for bench in benches), strict=True)
        equal = sum(len(set(found)) == 1 for found in texts)
        parts.append(f"{equal} of {len(benches[0]['answers'])} answers are the same text in all of these runs.")
    if ended and benches:
        total = ended["all"]
        parts.append(
            f"The evaluation that ended the training, on {record['device']}, {record['date']}: "
            f"{total['accuracy']:.1%} of {total['items']}\nquestions, {total['tokens_per_pass']:.2f} tokens per pass."
        )
    elif ended:
        parts.append(f"From the evaluation that ended the training, on {record['device']}, {record['date']}:")
        parts.append(_table(["all resident"], [record]))
    return "\n\n".join(parts) + "\n"


def _bench_lines(benches: Sequence[Mapping[str, Any]], num_experts: int) -> str:
    """How each was measured: command, machine, date, and what the cache did."""
    lines = []
    for bench in benches:
        machine, cache, items = bench["machine"], bench["cache"], bench["scores"]["all"]["items"]
        families = sum(family.name in bench["scores"] for family in DEMO_FAMILIES)
        line = (
            f"* {_name(bench)}: `python -m oled_jax.bench accuracy --limit {items // families} {_flags(bench)}`, "
            f"{machine['platform']} platform, {machine['cpu_cores']} cores, JAX {machine['jax']}, "
            f"{bench['settings']['dtype']}, {bench['settings']['batch']} questions at once, {bench['date']}"
        )
        if cache["misses"]:
            line += (
                f"; hit rate {cache['hit_rate']:.1%}, capacity {cache['capacity']:g} of {num_experts}, "
                f"{cache['bytes_per_token'] / 1e6:.2f} MB moved per token"
            )
        lines.append(line)
    return "\n".join(lines)


def _name(bench: Mapping[str, Any]) -> str:
    return "all resident" if bench["cache"]["policy"] == "all" else f"capacity {bench['cache']['capacity']:g}"


def _flags(bench: Mapping[str, Any]) -> str:
    policy, capacity = bench["cache"]["policy"], bench["cache"]["capacity"]
    return "--policy all" if policy == "all" else f"--policy {policy} --expert-cache {capacity:g}"


def _table(names: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> str:
    """A line for each family; for each run, the share that is right and tokens per pass."""
    head = " | ".join(f"{name}: right | tokens per pass" for name in names)
    lines = [f"| family | questions | {head} |", "| --- | --- |" + " --- | --- |" * len(runs)]
    for family, score in runs[0]["scores"].items():
        found = [run["scores"][family] for run in runs]
        cells = " | ".join(f"{one['accuracy']:.1%} | {one['tokens_per_pass']:.2f}" for one in found)
        lines.append(f"| {family} | {score['items']} | {cells} |")
    return "\n".join(lines)


def _locality(locality: Mapping[str, Any], num_experts: int, record: Mapping[str, Any]) -> str:
    kept = locality["kept_routes"]
    rows = {
        f"distinct experts per layer and pass, of {num_experts}": (locality["distinct_experts"], "distinct"),
        "overlap of adjacent passes over a block": (locality["adjacent_overlap"], "adjacent"),
        "overlap across a block boundary": (locality["boundary_overlap"], "boundary"),
        "routes kept from one pass to the next, token decoded earlier": (kept["decoded"], "decoded"),
        "the same, token still masked": (kept["masked"], "masked"),
        "the same, token just written": (kept["just_written"], "just_written"),
    }
    table = "\n".join(f"| {what} | {_number(value)} | {PROTOTYPE[key]} |" for what, (value, key) in rows.items())
    return f"""## Routing locality
Over {locality["iterations"]} denoise passes at block 16, one request at a time, means over layers. Beside it, a
prototype of the same shape that had seen 78 M tokens:

| what | this model ({record["tokens"] / 1e6:.0f} M tokens) | prototype (78 M tokens) |
| --- | --- | --- |
{table}

{_comparison(locality)}A gentler balancing of the experts was not tried.
For comparison, the OLED-MoE paper reports 85 to 90% overlap of adjacent iterations and more than 65% across blocks, for
large models.

Confidence against stability: the share of a token's routes that the next pass keeps, by the token's confidence in the
pass before (number of tokens in brackets):

{_confidence_table(locality["kept_by_confidence"])}
"""


def _comparison(locality: Mapping[str, Any]) -> str:
    """The sentence on longer training, where the figures bear it out."""
    found = [locality["adjacent_overlap"], locality["boundary_overlap"]]
    raised = all(value is not None and value > PROTOTYPE[key] for value, key in zip(found, OVERLAPS, strict=True))
    return "With longer training both overlaps are higher. " if raised else ""


def _confidence_table(states: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    lines = ["| confidence | decoded earlier | still masked | just written |", "| --- | --- | --- | --- |"]
    for group in next(iter(states.values())):
        found = [states[state][group] for state in ("decoded", "masked", "just_written")]
        lines.append(f"| {group} | " + " | ".join(f"{_number(one['kept'])} ({one['tokens']})" for one in found) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"
