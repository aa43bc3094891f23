"""`bench paper`: the whole command over a tiny model, its JSON against the schema, and what must be true of any run."""

import csv
import dataclasses
import json
from collections import Counter
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from made_profile import PROFILE
from matplotlib.figure import Figure
from tiny_model import GENERATION_CONFIG, write_tiny_model

from oled_jax import figures
from oled_jax.bench.__main__ import main
from oled_jax.bench.paper import lineup, published, shapes, writers
from oled_jax.bench.paper.checkpoint import CheckpointSubject
from oled_jax.bench.paper.estimates import Estimates
from oled_jax.bench.paper.published import SYNTHETIC, PublishedSubject
from oled_jax.bench.paper.record import Method
from oled_jax.bench.paper.registry import BY_NUMBER, FIGURES
from oled_jax.bench.paper.schema import SCHEMA
from oled_jax.bench.paper.subject import RunSettings, Work
from oled_jax.errors import UsageError
from oled_jax.loading import open_model
from oled_jax.machine import MEMORY_FRACTION_VARIABLE
from oled_jax.models.published import PUBLISHED
from oled_jax.models.registry import config_from_hf
from oled_jax.offload.store import PINNED_LIMIT_VARIABLE
from oled_jax.policies.registry import POLICIES

pytestmark = [pytest.mark.usefixtures("roomy_kv_cache"), pytest.mark.slow]


CAPACITY = 8  # of 32, fewer than a pass activates


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """Two small MoE layers and nothing else; blocks take few passes."""
    model = write_tiny_model(tmp_path_factory.mktemp("paper") / "tiny", num_hidden_layers=2, first_k_dense_replace=0)
    (model / "generation_config.json").write_text(json.dumps(GENERATION_CONFIG | {"steps": 4}))
    return model


@pytest.fixture(scope="module")
def out(model) -> Path:
    """Every figure of the model. Each is drawn, one picture of each is saved: text takes most of the time."""
    folder = model.parent / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "save_figure", save_roughly)
        patch.setattr(shapes, "QUICK_BATCHES", (1,))  # another batch is three more programs to compile
        patch.setattr(lineup, "capacities", lambda num_experts: (CAPACITY,))
        words = ["--quick", "--model", str(model), "--out", str(folder), "--cpu-experts", "numpy"]
        assert main(["paper", *words]) == 0
    return folder


def save_roughly(figure: Figure, path: Path) -> None:
    """The first picture of a figure, of few pixels; of the others the name."""
    if any(path.parent.glob(f"{path.stem.partition('-')[0]}*.png")):
        path.touch()
        return
    figure.set_layout_engine("none")
    figures.save_figure(figure, path)


def read(out: Path, number: int) -> dict:
    return json.loads((out / f"{BY_NUMBER[number].name}.json").read_text())


def mean(row: dict, name: str) -> float:
    return row["values"][name]["mean"]


