"""`python -m oled_jax.generate`, in process where possible: output, exit codes, messages, flags."""

import io
import json
import os
import subprocess
import sys

import jsonschema
import pytest
from statistics_schema import SCHEMA

from oled_jax import generate, loading, startup
from oled_jax.demo import shipped
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE, prepare_runtime
from oled_jax.offload.store import PINNED_LIMIT_VARIABLE

SHORT = ["--gen-length", "16", "--block-length", "8", "--threshold", "0.3"]
GIGABYTES = str((2 * 7 + 1 + 32.5) * 3 * 32 * 64 * 4 / 1e9)  # 15 slots for 2 layers, 32 spare ones, half a page


@pytest.fixture(autouse=True)
def _environment(monkeypatch, tmp_path):
    """The command's settings for the environment end with the test; compiled programs are not kept."""
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))


@pytest.fixture
def run(capsys):
    """Runs the command in this process: exit code, standard output, standard error."""

    def run(*argv: str):
        code = generate.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def acceptance(golden):
    return [
        "--model", str(golden / "llada2-tiny"), "--prompt-ids", "5,6,7,8,9", "--gen-length", "40",
        "--block-length", "8", "--threshold", "0.5", "--mask-id", "511", "--dtype", "float32",
    ]  # fmt: skip


def test_paged_and_resident_print_the_same_ids(run, acceptance, tmp_path):
    code, out, err = run(*acceptance, "--expert-cache", 6, "--policy", "oled", "--stats-json", "-")
    assert code == 0
    statistics = json.loads(out)
    jsonschema.validate(statistics, SCHEMA)
    ids = statistics["requests"][0]["output_ids"]
    assert len(ids) == 40
    assert statistics["requests"][0]["text"] is None
    assert statistics["settings"]["expert_cache"] == 6
    assert (statistics["settings"]["seed"], statistics["settings"]["max_post_steps"]) == (None, None)
    assert "memory plan" in err
    assert "cache: oled, capacity 6 of 32, hit rate" in err

    code, out, err = run(*acceptance, "--policy", "all", "--stats-json", tmp_path / "all.json")
    assert code == 0
    assert out == ",".join(map(str, ids)) + "\n"
    jsonschema.validate(json.loads((tmp_path / "all.json").read_text()), SCHEMA)


def test_without_a_model_text_comes_out_of_the_shipped_one(run, tiny_model, monkeypatch, tmp_path):
    monkeypatch.setattr(loading, "demo_model_dir", lambda: tiny_model)
    monkeypatch.setattr(shipped, "PROMPT", "Go on")  # less than a block: no program for prefill
    code, out, err = run("--prompt", "Hé", *SHORT, "--stats_json", tmp_path / "a.json")
    assert code == 0
    assert shipped.NOTICE in err
    assert "chosen: the largest that fits" in err
    statistics = json.loads((tmp_path / "a.json").read_text())
    assert out == statistics["requests"][0]["text"] + "\n" != "\n"
    assert statistics["requests"][0]["prompt_tokens"] == len("Hé".encode())
    assert statistics["model"] == shipped.LABEL == "demo"

    monkeypatch.setattr(sys, "stdin", io.StringIO("Hé\n"))
    code, again, _ = run("--max_new_tokens", "16", *SHORT[2:], "--expert-cache", "all")
    assert (code, again) == (0, out)

    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, _ = run(*SHORT, "--expert-cache", "all", "--stats-json", tmp_path / "b.json")
    assert code == 0
    (request,) = json.loads((tmp_path / "b.json").read_text())["requests"]
    assert request["prompt_tokens"] == len(shipped.PROMPT)


def test_a_stream_and_a_picture_change_no_text(run, tiny_model):
    flags = ["--model", tiny_model, "--prompt", "Hé", *SHORT, "--expert-cache", "6"]
    code, out, _ = run(*flags)
    assert code == 0
    assert run(*flags, "--stream")[:2] == (0, out)
    code, again, err = run(*flags, "--visualize")
    assert (code, again) == (0, out)
    assert "block 0, denoise 1: H" in err


