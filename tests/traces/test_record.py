"""Recording: the file holds exactly what the cache manager saw, layer inputs are compared, the text stays the same."""

import copy
import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, build, build_plain, open_tiny, run

from oled_jax import generate
from oled_jax.errors import UsageError
from oled_jax.machine import CACHE_VARIABLE, MEMORY_FRACTION_VARIABLE
from oled_jax.offload.carriers.registry import choose
from oled_jax.offload.observed import Comparison, compare
from oled_jax.passes import PassKind
from oled_jax.traces.files import open_trace
from oled_jax.traces.trace import COSINE_GAPS

# Two prefill chunks for one row, none for the other, then blocks that the rows enter and leave at different times.
PROMPTS = [[int(token) for token in np.random.default_rng(3).integers(0, 500, 20)], [5, 6, 7]]
AGAIN = [[1, 2], [3]]  # runs the same compiled programs


@dataclasses.dataclass
class Seen:
    """What a manager was told: requests and blocks before a pass, the pass, its layers."""

    prompts: list
    new_blocks: int
    info: object
    layers: list
    outcome: object = None


class Spy:
    """Listens to a manager's calls and keeps copies."""

    def __init__(self, manager):
        self.passes: list[Seen] = []
        self._prompts, self._blocks = [], 0
        self._manager = manager
        for name in ("begin_request", "begin_block", "begin_pass", "on_route", "end_iteration"):
            self._wrap(name, getattr(self, f"_{name}"))

    def _wrap(self, name, listen):
        original = getattr(self._manager, name)

        def call(*arguments):
            if not self._manager.idle:
                listen(*copy.deepcopy(arguments))
            return original(*arguments)

        setattr(self._manager, name, call)

    def _begin_request(self, prompt_ids):
        self._prompts.append(prompt_ids)

    def _begin_block(self):
        self._blocks += 1

    def _begin_pass(self, info):
        self.passes.append(Seen(self._prompts, self._blocks, info, []))
        self._prompts, self._blocks = [], 0

    def _on_route(self, layer, packed, hidden=None):
        assert layer == len(self.passes[-1].layers)
        self.passes[-1].layers.append((packed, hidden))

    def _end_iteration(self, outcome):
        self.passes[-1].outcome = outcome


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


@pytest.fixture(scope="module")
def watched(model, tmp_path_factory):
    """A recorded run of two batches with a spy: what it saw, the trace, and the first batch's text and logits."""
    engine = build(*model, "oled:dispatch=gpu", 6)
    spy = Spy(engine.manager)
    path = tmp_path_factory.mktemp("watched") / "t.npz"
    with engine.record(path, GREEDY, hidden=True, model="tiny", settings={"why": "test"}):
        outputs = [result.output_ids for result in run(engine, PROMPTS)]
        logits = tuple(engine.recorded)
        run(engine, AGAIN)
    return spy.passes, open_trace(path), outputs, logits


def assert_equal_records(got, expected):
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(got, name), value, err_msg=name)


def test_the_file_holds_what_the_manager_saw(watched):
    seen, trace, *_ = watched
    assert len(trace) == len(seen) > 20
    assert {each.info.kind for each in seen} >= {PassKind.PREFILL, PassKind.DENOISE, PassKind.COMMIT}
    K = trace.header.top_k
    for got, expected in zip(trace, seen, strict=True):
        np.testing.assert_equal(list(got.prompts), expected.prompts)
        assert got.new_blocks == expected.new_blocks
        assert_equal_records(got.info, expected.info)
        assert_equal_records(got.outcome, expected.outcome)
        routes = np.stack([packed for packed, _ in expected.layers])
        np.testing.assert_array_equal(got.expert_ids, routes[..., :K])
        np.testing.assert_array_equal(got.gates.view(np.int32), routes[..., K:])


def test_rows_are_told_apart(watched):
    _, trace, outputs, _ = watched
    L = trace.header.block_length
    passes = list(trace)
    assert passes[0].request_ids.tolist() == [0, 1]
    assert [len(each.prompts) for each in passes if each.prompts] == [2, 2]
    assert passes[-1].request_ids.tolist() == [2, 3]
    canvas = {}
    for each in passes:
        for row, (request, start) in enumerate(zip(each.request_ids, each.block_starts, strict=True)):
            tokens = slice(row * L, row * L + L)
            if each.info.kind is not PassKind.PREFILL and each.info.token_mask[tokens].all():
                for offset, token in enumerate(each.outcome.token_ids[tokens]):
                    canvas[request, start + offset] = token
    for request, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        assert [canvas[request, len(prompt) + n] for n in range(len(output))] == list(output)


