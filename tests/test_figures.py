"""What every command that draws shares."""

import pytest
from matplotlib.figure import Figure

from oled_jax.errors import UsageError
from oled_jax.figures import save_figure


def test_a_plot_is_written_whole_or_not_at_all(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        save_figure(Figure(), tmp_path / "missing" / "a.png")
    (tmp_path / "a.png").mkdir()
    with pytest.raises(UsageError, match=r"a\.png cannot be written"):
        save_figure(Figure(), tmp_path / "a.png")
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