def test_every_figure_has_json_csv_and_pictures(out):
    assert sorted(BY_NUMBER) == [4, 5, 6, 7, 10, 12, 13, 14, 15, 16, 17, 18]
    for figure in FIGURES:
        described = json.loads((out / f"{figure.name}.json").read_text())
        jsonschema.validate(described, SCHEMA)
        assert described["figures"] == list(figure.numbers)
        assert described["settings"]["quick"]
        with (out / f"{figure.name}.csv").open() as file:
            lines = list(csv.DictReader(file))
        assert len(lines) == sum(len(row["values"]) for row in described["rows"])
        assert {line["source"] for line in lines} == {row["source"] for row in described["rows"]}
        pictures = list(out.glob(f"{figure.name}*.png"))
        assert pictures
        assert any(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_a_row_says_whether_it_was_measured(out):
    sources = {"generated": "measured", "replayed": "measured", "simulated": "estimated", "routing": "counted"}
    for figure in FIGURES:
        for row in json.loads((out / f"{figure.name}.json").read_text())["rows"]:
            assert row["source"] == sources[row["method"]]
    estimated = read(out, 12)["estimated_with"]
    assert all("no measurement of this machine" in origins[0] for origins in estimated.values())


def test_nobody_beats_what_is_possible(out):
    for number in (12, 13, 15, 16, 17):
        for row in read(out, number)["rows"]:
            if "utilization" in row["values"]:
                assert mean(row, "utilization") <= min(1.0, mean(row, "activated_per_slot")) + 1e-9
                assert 0 <= mean(row, "hit_rate") <= 1


def test_the_comparison_has_every_policy_and_the_oracle_hits_most(out):
    rows = read(out, 12)["rows"]
    for panel in ("measured", "estimated"):
        here = [row for row in rows if row["panel"] == panel and row["capacity"] == CAPACITY]
        assert {row["policy"] for row in here} == set(POLICIES) - {lineup.reference()}
        best = next(mean(row, "hit_rate") for row in here if row["policy"] == lineup.ORACLE)
        assert all(mean(row, "hit_rate") <= best + 1e-9 for row in here)
        assert best > max(mean(row, "hit_rate") for row in here if row["policy"] == lineup.LRU)


def test_every_policy_writes_the_same_text(out):
    rows = [row for row in read(out, 12)["rows"] if row["method"] == "generated"]
    assert {row["policy"] for row in rows} >= {*lineup.deployable(), lineup.reference()}
    assert len({row["digest"] for row in rows}) == 1
    assert read(out, 12)["notes"] == []


@pytest.mark.parametrize("policy", ["lru", "belady", "oracle"])
def test_a_simulated_run_counts_what_the_engine_counted(out, policy):
    """Whether it generated or replayed: the cache of these depends on no cost, and the oracle's hits on no transfer."""
    names = ["hit_rate", "utilization", "activated", "tokens_per_pass"] + ["to_gpu"] * (policy != "oracle")
    rows = [row for row in read(out, 12)["rows"] if row["policy"] == policy]
    counts = [[mean(row, name) for name in names] for row in rows]
    assert len(counts) == 2
    np.testing.assert_allclose(counts[0], counts[1])


def test_mechanisms_and_parts_are_all_there(out):
    panels = Counter(row["panel"] for row in read(out, 15)["rows"])
    assert {"steps": 4, "retention": 3, "allocation": 2, "dispatch": 2}.items() <= panels.items()
    steps = [row for row in read(out, 15)["rows"] if row["setting"] == "+ dispatch" and row["panel"] == "steps"]
    assert len(steps) == 1
    parts = [row for row in read(out, 14)["rows"] if row["panel"] == "parts"]
    whole = [row for row in read(out, 14)["rows"] if row["policy"] == "oled" and row["panel"] == "prefill"]
    wholes = {row["capacity"]: mean(row, "ttft_ms") for row in whole}
    assert sum(mean(row, "part_ms") for row in parts) == pytest.approx(wholes[CAPACITY])


def test_what_the_simulator_estimates(out):
    on_cpu = {row["policy"] for row in read(out, 6)["rows"] if mean(row, "reused_on_cpu") > 0}
    assert "ktransformers" in on_cpu
    assert "lru" not in on_cpu
    evicted = {row["policy"]: mean(row, "useful_evicted") for row in read(out, 6)["rows"]}
    assert evicted["lru"] > 0
    assert evicted["ktransformers"] == 0  # it never moves a page
    links = [row for row in read(out, 17)["rows"] if row["panel"] == "bandwidth" and row["policy"] == "lru"]
    times = [mean(row, "tpot_ms") for row in links]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--figure", "3"], "--figure 3: there are counterparts of figures 4, 5"),
        (["--figure", "x"], "--figure"),
        (["--repeats", "0"], "--repeats"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--layers", "3"], "--layers: --model demo has its own layers"),
        (["--profile", "/nowhere.json"], "--profile /nowhere.json cannot be read"),
        (["--out", "/dev/null/here"], "--out /dev/null/here cannot be made"),
    ],
)
def test_mistakes_are_one_line(words, message, tmp_path, capsys):
    rest = [] if "--out" in words else ["--out", str(tmp_path)]
    assert main(["paper", *words, *rest]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_profile_of_other_pages_is_refused(tmp_path, capsys):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps(PROFILE.as_json()))
    assert main(["paper", "--profile", str(profile), "--out", str(tmp_path)]) == 2
    assert "is about other pages than those of llada2-mini and llada2-flash" in capsys.readouterr().err


