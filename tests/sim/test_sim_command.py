"""`python -m oled_jax.sim`: one grid through files, and one clear line for every mistake."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_profile import PROFILE
from made_traces import HEADER, made_trace

from oled_jax.offload.statistics import GROUPS
from oled_jax.sim.__main__ import main
from oled_jax.traces.files import TraceWriter


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path = tmp_path_factory.mktemp("sim") / "made.trace"
    with TraceWriter(path, HEADER) as writer:
        for step in made_trace(requests=2):
            writer.add(step)
    return str(path)


def fails(capsys, *argv: str) -> str:
    """The one line of a command that a user got wrong."""
    assert main([*argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("oled_jax.sim: error: ")
    return line


def test_a_grid_as_table_json_and_csv(trace, tmp_path, capsys):
    found, rows = tmp_path / "found.json", tmp_path / "rows.csv"
    argv = [trace, "--policy", "oled,belady,all", "--capacity", "25%,8", "--h2d-gbs", "25", "--cpu-gbs", "10"]
    assert main([*argv, "--carrier", "native", "--jobs", "1", "--json", str(found), "--csv", str(rows)]) == 0
    captured = capsys.readouterr()
    decode = [line.split()[:2] for line in captured.out.splitlines()[2:7]]
    expected = [("oled", 4), ("oled", 8), ("belady", 4), ("belady", 8), ("all", 16)]
    assert decode == [[policy, str(capacity)] for policy, capacity in expected]
    assert "given: 25 GB/s" in captured.err
    assert "as the policy claims" in captured.err
    written = json.loads(found.read_text())
    assert [(cell["policy"], cell["capacity"]) for cell in written["cells"]] == expected
    assert written["trace"]["model"] == HEADER.model
    assert written["assumed"]["carrier"] == "native"
    assert written["hardware"]["together"]["h2d_us"] == pytest.approx(24_576 / 25e3)
    table = list(csv.DictReader(io.StringIO(rows.read_text())))
    assert [row["passes_of"] for row in table] == [*GROUPS] * len(expected)
    assert float(table[0]["hit_rate"]) == written["cells"][0]["cache"]["hit_rate"]
    assert float(table[0]["pass_us_total"]) == written["cells"][0]["cache"]["pass_us"]["total"]


def test_every_cell_says_what_is_known(trace, capsys):
    assert main([trace, "--policy", "oled,sida", "--capacity", "4", "--jobs", "1", "--json", "-"]) == 0
    captured = capsys.readouterr()
    oled, sida = json.loads(captured.out)["cells"]
    assert "hits" in captured.err.split("decode")[1], "the table is on standard error"
    for cell in (oled, sida):
        decode, prefill = cell["cache"], cell["cache_prefill"]
        assert decode["passes"] == 12
        assert prefill["passes"] == 2
        assert cell["tokens"] == 12
        total = sum(cell[name]["pass_us"]["total"] * cell[name]["passes"] for name in ("cache", "cache_commit"))
        assert cell["tpot_s"] == pytest.approx(total / 12 / 1e6)
        assert decode["planning_us"] is None
        assert decode["prefetch_wasted"] == decode["prefetched"] - decode["prefetch_used"] >= 0
    assert oled["cache"]["cpu_share"] == oled["cache"]["to_cpu"] / oled["cache"]["misses"] > 0
    assert sida["cache"]["prefetched"] > 0
    assert sida["cache"]["pass_us"]["late"] > 0


def test_processes_find_what_one_finds(trace, tmp_path):
    cells = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        assert main([trace, "--policy", "oled,oracle", "--capacity", "4", "--jobs", jobs, "--json", str(path)]) == 0
        cells.append([{**cell, "replay_s": None} for cell in json.loads(path.read_text())["cells"]])
    assert cells[0] == cells[1]


def test_a_profile_brings_its_carrier(trace, tmp_path, capsys):
    path, found = tmp_path / "profile.json", tmp_path / "found.json"
    path.write_text(json.dumps(PROFILE.as_json()))
    argv = [trace, "--policy", "lru", "--capacity", "4", "--jobs", "1", "--profile", str(path)]
    assert main([*argv, "--json", str(found)]) == 0
    written = json.loads(found.read_text())
    assert written["assumed"]["carrier"] == "native"
    assert written["cells"][0]["cache"]["pass_us"]["demand"] > 0
    assert "Some GPU" in capsys.readouterr().err
    assert "was measured with the native carrier" in fails(capsys, *argv, "--carrier", "portable")


def test_the_list_of_policies_needs_no_trace(capsys):
    assert main(["--policy", "list"]) == 0
    assert "belady" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--capacity 0", "--capacity 0: it must be a whole number"),
        ("--capacity 17", "from 1 to 16"),
        ("--policy lrru --capacity 4", "unknown policy 'lrru'"),
        ("--policy oled:swaps=-1 --capacity 4", "swaps is -1"),
        ("--policy lru --capacity 4 --cpu-gbs 10", "--cpu-gbs has no effect"),
        ("--policy lru --capacity 4 --cpu-experts on", "--cpu-experts has no effect"),
        ("--policy oled --capacity 4 --cpu-gbs 10 --cpu-experts off", "no effect with --cpu-experts off"),
        ("--policy tide --capacity 4 --cpu-experts off", "computes misses on the CPU"),
        ("--policy all --h2d-gbs 10", "--h2d-gbs has no effect"),
        ("--capacity 4 --h2d-gbs 0", "must be above 0"),
        ("--capacity 4 --trunk-us -1", "must be at least 0"),
        ("--capacity 4 --profile none.json", "none.json cannot be read"),
        ("--capacity 4 --profile none.json --h2d-gbs 3", "leave out --h2d-gbs"),
        ("--capacity 4 --json - --csv -", "both want standard output"),
        ("--capacity 4 --json no/such/folder.json", "there is no directory"),
        ("--capacity 4 --carrier pigeon", "invalid choice: 'pigeon'"),
        ("--capacity 4 --jobs 0", "must be at least 1"),
    ],
)
def test_mistakes_are_named(trace, tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    assert message in fails(capsys, trace, *flags.split())
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_trace_is_refused(trace, tmp_path, capsys):
    assert "the trace is missing" in fails(capsys, "--capacity", "4")
    assert "no trace" in fails(capsys, str(tmp_path / "none.trace"), "--capacity", "4")
    other = tmp_path / "other.trace"
    other.write_text("something else")
    assert "is no routing trace" in fails(capsys, str(other), "--capacity", "4")
    whole = tmp_path / "short.trace"
    whole.write_bytes(Path(trace).read_bytes()[:600])
    assert "record it again" in fails(capsys, str(whole), "--capacity", "4")


def test_plots_without_matplotlib_are_refused(trace, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = fails(capsys, trace, "--capacity", "4", "--out", str(tmp_path / "plots"))
    assert "pip install 'oled_jax[plots]'" in line


def test_plots_are_pictures(trace, tmp_path):
    pytest.importorskip("matplotlib")
    argv = [trace, "--policy", "oled,all", "--capacity", "4,8", "--jobs", "1", "--out", str(tmp_path / "plots")]
    assert main(argv) == 0
    names = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert names == ["hit_rate.png", "loads.png", "pass_time.png", "tpot.png", "utilization.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in (tmp_path / "plots").iterdir())


@pytest.mark.slow
def test_the_module_runs(trace):
    command = [sys.executable, "-m", "oled_jax.sim", trace, "--policy", "lru", "--capacity", "4", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2].startswith("lru")