def test_the_header_says_what_was_run(watched, model):
    header, config = watched[1].header, model[0]
    assert (header.source, header.model, header.dtype) == ("recorded", "tiny", "float32")
    assert (header.num_layers, header.num_experts, header.top_k) == (
        config.num_moe_layers,
        config.num_experts,
        config.num_experts_per_tok,
    )
    expected = {"why": "test", "policy": "oled:dispatch=gpu", "total_slots": 18, "threshold": GREEDY.threshold}
    assert header.settings.items() >= expected.items()
    assert header.settings["carrier"] == choose("auto")[0]


def test_the_documents_example_reads_it_with_numpy_alone(watched, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "np.load" in code]
    monkeypatch.chdir(watched[1].path.parent)
    watched[1].path.with_name("trace.npz").write_bytes(watched[1].path.read_bytes())
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(watched[1])
    for line, each in zip(printed, watched[1], strict=True):
        activated = [np.unique(layer).size for layer in each.expert_ids[:, each.info.token_mask]]
        assert line == f"{each.info.kind} activates {' '.join(map(str, activated))} experts in each layer"


def cosine(one, other):
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


def test_layer_inputs_are_compared_with_earlier_passes_of_the_block(model, tmp_path):
    """Against layer inputs that a CPU backend gets."""
    engine = build_plain(*model, "oled", 6, cpu="numpy")
    spy = Spy(engine.manager)
    with engine.record(tmp_path / "t.npz", GREEDY, hidden=True):
        run(engine, PROMPTS)
    trace = open_trace(tmp_path / "t.npz")
    L = trace.header.block_length
    inputs = {}  # of each request's block so far, a list by pass
    places = [None] * len(PROMPTS)
    compared = 0
    for each, seen in zip(trace, spy.passes, strict=True):
        if each.info.kind is PassKind.PREFILL:
            assert np.isnan(each.cosine).all()
            continue
        found = [[[] for _ in range(COSINE_GAPS)] for _ in seen.layers]
        for row, start in enumerate(each.block_starts):
            tokens = slice(row * L, row * L + L)
            after = each.outcome
            finished = not each.info.token_mask[tokens].any()
            commits = not each.info.masked[tokens].any() and not after.written[tokens].any()
            if finished or commits:
                continue
            if places[row] != start:
                places[row], inputs[row] = start, []
            now = np.stack([np.asarray(hidden, np.float64)[tokens] for _, hidden in seen.layers])
            for gap, before in enumerate(reversed(inputs[row][-COSINE_GAPS:])):
                for layer, values in enumerate(cosine(now, before)):
                    found[layer][gap] += values.tolist()
            inputs[row].append(now)
        expected = [[np.mean(values) if values else np.nan for values in gaps] for gaps in found]
        np.testing.assert_allclose(each.cosine, expected, atol=1e-5)
        compared += np.isfinite(each.cosine).sum()
    assert compared > 50
    engine.close()


def test_the_ring_keeps_eight_passes_per_row():
    """Rows of different age, more passes than the ring holds, a row that pauses; in bfloat16."""
    rng = np.random.default_rng(0)
    B, T, D = 2, 3, 8
    ring = jnp.zeros((COSINE_GAPS, B, T, D), jnp.bfloat16)
    mask = jnp.asarray([[True, True, True], [True, False, True]])
    iterations = np.array([0, 0], np.int32)
    kept = [[], []]
    for number in range(25):
        x = jnp.asarray(rng.standard_normal((B * T, D)), jnp.bfloat16)
        if number == 11:
            iterations[1], kept[1] = 0, []  # a new block
        taking = np.array([number % 7 != 3, True])
        told = np.where(taking, iterations, -1)
        ring, got = jax.jit(compare, static_argnums=2)(x, Comparison((ring,), jnp.asarray(told), mask), 0)
        now = np.asarray(x, np.float64).reshape(B, T, D)
        found = [[] for _ in range(COSINE_GAPS)]
        for row in np.flatnonzero(taking):
            for gap, before in enumerate(reversed(kept[row][-COSINE_GAPS:])):
                found[gap] += cosine(now[row], before)[np.asarray(mask[row])].tolist()
            kept[row].append(now[row])
        np.testing.assert_allclose(got, [np.mean(v) if v else np.nan for v in found], atol=1e-5)
        iterations += taking
    assert np.isfinite(got).all()


@pytest.fixture(scope="module")
def plain(model):
    """Text and logits without a recording."""
    engine = build(*model, "oled:dispatch=gpu", 6)
    return [result.output_ids for result in run(engine, PROMPTS)], engine.recorded


def test_recording_changes_nothing(watched, plain):
    assert watched[2] == plain[0]
    for (_, logits), (_, expected) in zip(watched[3], plain[1], strict=True):
        np.testing.assert_array_equal(logits, expected)


