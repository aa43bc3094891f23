"""SDAR and RND1 against the reference's recorded generations: real models, experts paged.

Numbers of deliberate differences are those of the docstring of `oled_jax.decode.block_diffusion`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from engines import CheckedEngine, Engine, build_plain, open_golden
from statistics_schema import SCHEMA

from oled_jax.config import DecodingConfig
from oled_jax.decode.events import FinishEvent, PassEvent, Result
from oled_jax.generate import main
from oled_jax.passes import PassKind
from oled_jax.traces.files import open_trace

MASK = 252
CONFIDENCE_ATOL, ENTROPY_ATOL = 5e-5, 2e-4
SDAR_CASES = (
    "block4", "boundary", "prompt1", "low_threshold", "block8", "block8_steps3_boundary",
    "steps2_prompt_overwritten", "static", "sequential", "stop_token", "topk1_all_confident",
)  # fmt: skip
FOLDED_CASES = ("block4", "stop_token")  # of SDAR, in every test run; the others with the exhaustive tests
RND1_CASES = (
    "basic", "steps_more_than_tokens", "one_step", "eos_at_end", "temperature_half", "top_k_nan", "infill", "eb_gamma",
)  # fmt: skip
RULES = {"low_confidence_dynamic": "dynamic", "low_confidence_static": "static", "sequential": "sequential"}


def recordings(golden: Path, name: str) -> dict[str, Mapping[str, Any]]:
    cases = json.loads((golden / f"{name}-tiny-generate.json").read_text())["cases"]
    return {case["name"]: case for case in cases}


@pytest.fixture(scope="module")
def sdar(golden: Path) -> Engine:
    engine = build_plain(*open_golden(golden / "sdar-tiny"), "oled", 6)
    engine.__class__ = CheckedEngine
    return engine


@pytest.fixture(scope="module")
def rnd1(golden: Path) -> Engine:
    engine = build_plain(*open_golden(golden / "rnd1-tiny"), "oled", 6)
    engine.__class__ = CheckedEngine
    return engine


def generate(engine: Engine, prompt: list[int], decoding: DecodingConfig) -> tuple[list[PassEvent], Result]:
    """Denoise passes and the result."""
    events = list(engine.stream([prompt], decoding))
    passes = [event for event in events if isinstance(event, PassEvent) and event.kind is PassKind.DENOISE]
    return passes, next(event.result for event in events if isinstance(event, FinishEvent))


def test_every_recording_is_here(golden: Path) -> None:
    assert set(recordings(golden, "sdar")) == set(SDAR_CASES)
    assert set(recordings(golden, "rnd1")) == set(RND1_CASES)


@pytest.mark.parametrize(
    ("name", "folds"),
    [
        *(pytest.param(name, False, marks=[pytest.mark.slow] * (number % 2)) for number, name in enumerate(SDAR_CASES)),
        *((name, True) for name in FOLDED_CASES),
        *(pytest.param(name, True, marks=pytest.mark.exhaustive) for name in SDAR_CASES if name not in FOLDED_CASES),
    ],
)
def test_sdar(golden: Path, sdar: Engine, name: str, folds: bool) -> None:
    case = recordings(golden, "sdar")[name]
    args, prompt = case["args"], case["prompt"]
    stop = args["stopping_criteria_idx"] or [-1]
    decoding = DecodingConfig(
        mask_id=MASK, eos_id=stop[0], gen_length=args["gen_length"], block_length=args["block_length"],
        steps=args["denoising_steps"], threshold=args["confidence_threshold"],
        rule=RULES[args["remasking_strategy"]],
        # The recordings take the most probable token at temperature 1; with top_k 1 there is no other.
        temperature=1.0 if args["top_k"] else 0.0, top_k=args["top_k"] or None,
        fold_commits=folds,
    )  # fmt: skip
    passes, result = generate(sdar, prompt, decoding)
    assert result.canvas[: len(prompt)].tolist() == prompt
    if name == "steps2_prompt_overwritten":  # difference 10: the reference's first step writes into the prompt
        first = case["steps"][0]
        assert set(first["transfer"]) - set(passes[0].mask_transfer) <= set(range(len(prompt) % 4))
        assert passes[0].predicted is not None
        assert passes[0].predicted.tolist() == first["x0"]
        assert MASK not in result.output_ids
        return
    for event, step in zip(passes, case["steps"], strict=True):
        assert (event.block, event.step, event.num_to_transfer) == (
            step["block"],
            step["step"],
            step["num_to_transfer"],
        )
        assert event.tokens_before.tolist() == step["tokens_before"]
        assert event.predicted is not None
        assert event.predicted.tolist() == step["x0"]
        assert list(event.mask_transfer) == step["transfer"]
        np.testing.assert_allclose(event.confidence, step["confidence"], rtol=0, atol=CONFIDENCE_ATOL)
    assert len(passes) == case["forward_calls"].count("denoise")
    assert result.canvas.tolist() == case["output_canvas"]
    assert result.finish == ("eos" if args["stopping_criteria_idx"] else "length")


def rnd1_request(case: Mapping[str, Any]) -> tuple[list[int], DecodingConfig]:
    """What asks for a recorded text: one token less than its max_new_tokens (difference 12)."""
    args, length = case["args"], len(case["output_ids"]) - 1
    prompt = list(case["prefix"])
    if case["suffix"] is not None:
        prompt += [MASK] * (length - len(prompt) - len(case["suffix"])) + case["suffix"]
    tempered = args["temperature"] != 1.0
    return prompt, DecodingConfig(
        mask_id=MASK, eos_id=args["eos_token_id"], gen_length=length - len(prompt), whole_text=True,
        pad_id=args["eos_token_id"] if args.get("add_eos_at_end") else args["pad_token_id"],
        steps=args["num_diffusion_steps"], rule="entropy-bound" if "eb_gamma" in args else "entropy",
        entropy_bound=args.get("eb_gamma", 1.0),
        # The recordings are greedy at any temperature; here that is top_k 1.
        temperature=args["temperature"] if tempered else 0.0, top_k=1 if tempered else None,
    )  # fmt: skip


def test_the_command_recognises_the_family(golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = recordings(golden, "rnd1")["basic"]
    prompt, decoding = rnd1_request(case)
    sizes = ["--gen-length", str(decoding.gen_length), "--steps", "8", "--dtype", "float32", "--expert-cache", "6"]
    ids = ["--model", str(golden / "rnd1-tiny"), "--prompt-ids", ",".join(map(str, prompt))]
    written = ["--stats-json", str(tmp_path / "stats.json"), "--trace", str(tmp_path / "trace")]
    assert main([*ids, *sizes, *written]) == 0
    printed = [int(token) for token in capsys.readouterr().out.split(",")]
    assert printed == case["output_ids"][len(prompt) : -1]
    statistics = json.loads((tmp_path / "stats.json").read_text())
    jsonschema.validate(statistics, SCHEMA)
    settings = statistics["settings"]
    assert (settings["family"], settings["rule"], settings["pad_id"]) == ("rnd1", "entropy", 250)
    assert settings["block_length"] is settings["threshold"] is None
    assert statistics["cache"]["passes"] == case["num_forward_calls"] == statistics["requests"][0]["passes"]["denoise"]
    trace = open_trace(tmp_path / "trace")
    passes = list(trace)
    assert (trace.header.block_length, len(passes)) == (0, case["num_forward_calls"])
    assert [int(each.info.token_mask.sum()) for each in passes] == [len(case["output_ids"])] * len(passes)
    assert main([*ids, *sizes, "--pad-id", "256"]) == 2
    assert "--pad-id 256 lies outside the vocabulary of 256 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", RND1_CASES)
def test_rnd1(golden: Path, rnd1: Engine, name: str) -> None:
    case = recordings(golden, "rnd1")[name]
    prompt, decoding = rnd1_request(case)
    passes, result = generate(rnd1, prompt, decoding)
    S = len(case["output_ids"])
    assert len(result.output_ids) == decoding.gen_length
    if name == "top_k_nan":  # difference 13: the reference's order is accidental after the first pass
        assert passes[0].tokens_before[:S].tolist() == case["steps"][0]["tokens_before"]
        assert passes[0].predicted is not None
        assert passes[0].predicted[1:S].tolist() == case["steps"][0]["pred"][1:]
        assert len(passes) == case["num_forward_calls"]
        return
    steps = [step for step in case["steps"] if step["unmask"]]  # difference 14
    for event, step in zip(passes, steps, strict=False):
        assert event.tokens_before[:S].tolist() == step["tokens_before"]
        assert event.predicted is not None
        assert event.predicted[1:S].tolist() == step["pred"][1:]
        assert list(event.mask_transfer) == step["unmask"]
        if decoding.temperature == 0:
            log_confidence = np.log(event.confidence[1:S])
            np.testing.assert_allclose(log_confidence, step["log_confidence"][1:], rtol=0, atol=ENTROPY_ATOL)
    assert result.canvas[:S].tolist() == case["output_ids"]
    assert len(passes) == case["num_forward_calls"] - (len(case["steps"]) - len(steps))