def test_gigabytes_may_give_layers_different_capacities(run, tiny_model, tmp_path):
    flags = ["--model", tiny_model, "--expert-cache-gb", GIGABYTES, "--stats-json", tmp_path / "a.json"]
    code, _, _ = run("--prompt", "x", *SHORT, *flags)
    assert code == 0
    statistics = json.loads((tmp_path / "a.json").read_text())
    assert statistics["settings"]["expert_cache"] == pytest.approx(15 / 2)
    assert sum(statistics["cache"]["capacities"]) == 15


def test_sampling_depends_on_the_seed_only(run, tiny_model):
    sampled = ["--model", tiny_model, "--prompt", "x", *SHORT, "--temperature", "1", "--top-k", "50"]
    first = run(*sampled, "--seed", "1")[1]
    assert run(*sampled, "--seed", "1", "--expert-cache-gb", GIGABYTES)[1] == first
    assert run(*sampled, "--seed", "2")[1] != first
    last = str(2**32 - 1)
    assert run(*sampled, "--seed", last)[1] == run(*sampled, "--seed", last)[1] != first


def test_the_21_family_edits(run, acceptance, tmp_path):
    argv = [*acceptance, *SHORT, "--family", "llada21"]
    assert "no schedule" in run(*argv, "--steps", "4")[2]
    assert "nothing is edited" in run(*argv, "--editing-threshold", "none", "--max-post-steps", "2")[2]
    code, _, _ = run(*argv, "--mode", "speed", "--max-post-steps", "3", "--stats-json", tmp_path / "a")
    statistics = json.loads((tmp_path / "a").read_text())
    settings = statistics["settings"]
    assert code == 0
    assert (settings["family"], settings["mode"], settings["threshold"]) == ("llada21", "speed", 0.3)
    assert (settings["editing_threshold"], settings["max_post_steps"], settings["steps"]) == (0.0, 3, None)
    passes = statistics["requests"][0]["passes"]
    assert passes["edit"] > 0
    assert statistics["cache"]["passes"] == passes["denoise"] + passes["edit"]


