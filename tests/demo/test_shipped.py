"""The shipped model's files: found when whole, named when missing or damaged."""

import jax
import pytest
from toy import RAW, SETTINGS

from oled_jax.demo.shipped import NEEDED, check_model_dir
from oled_jax.demo.training import sizes
from oled_jax.demo.training.export import export_checkpoint
from oled_jax.demo.training.step import init_params, new_state
from oled_jax.demo.training.vocabulary import train_tokenizer
from oled_jax.errors import UsageError


@pytest.fixture
def shipped(tmp_path):
    state = new_state(SETTINGS, init_params(SETTINGS.config, 0))
    export_checkpoint(tmp_path, jax.device_get(state), train_tokenizer(512, 50, 0), RAW, sizes.GENERATION)
    return tmp_path


def test_whole_files_are_accepted(shipped):
    assert check_model_dir(shipped) == shipped


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_file_is_named_with_the_way_back(shipped, name):
    (shipped / name).unlink()
    with pytest.raises(UsageError, match=rf"{name}.*reinstall"):
        check_model_dir(shipped)


@pytest.mark.parametrize("name", NEEDED)
def test_a_damaged_file_is_named_with_the_way_back(shipped, name):
    path = shipped / name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(UsageError, match=rf"{name}.*reinstall"):
        check_model_dir(shipped)
