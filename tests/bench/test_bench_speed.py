"""`bench speed` before it measures; its replays are those of `bench paper`, which test_bench_paper.py runs."""

import pytest

from oled_jax.bench import speed
from oled_jax.errors import UsageError


class PreparedError(Exception):
    """The runtime's settings were made."""


def test_jax_is_not_asked_before_its_settings_are_made(monkeypatch):
    def prepare(store_bytes: int) -> None:
        assert store_bytes == 19 * 256 * 3 * 512 * 2048 * 2
        raise PreparedError

    def choose(carrier: str) -> None:
        pytest.fail(f"carrier {carrier} was looked for, which starts JAX")

    monkeypatch.setattr(speed, "prepare_runtime", prepare)
    monkeypatch.setattr(speed, "choose", choose)
    with pytest.raises(PreparedError):
        speed.command(["--layers", "20"])


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no trace"):
        speed.command(["--layers", "2", "--trace", str(tmp_path / "missing.trace"), "--policies", "all"])
