"""The fit, the profile's validation and its JSON, the table, and the files that keep profiles."""

import copy
import dataclasses
import json
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from profile_schema import SCHEMA
from profiles import KEY, PROFILE, line

from oled_jax.cost.cache import load_profile, profile_path, save_profile
from oled_jax.cost.profile import CostProfile, CpuLine, CpuTime, Figures, profile_from_json
from oled_jax.cost.table import profile_table


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def times(**us: float) -> list[CpuTime]:
    return [CpuTime(tokens=int(n[1:]), threads=1, us=value) for n, value in us.items()]


class TestFit:
    @pytest.mark.parametrize(("fixed_us", "token_us"), [(90.0, 8.0), (0.0, 5.0), (300.0, 0.0), (1e6, 1e-2)])
    def test_exact_times_give_their_line(self, fixed_us, token_us):
        fitted = line(fixed_us, token_us)
        assert (fitted.fixed_us, fitted.token_us) == pytest.approx((fixed_us, token_us), rel=1e-6, abs=1e-6)

    def test_it_is_the_least_relative_error(self):
        points = times(n1=100.0, n2=90.0, n4=130.0, n8=160.0, n16=300.0)
        fitted = CpuLine.fit(points)
        n, us = np.array([(point.tokens, point.us) for point in points]).T
        best, *_ = np.linalg.lstsq(np.stack([1 / us, n / us], axis=1), np.ones(5))
        assert (fitted.fixed_us, fitted.token_us) == pytest.approx(tuple(best))

    def test_neither_coefficient_is_negative(self):
        falling = CpuLine.fit(times(n1=100.0, n2=90.0, n16=80.0))
        assert falling.token_us == 0
        assert 80 < falling.fixed_us < 100
        steep = CpuLine.fit(times(n1=10.0, n2=30.0, n4=80.0))
        assert steep.fixed_us == 0
        assert 10 < steep.token_us < 20

    @pytest.mark.parametrize("us", [0.0, -1.0, float("nan"), float("inf")])
    def test_no_time_is_zero_or_nan(self, us):
        with pytest.raises(ValueError, match="positive number"):
            CpuTime(tokens=1, threads=1, us=us)
        with pytest.raises(ValueError, match="positive number"):
            Figures(h2d_us=us, cpu=None)


def as_read() -> dict:
    """The object as it comes back from a file."""
    return json.loads(json.dumps(PROFILE.as_json()))


class TestJson:
    def test_it_comes_back_as_it_was(self):
        assert profile_from_json(as_read()) == PROFILE
        jsonschema.validate(as_read(), SCHEMA)
        quick = dataclasses.replace(
            PROFILE, alone=Figures(h2d_us=1.0, cpu=None), ffn=(), threads=(), host_read_gbs=None
        )
        assert profile_from_json(json.loads(json.dumps(quick.as_json()))) == quick

    def test_policies_go_by_the_times_while_both_run(self):
        costs = PROFILE.costs
        assert isinstance(costs, CostProfile)
        assert costs.h2d_us == 170.0
        assert costs.cpu_us(3.0) == pytest.approx(224.0)

    @pytest.mark.parametrize(
        ("path", "value"),
        [
            (("version",), 3),
            (("alone", "h2d_us"), 0),
            (("together", "h2d_us"), "fast"),
            (("together", "cpu"), None),
            (("together", "cpu", "token_us"), -1.0),
            (("together", "cpu", "points", 0, "us"), True),
            (("threads",), None),
            (("key",), {"device": "x"}),
            (("host_read_gbs",), -3),
            (("surplus",), 1),
        ],
    )
    def test_what_is_no_profile_is_refused(self, path, value):
        damaged = copy.deepcopy(as_read())
        inner = damaged
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = value
        with pytest.raises(ValueError, match=r"."):
            profile_from_json(damaged)

    def test_the_table_shows_every_figure(self):
        table = profile_table(PROFILE)
        for words in (
            "Some GPU 80GB", "6.29 MB; pinned", "120.0         170.0  52.4 / 37.0 GB/s",
            "fit: alone 90 + 6 n, both at once 200 + 8 n", "16 tokens", "the fastest: --cpu-threads 6",
            "64 pages, 16 tokens", "90.0 GB/s",
        ):  # fmt: skip
            assert words in table
        assert "nan" not in table


class TestFiles:
    def test_a_saved_profile_is_found_under_its_key_only(self):
        assert load_profile(KEY) == (None, None)
        path = save_profile(PROFILE)
        assert path == profile_path(KEY)
        assert load_profile(KEY) == (PROFILE, None)
        assert [file.name for file in path.parent.iterdir()] == [path.name], "nothing unfinished is left"
        for change in (
            {"device": "Other"}, {"hidden": 4096}, {"dtype": "float32"}, {"threads": 5}, {"backend": "numba"},
            {"jax": "0.11.2"}, {"cpus": 8},
        ):  # fmt: skip
            assert load_profile(dataclasses.replace(KEY, **change)) == (None, None)

    @pytest.mark.parametrize(
        "content", [b"", b"{", b"[1]", b"\xff\xfe", b'{"version": 0}', b'{"version": 1, "key": {}}']
    )
    def test_a_damaged_file_is_named_and_not_used(self, content):
        path = save_profile(PROFILE)
        path.write_bytes(content)
        profile, problem = load_profile(KEY)
        assert profile is None
        assert str(path) in problem

    def test_a_file_of_another_key_is_not_used(self):
        other = dataclasses.replace(PROFILE, key=dataclasses.replace(KEY, cpu="Other CPU"))
        profile_path(KEY).parent.mkdir(parents=True)
        profile_path(KEY).write_text(json.dumps(other.as_json()))
        profile, problem = load_profile(KEY)
        assert profile is None
        assert "another machine" in problem

    def test_a_directory_that_cannot_be_written_is_a_warning(self, tmp_path):
        (tmp_path / "oled_jax").write_text("a file where the directory should be")
        with pytest.warns(UserWarning, match="cannot be saved"):
            assert save_profile(PROFILE) is None
        profile, problem = load_profile(KEY)
        assert profile is None
        assert "cannot be used" in problem


def test_what_policies_import_starts_no_jax():
    code = (
        "import sys; import oled_jax.cost.profile, oled_jax.cost.cache, oled_jax.cost.table; "
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
