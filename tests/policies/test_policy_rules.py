"""Every policy obeys the engine's rules on random routings (the driver asserts them) and repeats itself."""

import numpy as np
import pytest
from driver import Driver, context, future_of, make_pass, random_passes

from oled_jax.passes import PassKind
from oled_jax.policies.registry import POLICIES, make_policy

SPECS = (
    *(name for name, entry in POLICIES.items() if not entry.is_reference),
    "oled:dispatch=load",
    "oled:dispatch=cpu",
    "oled:dispatch=makespan",
    "oled:retention=lfu:interval=1",
    "oled:psi=square:confidence=previous",
    "tide:interval=1",
    "finemoe:distance=1:store_size=4",
    "moe-infinity:store_size=1:max_prefetch=50",
    "oled+:stage=8:certainty=0.1:tokens=5",
)
NEEDS_CPU = ("ktransformers", "kt-uniform", "kt-dynamic", "fiddler", "tide")


def drive(spec, passes, **changes):
    built = make_policy(spec, context(future=future_of(passes), **changes))
    return Driver(built).run(passes)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("total_slots", [0, 2, 18, 48])
def test_rules_hold(spec, total_slots):
    passes = random_passes(total_slots, 45)
    driver = drive(spec, passes, total_slots=total_slots)
    assert len(driver.log) == 45 * 3
    if total_slots == 48:
        # Everything fits: what has been transferred never misses again.
        assert driver.transfers <= 48


@pytest.mark.parametrize("spec", [spec for spec in SPECS if not spec.startswith((*NEEDS_CPU, "oled:dispatch"))])
def test_without_a_cpu_backend_everything_is_transferred(spec):
    driver = drive(spec, random_passes(3, 40), cpu_available=False)
    assert all(decision.to_cpu.size == 0 for decision in driver.decisions())


@pytest.mark.parametrize("spec", SPECS)
def test_runs_repeat_exactly(spec):
    passes = random_passes(5, 45)
    first, second = drive(spec, passes), drive(spec, passes)
    for (_, one), (_, other) in zip(first.log, second.log, strict=True):
        assert np.array_equal(one.to_gpu, other.to_gpu)
        assert np.array_equal(one.to_cpu, other.to_cpu)
        assert np.array_equal(one.keep, other.keep)
        assert list(one.prefetch) == list(other.prefetch)
    assert first.staged == second.staged


@pytest.mark.parametrize("spec", SPECS)
def test_prefill_misses_are_transferred(spec):
    driver = drive(spec, random_passes(8, 45))
    prefills = [decision for routing, decision in driver.log if routing.info.kind is PassKind.PREFILL]
    assert sum(decision.to_gpu.size for decision in prefills) > 0 or spec == "oracle"
    # The oracle leaves prefill misses too, when the prompt activates more than fits; none may go to the CPU.
    assert all(decision.to_cpu.size == 0 for decision in prefills)


@pytest.mark.parametrize("spec", SPECS)
def test_sparse_first_requests(spec):
    """No prefill, no block mark, one token, then a request whose tokens are all padding."""
    passes = [
        make_pass(np.tile([[[0, 1]]], (3, 1, 1)), begins_request=True),
        make_pass(np.tile([[[0, 1]]], (3, 1, 1)), begins_request=True, token_mask=np.zeros(1, bool)),
        make_pass(np.tile([[[2, 3]]], (3, 1, 1)), confidence=np.zeros(1, np.float32)),
    ]
    driver = drive(spec, passes)
    assert [int(routing.activated.sum()) for routing, _ in driver.log] == [2, 2, 2, 0, 0, 0, 2, 2, 2]


@pytest.mark.parametrize("spec", SPECS)
def test_residency_may_be_lost_between_passes(spec):
    passes = random_passes(11, 40)
    driver = Driver(make_policy(spec, context(future=future_of(passes))))
    for number, step in enumerate(passes):
        if number in (7, 20):
            driver.resident[:] = False
            driver.policy.forget_residents()
        driver.run_pass(step)
    assert len(driver.log) == 120
