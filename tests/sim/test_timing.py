"""The time model, against figures worked out by hand."""

import itertools

import pytest

from oled_jax.cost.profile import CostProfile, FfnTime
from oled_jax.passes import PassKind
from oled_jax.sim.hardware import Hardware
from oled_jax.sim.replay import BEFORE, LayerWork, PassWork
from oled_jax.sim.timing import Carrier, TimeModel, TimeOptions, ffn_us

HARDWARE = Hardware(
    alone=CostProfile(h2d_us=100.0, cpu_fixed_us=50.0, cpu_token_us=10.0),
    together=CostProfile(h2d_us=150.0, cpu_fixed_us=80.0, cpu_token_us=20.0),
    ffn=(FfnTime(pages=1, tokens=16, us=5.0),),
    origins=(),
)


def layer(moved=0, resident=0, cpu=0, tokens=0) -> LayerWork:
    return LayerWork(moved, resident, moved, cpu, tokens)


def time_of(*layers: LayerWork, ahead=(), planned=True, **options):
    work = PassWork(PassKind.DENOISE, 16, list(layers), planned, ahead)
    return TimeModel(HARDWARE, TimeOptions(**options)).pass_time(work)


def test_a_layer_of_hits_takes_its_ffn():
    assert time_of(layer(resident=40)).total == 40 * 5


@pytest.mark.parametrize(("carrier", "total"), [(Carrier.PORTABLE, 300 + 43 * 5), (Carrier.NATIVE, 300 + 3 * 5)])
def test_transfers_come_before_the_ffn_or_beside_that_of_residents(carrier, total):
    time = time_of(layer(moved=3, resident=40), carrier=carrier)
    assert (time.total, time.demand, time.ffn) == (total, 300, 43 * 5)


def test_where_residents_take_longer_the_native_carrier_hides_all_transfers():
    assert time_of(layer(moved=1, resident=40), carrier=Carrier.NATIVE).total == 40 * 5 + 5


def test_the_cpu_runs_beside_the_device():
    slow = time_of(layer(moved=2, resident=1, cpu=3, tokens=9))
    assert slow.cpu == 3 * 80 + 9 * 20
    assert slow.total == max(2 * 150 + 3 * 5, slow.cpu)
    assert time_of(layer(moved=9, cpu=1, tokens=1)).total == 9 * 150 + 9 * 5


def test_a_side_that_runs_alone_has_the_times_of_one_that_does():
    assert time_of(layer(cpu=2, tokens=3)).total == 2 * 50 + 3 * 10
    assert time_of(layer(moved=2)).demand == 200


def test_the_rest_of_layers_and_pass_adds():
    time = time_of(layer(resident=2), layer(resident=4), trunk_us=30.0, planning_us=7.0, head_us=1000.0)
    assert time.total == 6 * 5 + 2 * 37 + 1000


def test_where_nothing_is_planned_planning_takes_no_time():
    assert time_of(layer(resident=2), planned=False, trunk_us=30.0, planning_us=7.0).total == 2 * 5 + 30


def test_a_prefetch_hides_behind_the_layers_in_between():
    """Asked for by layer 0, needed by layer 2: it has the FFN of layers 0 and 1."""
    hidden = time_of(layer(resident=10), layer(resident=10), layer(resident=1), ahead=[(0, 2)])
    assert (hidden.late, hidden.ahead, hidden.total) == (0, 100, 21 * 5)
    late = time_of(layer(resident=10), layer(resident=4), layer(resident=1), ahead=[(0, 2)])
    assert (late.late, late.total) == (100 - 14 * 5, 15 * 5 + 30)


def test_demand_comes_before_prefetches():
    """While layer 0's transfer moves, the page for layer 1 waits: it has layer 0's FFN alone."""
    time = time_of(layer(moved=1, resident=3), layer(resident=1), ahead=[(0, 1)])
    assert time.late == 100 - 4 * 5
    assert time.total == 100 + 4 * 5 + time.late + 5


def test_pages_staged_before_a_pass_have_the_trunk_of_the_first_layer():
    time = time_of(layer(resident=2), layer(resident=2), ahead=[(BEFORE, 0), (BEFORE, 1)], trunk_us=60.0)
    # 60 us of the first page are gone when layer 0 is routed; 10 + 60 us of the second when layer 1 is.
    assert time.late == (100 - 60) + (100 - 10 - 60)
    assert time.total == 2 * 60 + 4 * 5 + time.late


def test_the_nearest_layers_pages_move_first():
    time = time_of(layer(resident=20), layer(), layer(), ahead=[(0, 2), (0, 1)])
    assert time.late == 100  # layer 1's page has moved during layer 0, layer 2's has not


def test_the_cpu_gives_prefetches_time_as_well():
    time = time_of(layer(cpu=2, tokens=0), layer(), ahead=[(0, 1)])
    assert (time.late, time.total) == (0, 100)


MEASURED = [
    FfnTime(pages=8, tokens=16, us=20.0),
    FfnTime(pages=64, tokens=16, us=132.0),
    FfnTime(pages=64, tokens=32, us=200.0),
]


@pytest.mark.parametrize(
    ("items", "rows", "us"),
    [
        (0, 16, 0), (4, 16, 10), (8, 16, 20), (36, 16, 76), (64, 16, 132), (128, 16, 264),
        (64, 4, 132), (64, 17, 200), (32, 32, 100), (64, 64, 200),
    ],
)  # fmt: skip
def test_the_ffn_is_interpolated_by_pages_for_the_next_measured_tokens(items, rows, us):
    for times in itertools.permutations(MEASURED):
        assert ffn_us(times, items, rows) == pytest.approx(us)


def test_an_ffn_that_was_not_measured_counts_nothing():
    assert ffn_us((), 10, 16) == 0
