"""The model card: README.md of the shipped checkpoint, written from the run's record and the measured scores."""

from collections.abc import Mapping
from typing import Any

from oled_jax.demo.families import DEMO_FAMILIES
from oled_jax.demo.items import HELD_OUT_SHARE

DESCRIPTIONS = {
    "math": "word problems, worked one operation at a time",
    "code": "a small Python function from its signature and docstring; the check runs it",
    "qa": "questions about elements, capitals, continents and units, open and with four choices",
    "stories": "open-ended short stories; the check asks for both things, one name, one colour",
}
HEADER = """---
license: apache-2.0
library_name: oled_jax
pipeline_tag: text-generation
---
# The demo model of oled_jax

A mixture-of-experts block-diffusion language model of the LLaDA2 architecture, small enough to ship with the package.
It writes the four kinds of text below and nothing else. Its purpose is to show the cache of experts on a model that
really denoises: routing, confidence and reuse are those of trained weights.
"""


def model_card(
    config: Mapping[str, Any],
    parameters: int,
    *,
    date: str,
    command: str,
    record: Mapping[str, Any],
    scores: Mapping[str, Mapping[str, Any]] | None,
    locality: Mapping[str, Any] | None,
) -> str:
    """The card's text.

    Args:
      config: `config.json`.
      parameters: number of weights.
      date: of training, ISO.
      command: that trained the model.
      record: of the training state: steps, tokens, seconds, device.
      scores: of `bench accuracy`; None where they were not measured.
      locality: of `bench.locality.summarise_locality`; None where it was not measured.
    """
    sections = [HEADER, _shape(config, parameters), _data(), _training(date, command, record)]
    sections += [_scores(scores)] if scores else []
    sections += [_locality(locality, config["num_experts"])] if locality else []
    return "\n".join(sections)


def _shape(config: Mapping[str, Any], parameters: int) -> str:
    layers = config["num_hidden_layers"]
    return f"""## Model
{parameters / 1e6:.1f} M parameters in bfloat16; hidden size {config["hidden_size"]}; {layers} layers,
{layers - config["first_k_dense_replace"]} of them with routed experts: {config["num_experts"]} of width
{config["moe_intermediate_size"]}, top-{config["num_experts_per_tok"]} out of {config["topk_group"]} of
{config["n_group"]} groups, and one shared expert. Vocabulary {config["vocab_size"]} (byte-level BPE, single
digits). Block length 16, threshold 0.9 (`generation_config.json`).
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


def _training(date: str, command: str, record: Mapping[str, Any]) -> str:
    return f"""## Training
Trained on {date} by

    {command}

Block diffusion: a noisy and a clean copy of each text, loss on masked answer positions weighted by
1 / max(t, 1/3), AdamW with a cosine over wall time, experts balanced by their selection bias (no auxiliary loss).
{record["steps"]} steps, {record["tokens"] / 1e6:.0f} M tokens ({record["answers"] / 1e6:.0f} M of them learnt),
{record["seconds"] / 60:.1f} minutes of steps on {record["device"]}.
"""


def _scores(scores: Mapping[str, Mapping[str, Any]]) -> str:
    rows = "\n".join(
        f"| {name} | {score['items']} | {score['accuracy']:.1%} | {score['tokens_per_pass']:.2f} |"
        for name, score in scores.items()
    )
    return f"""## Scores
Held-out questions, temperature 0, threshold 0.9, block 16 (`python -m oled_jax.bench accuracy`):

| family | questions | right | tokens per pass |
| --- | --- | --- | --- |
{rows}
"""


def _locality(locality: Mapping[str, Any], num_experts: int) -> str:
    kept = locality["kept_routes"]
    return f"""## Routing locality
Over {locality["iterations"]} denoise passes at block 16, one request at a time, means over layers:

| what | value |
| --- | --- |
| distinct experts per layer and pass | {_number(locality["distinct_experts"], 1)} of {num_experts} |
| overlap of adjacent passes over a block | {_number(locality["adjacent_overlap"])} |
| overlap across a block boundary | {_number(locality["boundary_overlap"])} |
| routes kept from one pass to the next, token decoded earlier | {_number(kept["decoded"])} |
| the same, token still masked | {_number(kept["masked"])} |
| the same, token just written | {_number(kept["just_written"])} |

For comparison, the OLED-MoE paper reports 85 to 90% overlap of adjacent iterations and more than 65% across blocks,
for large models.
"""


def _number(value: float | None, digits: int = 2) -> str:
    return "not measured" if value is None else f"{value:.{digits}f}"
