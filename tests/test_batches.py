"""Batches: every row becomes what it is alone, whoever shares its passes; files of prompts; the command."""

import dataclasses
import json

import jsonschema
import numpy as np
import pytest
from engines import GREEDY, SLOTS, build, open_tiny
from statistics_schema import SCHEMA

from oled_jax import generate
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE
from oled_jax.offload.shares import CacheShares
from oled_jax.passes import PassKind
from oled_jax.program import forward_pass, resident_pass, sample
from oled_jax.traces.files import open_trace

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")
# No empty prompt: in a block of masks alone all positions are equal, and rounding decides which is filled first.
LENGTHS = (3, 30, 5, 19, 17, 1, 24)  # those above a block share a program
SHORT = (0, 2, 5)  # of less than a block: a batch of them needs no program for prefill
PROMPTS = [np.random.default_rng(length).integers(0, 500, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


@pytest.fixture(scope="module")
def engines(model):
    """By capacity; their pools have one size, so that they share programs."""
    return {capacity: build(*model, "oled:dispatch=gpu", capacity, slots=SLOTS) for capacity in (1, 6, 32)}


@pytest.fixture(scope="module")
def alone(engines):
    return [engines[6].generate([prompt], GREEDY)[0] for prompt in PROMPTS]


LARGE = [pytest.param(32, capacity, marks=pytest.mark.exhaustive) for capacity in (1, 32)]


@pytest.mark.parametrize(("batch", "capacity"), [(1, 32), (5, 1), pytest.param(5, 6, marks=pytest.mark.slow), *LARGE])
def test_each_row_is_what_it_is_alone(engines, alone, batch, capacity):
    chosen = range(len(PROMPTS)) if batch < 32 else [SHORT[i % len(SHORT)] for i in range(33)]
    results = engines[capacity].generate([PROMPTS[i] for i in chosen], GREEDY, batch=batch)
    for i, result in zip(chosen, results, strict=True):
        single = alone[i]
        assert result.output_ids == single.output_ids
        assert result.passes == single.passes
        assert result.share.activated == single.share.activated, "idle or padded positions count as load"
        assert result.share.passes == single.passes[PassKind.DENOISE] + single.passes[PassKind.EDIT]
    assert any(result.finish == "length" for result in results)


@pytest.mark.slow
def test_what_a_row_draws_does_not_depend_on_when_it_enters(engines):
    sampled = dataclasses.replace(GREEDY, temperature=1.0, seed=3)
    prompts = [*PROMPTS[:6], PROMPTS[0]]  # the last one is the first again, and draws anew
    results = engines[6].generate(prompts, sampled, batch=5)
    for prompt, result in zip(prompts[:6], results, strict=False):
        assert result.output_ids == engines[6].generate([prompt], sampled)[0].output_ids
    assert results[6].output_ids != results[0].output_ids


def test_shares_of_a_batch(engines):
    engine = engines[6]
    before = engine.statistics.summary(PassKind.DENOISE, PassKind.EDIT)
    results = engine.generate(PROMPTS[:1], GREEDY)
    after = engine.statistics.summary(PassKind.DENOISE, PassKind.EDIT)
    share = results[0].share
    assert (share.passes, share.hits) == (after.passes - before.passes, after.hits - before.hits)
    assert share.transferred == after.to_gpu - before.to_gpu > 0
    assert share.activated - share.hits == after.misses - before.misses


def test_a_page_that_two_rows_wait_for_is_divided_between_them():
    shares = CacheShares(3, 4)
    shares.begin_pass(np.array([True, True, False]))
    ids, mask = np.array([[0, 1], [1, 2], [3, 3]]), np.array([True, True, False])
    shares.add(ids, mask, hits=np.array([0]), to_gpu=np.array([1, 2]), num_activated=3)
    first, second, idle = (shares.take(place) for place in range(3))
    assert (first.activated, first.hits, first.transferred) == (2, 1, 0.5)
    assert (second.activated, second.hits, second.transferred) == (2, 0, 1.5)
    assert (idle.passes, idle.activated, idle.transferred) == (0, 0, 0.0)
    assert shares.take(0).activated == 0


def test_nothing_compiles_while_requests_come_and_go(engines):
    engine = engines[6]
    engine.generate(PROMPTS, GREEDY, batch=5)
    warm, programs = len(engine._warm), (forward_pass, resident_pass, sample)
    compiled = [program._cache_size() for program in programs]
    engine.generate(PROMPTS[::-1], GREEDY, batch=5)
    assert [program._cache_size() for program in programs] == compiled
    assert len(engine._warm) == warm


def test_a_trace_says_which_request_has_which_place(engines, tmp_path):
    engine = engines[6]
    with engine.record(tmp_path / "t.npz", GREEDY):
        results = engine.generate(PROMPTS, GREEDY, batch=5)
    seen = {kind: np.zeros(len(PROMPTS), int) for kind in PassKind}
    for each in open_trace(tmp_path / "t.npz"):
        active = each.info.token_mask.reshape(5, -1).any(axis=1)
        seen[each.info.kind][each.request_ids[active]] += 1
    for row, result in enumerate(results):
        assert sum(seen[kind][row] for kind in PassKind if kind is not PassKind.PREFILL) == sum(
            count for kind, count in result.passes.items() if kind is not PassKind.PREFILL
        )


# Files and the command


@pytest.fixture
def run(monkeypatch, tmp_path, tiny_model, capsys):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.chdir(tmp_path)
    short = ["--model", str(tiny_model), "--gen-length", "16", "--block-length", "8", "--threshold", "0.3"]

    def run(*flags):
        code = generate.main([str(word) for word in (*short, *flags)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.mark.slow
def test_the_command_answers_a_file_in_its_order(run, tmp_path):
    (tmp_path / "p.txt").write_text("a\n\nbcdefghijklm\r\nc\n", encoding="utf-8")
    lines = [{"prompt": "c", "id": "last"}, {"prompt_ids": [ord("a") - 33]}, {"prompt": "bcdefghijklm", "answer": 3}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    code, out, err = run("--prompt-file", "p.txt", "--batch-size", "2", "--stats-json", "s.json")
    assert code == 0
    answers = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in answers] == [1, 3, 4]
    statistics = json.loads((tmp_path / "s.json").read_text())
    jsonschema.validate(statistics, SCHEMA)
    assert statistics["settings"]["batch"] == 2
    assert [request["text"] for request in statistics["requests"]] == [answer["text"] for answer in answers]
    assert [request["id"] for request in statistics["requests"]] == [1, 3, 4]
    assert [request["waited_s"] > 0 for request in statistics["requests"]][-1]
    tokens = [len(request["output_ids"]) for request in statistics["requests"]]
    assert statistics["totals"]["output_tokens"] == sum(tokens)
    assert f"3 requests, {sum(tokens)} tokens" in err
    code, out, _ = run("--prompt-file", "p.jsonl", "--batch-size", "2")
    again = [json.loads(line) for line in out.splitlines()]
    assert [answer["id"] for answer in again] == ["last", 2, 3]
    assert [answer["text"] for answer in again] == [answers[i]["text"] for i in (2, 0, 1)]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.txt", "\n \n", "is empty"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": \n', "p.jsonl, line 3: it is not valid JSON (column 12"),
        ("p.txt", '{"prompt": "a"}\n[1]\n', "line 2: it must be an object"),
        ("p.jsonl", '{"text": "a"}', "line 1: it must have one of prompt, messages, prompt_ids, and has none"),
        ("p.jsonl", '{"prompt": "a", "prompt_ids": [1]}', "has prompt and prompt_ids"),
        ("p.jsonl", '{"prompt": 3}', "prompt must be a string"),
        ("p.jsonl", '{"prompt": "a", "id": 1.5}', "id is 1.5"),
        ("p.jsonl", '{"prompt_ids": [1, 512]}', "line 1: token id 512 is outside the vocabulary"),
        ("p.jsonl", '{"prompt_ids": "1"}', "prompt_ids must be a list"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', "line 1: messages: message 0 needs content"),
        ("p.jsonl", '{"messages": [{"role": "user", "content": "x"}]}', "line 1: --messages needs a chat template"),
    ],
)
def test_a_bad_file_is_one_line_that_names_the_place(run, tmp_path, name, content, words):
    (tmp_path / name).write_text(content, encoding="utf-8")
    code, out, err = run("--prompt-file", name)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_flags_that_do_not_go_together(run, tmp_path):
    assert "cannot be read" in run("--prompt-file", "none.txt")[2]
    assert "--batch-size has no effect" in run("--prompt", "x", "--batch-size", "2")[2]
    assert "one prompt only" in run("--prompt", "x", "--prompt-file", "p.txt")[2]
    assert "--visualize has no effect" in run("--visualize", "--prompt-file", "p.txt")[2]
    assert "at least 1" in run("--prompt-file", "p.txt", "--batch-size", "0")[2]
