"""`python -m oled_jax.traces`: both commands end to end at tiny size, and what they refuse."""

import importlib.util
import json

import numpy as np
import pytest

from oled_jax.traces import __main__ as command
from oled_jax.traces.files import open_trace
from oled_jax.traces.locality_meter import measure_locality

TINY = ["--layers", "2", "--experts", "16", "--top-k", "2", "--block-length", "4", "--tokens-per-iteration", "1.5"]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """Two synthetic traces, made by the command."""
    folder = tmp_path_factory.mktemp("traces")
    for name, seed in (("one", 0), ("two", 1)):
        assert (
            command.main(["synth", *TINY, "--iterations", "40", "--seed", str(seed), "--out", f"{folder}/{name}.npz"])
            == 0
        )
    return folder / "one.npz", folder / "two.npz"


@pytest.fixture
def run(capsys):
    def run(*argv):
        code = command.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_synth_writes_a_trace_and_says_what_it_achieved(run, tmp_path):
    out = tmp_path / "trace.npz"
    target = ["--boundary-overlap", "0.01", "--kept_masked", "0.7"]
    code, table, err = run("synth", *TINY, "--requests", 3, "--blocks", 2, "--prompt-tokens", 9, *target, "--out", out)
    assert code == 0
    trace = open_trace(out)
    assert trace.finished
    header = trace.header
    assert (header.source, header.num_layers, header.num_experts, header.block_length) == ("synthetic", 2, 16, 4)
    assert header.settings["targets"]["kept_masked"] == 0.7
    found = measure_locality(trace)
    assert [found.passes[kind] for kind in ("prefill", "commit")] == [3, 3]
    rows = {line[:24].strip(): line.split()[-2:] for line in table.splitlines()[1:]}
    assert rows["boundary overlap"] == ["0.010", f"{found.boundary.mean():.3f}"]
    assert rows["kept masked"] == ["0.700", f"{found.kept_by_state['masked']:.3f}"]
    assert "warning: target boundary_overlap of 0.01 was missed: it is" in err
    assert f"wrote {out}" in err


def test_synth_is_repeatable(run, traces, tmp_path):
    run("synth", *TINY, "--iterations", 40, "--out", tmp_path / "again.npz")
    again, first = open_trace(tmp_path / "again.npz"), open_trace(traces[0])
    assert len(again) == len(first)
    assert all(np.array_equal(a.expert_ids, b.expert_ids) for a, b in zip(again, first, strict=True))


def test_locality_shows_traces_side_by_side(run, traces):
    code, table, _ = run("locality", *traces)
    assert code == 0
    assert table.splitlines()[0].split() == ["one", "two"]
    found = [measure_locality(open_trace(path)) for path in traces]
    (row,) = [line for line in table.splitlines() if line.strip().startswith("1 iteration apart")][:1]
    assert row.split()[-2:] == [f"{each.overlap[0].mean():.3f}" for each in found]


def test_json_alone_on_standard_output(run, traces):
    code, out, _ = run("locality", *traces, "--json", "-")
    assert code == 0
    described = json.loads(out)["traces"]
    assert [each["name"] for each in described] == ["one", "two"]
    assert described[0]["file"] == str(traces[0])
    assert described[0]["header"]["num_experts"] == 16
    assert described[0]["passes"]["denoise"] == 40
    assert described[0]["adjacent_overlap"] == pytest.approx(described[0]["overlap_by_gap"][0])
    assert described[0]["overlap_by_gap"][7] is None  # blocks of four have no eighth iteration


def test_plots_of_what_there_is(run, traces, tmp_path):
    out = tmp_path / "new" / "folder"
    code, _, err = run("locality", *traces, "--out", out, "--json", tmp_path / "found.json")
    assert code == 0
    drawn = sorted(path.name for path in out.iterdir())
    assert drawn == ["cost.png", "layers.png", "overlap.png", "stability.png"]  # no cosines were recorded
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in drawn)
    assert err.count("wrote ") == 4
    assert len(json.loads((tmp_path / "found.json").read_text())["traces"]) == 2


def test_traces_of_one_name_are_told_apart_by_their_folders(run, traces, tmp_path):
    other = tmp_path / "one.npz"
    other.write_bytes(traces[1].read_bytes())
    code, out, _ = run("locality", traces[0], other)
    assert code == 0
    assert out.splitlines()[0].split() == [str(traces[0]), str(other)]


def test_only_plots_need_matplotlib(run, traces, monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, out, err = run("locality", traces[0], "--out", tmp_path / "plots")
    assert (code, out) == (2, "")
    assert "pip install 'oled_jax[plots]'" in err
    assert not (tmp_path / "plots").exists()
    assert run("locality", traces[0])[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "required: synth|locality"),
        (["show"], "invalid choice: 'show'"),
        (["synth", "--preset", "llada2-mini"], "required: --out"),
        (["synth", "--layers", "2", "--out", "x"], "without a preset needs num_experts and top_k"),
        (["synth", "--preset", "mini", "--out", "x"], "invalid choice: 'mini'"),
        (["synth", *TINY, "--iterations", "5", "--requests", "2", "--out", "x"], "give one of them"),
        (["synth", *TINY, "--adjacent-overlap", "1.5", "--out", "x"], "1.5 is out of range"),
        (["synth", *TINY, "--distinct-experts", "9", "--out", "x"], "activate from 2 to 8"),
        (["synth", *TINY, "--out", "missing/x"], "there is no directory"),
        (["locality"], "required: FILE"),
        (["locality", "missing.npz"], "there is no trace missing.npz"),
        (["locality", "notes.txt"], "notes.txt is no routing trace"),
        (["locality", "notes.txt", "notes.txt"], "named twice"),
        (["locality", "notes.txt", "--json", "missing/a.json"], "there is no directory"),
        (["locality", "notes.txt", "--out", "notes.txt"], "--out notes.txt cannot be made"),
    ],
)
def test_mistakes_end_with_one_line(run, words, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.txt").write_text("not a trace")
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_damaged_trace_is_no_traceback(run, traces, tmp_path):
    data = bytearray(traces[0].read_bytes())
    data[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
    (tmp_path / "damaged.npz").write_bytes(data)
    code, out, err = run("locality", tmp_path / "damaged.npz")
    assert (code, out) == (2, "")
    assert "damaged" in err.splitlines()[-1]