@pytest.mark.slow
def test_everything_resident_records_the_same(model, watched, plain, tmp_path):
    engine = build_plain(*model, "all")
    with engine.record(tmp_path / "t.npz", GREEDY, hidden=True) as writer:
        outputs = [result.output_ids for result in run(engine, PROMPTS)]
        run(engine, AGAIN)
    assert outputs == plain[0]
    trace = open_trace(tmp_path / "t.npz")
    assert trace.header.settings["policy"] == "all"
    assert len(trace) == writer.num_passes == len(watched[1])
    for got, expected in zip(trace, watched[1], strict=True):
        assert got.new_blocks == expected.new_blocks
        np.testing.assert_equal(got.prompts, expected.prompts)
        for one, other in ((got.info, expected.info), (got.outcome, expected.outcome)):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.masked, other.masked)
        real = expected.info.token_mask
        np.testing.assert_array_equal(got.expert_ids[:, real], expected.expert_ids[:, real])
        np.testing.assert_allclose(got.gates[:, real], expected.gates[:, real], atol=1e-5)
        np.testing.assert_allclose(got.cosine, expected.cosine, atol=1e-4)


def test_an_interrupted_run_is_readable_and_the_engine_records_again(model, watched, tmp_path):
    engine = build_plain(*model, "oled:dispatch=gpu", 6)
    path = tmp_path / "t.npz"

    def interrupted():
        with engine.record(path, GREEDY, hidden=True):
            stream = engine.stream(PROMPTS, GREEDY)
            for _ in range(12):
                next(stream)
            stream.close()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.warns(UserWarning, match="ends early"):
        trace = open_trace(path)
    assert 0 < len(trace) < len(watched[1])
    for got, expected in zip(trace, watched[1], strict=False):
        np.testing.assert_array_equal(got.expert_ids, expected.expert_ids)
    with engine.record(path, GREEDY, hidden=True):
        run(engine, AGAIN)
    assert next(iter(open_trace(path))).request_ids.tolist() == [0, 1]


def test_a_recording_is_of_one_block_length_and_begins_between_runs(model, tmp_path):
    engine = build_plain(*model, "lru", 6)
    with engine.record(tmp_path / "t.npz", GREEDY):
        with pytest.raises(UsageError, match="of block length 8, this run of 16"):
            run(engine, AGAIN, dataclasses.replace(GREEDY, block_length=16))
        with pytest.raises(RuntimeError, match="between runs"), engine.record(tmp_path / "u.npz", GREEDY):
            pass
    stream = engine.stream(AGAIN, GREEDY)
    next(stream)
    with pytest.raises(RuntimeError, match="between runs"), engine.record(tmp_path / "u.npz", GREEDY):
        pass
    stream.close()
    with pytest.raises(UsageError, match="no directory"), engine.record(tmp_path / "none" / "t.npz", GREEDY):
        pass
    assert not (tmp_path / "u.npz").exists()


# The command


@pytest.fixture
def command(monkeypatch, tmp_path, tiny_model, capsys):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "programs"))
    monkeypatch.chdir(tmp_path)
    short = ["--model", tiny_model, "--prompt", "x", "--gen-length", "16", "--block-length", "8", "--threshold", "0.3"]

    def command(*flags):
        code = generate.main([str(word) for word in (*short, *flags)])
        return code, capsys.readouterr().err

    return command


def test_the_command_records(command, tmp_path):
    code, err = command("--trace", "t.npz", "--policy", "all", "--stats-json", "s.json")
    assert code == 0
    trace = open_trace(tmp_path / "t.npz")
    assert f"trace: {len(trace)} passes" in err
    statistics = json.loads((tmp_path / "s.json").read_text())
    assert len(trace) == sum(statistics["requests"][0]["passes"].values())
    assert trace.header.settings.items() >= statistics["settings"].items()
    assert trace.header.model == statistics["model"]
    assert all(each.cosine is None for each in trace)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trace-hidden"], "--trace-hidden has no effect without --trace FILE"),
        (["--trace", "."], "is a directory"),
        (["--trace", "none/t.npz"], "there is no directory"),
        (["--trace", "/dev/null"], "no regular file"),
        (["--trace", "-"], "give it a name"),
        (["--trace", "s.json", "--stats-json", "./s.json"], "the same file"),
    ],
)
def test_a_users_mistake_is_found_before_anything_is_loaded(command, monkeypatch, tmp_path, flags, words):
    monkeypatch.setattr(generate, "open_model", lambda *_: pytest.fail("a model was opened"))
    code, err = command(*flags)
    assert code == 2
    assert words in err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