def test_estimates_go_by_a_given_profile_of_the_right_size(tmp_path):
    """Mini's pages from a file, flash's built in."""
    page = {"hidden": 2048, "width": 512, "dtype": "bfloat16"}
    profile = dataclasses.replace(PROFILE, key=dataclasses.replace(PROFILE.key, **page))
    path = tmp_path / "mini.json"
    path.write_text(json.dumps(profile.as_json()))
    settings = RunSettings(repeats=1, requests=1, backend="numpy", threads=None, carrier="auto", quick=True)
    subject = published_of(settings)
    given = Estimates(subject, [path], is_demo=True)
    assert given.hardware("llada2-mini").alone.h2d_us == PROFILE.alone.h2d_us
    assert given.hardware("llada2-mini").ffn  # a quick profile has none: the built-in one stands in
    assert given.hardware("llada2-flash").alone.h2d_us == pytest.approx(480.0)
    assert "mini.json" in given.origins["llada2-mini"][0]
    batched = Work(workload=SYNTHETIC, batch=2)
    row = given.row("here", batched, "lru", 40, size="llada2-mini")
    assert row.method is Method.SIMULATED
    assert row.values["activated"].mean > 55  # of one row it would be 49
    assert all(step.info.token_ids.size in (32, 256) for step in subject.trace(batched))


def test_a_published_size_says_how_much_of_it_fits(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
    monkeypatch.setenv(PINNED_LIMIT_VARIABLE, "1")  # that a store of 200 GB raises it ends with the test
    monkeypatch.setattr(published, "fitting_layers", lambda config: 5)
    settings = RunSettings(repeats=1, requests=1, backend="numpy", threads=None, carrier="auto", quick=True)
    subject = published.published_subject("flash-random", settings)
    assert subject.config.num_moe_layers == 4
    assert "5 of 32 layers, as many as memory holds" in subject.description
    fewer = published.published_subject("flash-random", settings, layers=3)
    assert fewer.config.num_moe_layers == 2
    assert "3 of 32 layers, as --layers says" in fewer.description
    for layers in (1, 6):
        with pytest.raises(UsageError, match=f"--layers {layers}: choose 2 to 5"):
            published.published_subject("flash-random", settings, layers=layers)
    monkeypatch.setattr(published, "fitting_layers", lambda config: 1)
    assert main(["paper", "--model", "mini-random", "--out", str(tmp_path)]) == 2
    assert "not one MoE layer fits here, its experts take 1.61 GB" in capsys.readouterr().err


def test_prompts_come_in_batches_of_the_wanted_length(model):
    settings = RunSettings(repeats=1, requests=2, backend="numpy", threads=None, carrier="auto", quick=False)
    subject = CheckpointSubject(open_model(str(model)), settings)
    assert subject.workloads == ("math", "code", "qa")
    single, double = (subject.batches(Work(workload="code", batch=batch)) for batch in (1, 2))
    assert [len(batch) for batch in single] == [1, 1, 1]  # one is the warm-up
    assert [len(batch) for batch in double] == [2, 2]
    assert single[0][0] == double[0][0] != single[1][0]
    long = subject.batches(Work(workload="code", prompt_tokens=5000))
    assert {len(prompt) for batch in long for prompt in batch} == {5000}
    assert long[0] != long[1]


def test_the_demo_model_decodes_at_the_published_pace(model):
    settings = RunSettings(repeats=1, requests=2, backend="numpy", threads=None, carrier="auto", quick=False)
    demo = CheckpointSubject(open_model(None), settings)
    assert (demo.decoding.steps, demo.decoding.threshold) == (5, 1.0)
    assert demo.decoding_of(Work(workload="qa", block_length=64)).steps == 21
    assert demo.decoding_of(Work(workload="qa", editing=True)).editing
    other = CheckpointSubject(open_model(str(model)), settings)
    assert (other.decoding.steps, other.decoding.threshold) == (4, 0.5)  # as its own file says


def published_of(settings: RunSettings) -> PublishedSubject:
    """Mini with two MoE layers; no weights are made unless something is measured."""
    config = dataclasses.replace(config_from_hf(PUBLISHED["llada2-mini"]), num_hidden_layers=3)
    return PublishedSubject("mini-random", "llada2-mini", config, settings)