def test_list_of_policies(run):
    code, out, err = run("--policy", "list")
    assert (code, err) == (0, "")
    assert out.startswith("oled ")
    assert "\nall " in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--expert-cache", "40"], "1 to 32"),
        (["--expert-cache", "0"], "at least 1"),
        (["--expert-cache", "many"], "auto or all"),
        (["--expert-cache-gb", "0.0001"], "one expert in each of 3 layers"),
        (["--expert-cache-gb", "0"], "above 0"),
        (["--expert-cache", "4", "--expert-cache-gb", "1"], "give one"),
        (["--policy", "all", "--expert-cache", "4"], "leave out"),
        (["--policy", "all", "--expert-cache-gb", "4"], "leave out"),
        (["--policy", "olde"], "did you mean 'oled'"),
        (["--policy", "oled:dispatch=gpu:speed=9"], "no option 'speed'"),
        (["--policy", "oracle"], "replay"),
        (["--top-k", "3"], "--top-k has no effect"),
        (["--top-p", "0.5"], "--top-p has no effect"),
        (["--seed", "1"], "--seed has no effect"),
        (["--editing-threshold", "0.5"], "do not edit"),
        (["--max_post_steps", "3"], "do not edit"),
        (["--mode", "speed"], "have no modes"),
        (["--mode", "hasty"], "choose from"),
        (["--family", "llada3"], "choose from"),
        (["--steps", "0"], "at least 1"),
        (["--gen-length", "ten"], "not a whole number"),
        (["--threshold", "1.5"], "at most 1"),
        (["--threshold", "nan"], "out of range"),
        (["--temperature", "0.00001"], "at least 0.0001"),
        (["--seed", "-1"], "from 0 to 4294967295"),
        (["--dtype", "int8"], "choose from"),
        (["--prompt", "x"], "one prompt only"),
        (["--messages", "x.json"], "one prompt only"),
        (["--system", "x"], "--system has no effect"),
        (["--no-chat-template"], "--no-chat-template has no effect"),
        (["--prompt-ids", "1,512"], "from 0 to 511"),
        (["--prompt-ids", "1,two"], "'two' is not a token id"),
        (["--prompt-ids", ""], "is empty"),
        (["--mask-id", "512"], "vocabulary"),
        (["--stats-json", "/none/such/file"], "no directory"),
        (["--model", "no/such/dir/anywhere"], "neither a directory nor a hub id"),
        (["--gen-length", "100000000"], "needs"),
        (["--stream", "--visualize"], "give one"),
        (["--stream", "--stats-json", "-"], "--stream has no effect with --stats-json -"),
        (["--frobnicate"], "--frobnicate"),
        (["--gen"], "--gen"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(run, acceptance, monkeypatch, flags, words):
    monkeypatch.setattr(startup, "load_engine", lambda *_: pytest.fail("weights were loaded"))
    code, out, err = run(*acceptance, *flags)
    complaint = err.splitlines()[-1]
    assert (code, out) == (2, "")
    assert complaint.startswith("oled_jax.generate: error: ")
    assert words in complaint


def test_prompts_that_need_a_tokenizer_or_a_template(run, acceptance, tiny_model, monkeypatch, tmp_path):
    model = [word for word in acceptance if word not in ("--prompt-ids", "5,6,7,8,9")]
    code, _, err = run(*model, "--prompt", "x")
    assert (code, "--prompt-ids" in err) == (2, True)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    code, _, err = run(*model)
    assert (code, "there is no prompt" in err) == (2, True)
    (tmp_path / "m.json").write_text('[{"role": "user", "content": "x"}]')
    plain = ["--model", tiny_model]  # has a tokenizer, but no template
    assert "needs a chat template" in run(*plain, "--messages", tmp_path / "m.json")[2]
    assert "put a system message into the file" in run("--messages", tmp_path / "m.json", "--system", "x")[2]
    assert "no chat template" in run(*plain, "--prompt", "x", "--no-chat-template")[2]


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (BrokenPipeError(), 141, ""),
        (MemoryError(), 1, "memory ran out"),
    ],
)
def test_interruptions_have_exit_codes_and_no_traceback(run, monkeypatch, error, code, words):
    def fail(*_):
        raise error

    monkeypatch.setattr(startup, "load_engine", fail)
    got, out, err = run("--prompt", "x")
    assert (got, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


def test_a_defect_is_not_hidden(run, monkeypatch):
    def fail(*_):
        raise RuntimeError("broken invariant")

    monkeypatch.setattr(startup, "load_engine", fail)
    with pytest.raises(RuntimeError, match="broken invariant"):
        run("--prompt", "x")


def test_pinned_memory_limit_follows_the_models_size(monkeypatch):
    monkeypatch.setenv(PINNED_LIMIT_VARIABLE, "")
    monkeypatch.delenv(PINNED_LIMIT_VARIABLE)
    prepare_runtime(30_600_000_000)
    assert PINNED_LIMIT_VARIABLE not in os.environ
    prepare_runtime(200_000_000_000)
    assert int(os.environ[PINNED_LIMIT_VARIABLE]) > 200
    prepare_runtime(400_000_000_000)
    assert int(os.environ[PINNED_LIMIT_VARIABLE]) < 400, "what the user has set stays"


OPENING = """
import os, sys
from jax._src import xla_bridge
from oled_jax.loading import open_model
open_model(sys.argv[1])
assert not xla_bridge.backends_are_initialized(), "the backend started before its settings were made"
"""


@pytest.mark.slow
def test_opening_a_model_starts_no_backend(golden):
    subprocess.run([sys.executable, "-c", OPENING, str(golden / "llada2-tiny")], check=True, timeout=120)


@pytest.mark.slow
def test_a_process_of_its_own_keeps_compiled_programs(tiny_model, tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != CACHE_VARIABLE}
    environment |= {"XDG_CACHE_HOME": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    words = ["--model", str(tiny_model), "--prompt", "x", *SHORT, "--policy", "all"]
    command = [sys.executable, "-m", "oled_jax.generate", *words]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert "Traceback" not in done.stderr
    assert any((tmp_path / "oled_jax" / "xla").iterdir())
