"""Policies and capacities as users write them."""

import pytest

from oled_jax.errors import UsageError
from oled_jax.sim.cells import Cell, chosen_cells


def test_policies_as_given_and_capacities_ascending():
    cells = chosen_cells("oled:dispatch=gpu, lru", "all,40,16%,0.1%", 256)
    assert [(cell.policy, cell.capacity) for cell in cells] == [
        (policy, capacity) for policy in ("oled:dispatch=gpu", "lru") for capacity in (1, 40, 41, 256)
    ]


def test_everything_resident_is_one_cell():
    cells = chosen_cells("lru,all", "2,4", 16)
    assert cells[-1] == Cell(policy="all", capacity=16)
    assert [cell.policy for cell in cells] == ["lru", "lru", "all"]
    assert chosen_cells("all", None, 16) == [Cell(policy="all", capacity=16)]


@pytest.mark.parametrize(
    ("policies", "capacities", "message"),
    [
        ("lru", None, "--capacity is missing"),
        ("all", "40", "leave out --capacity"),
        ("lru", "0", "--capacity 0: .* from 1 to 256"),
        ("lru", "257", "--capacity 257: .* from 1 to 256"),
        ("lru", "-3", "--capacity -3: "),
        ("lru", "4.5", "--capacity 4.5: "),
        ("lru", "0%", "--capacity 0%: "),
        ("lru", "101%", "--capacity 101%: "),
        ("lru", "nan%", "--capacity nan%: "),
        ("lru", "", "--capacity : "),
        ("lru", "40,40", "--capacity: 40 is given twice"),
        ("lru", "50%,128", "--capacity: 50% and 128 are the same"),
        ("lru,lru", "40", "--policy: lru is given twice"),
        ("lrru", "40", "unknown policy 'lrru'.*did you mean 'lru'"),
        ("lru,", "40", "unknown policy ''"),
        ("oled:dispatch=tpu", "40", "dispatch=tpu"),
    ],
)
def test_what_makes_no_grid_is_refused(policies, capacities, message):
    with pytest.raises(UsageError, match=message):
        chosen_cells(policies, capacities, 256)
