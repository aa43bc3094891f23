"""Whatever breaks, the caller gets that error and the engine serves the next request. And nothing leaks."""

import dataclasses
import signal
import time

import numpy as np
import pytest
from engines import GREEDY, SLOTS, build, build_plain, check_residency, context, open_golden, open_tiny, run

from oled_jax import session
from oled_jax.errors import PolicyError
from oled_jax.offload.cpu_experts.workers import ThreadedCpuExperts
from oled_jax.policies.lru import LruPolicy

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")

PROMPT = list(range(20))


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


@pytest.fixture(scope="module")
def expected(model):
    """What an engine of the same shape answers where nothing breaks."""
    return run(build(*model, "lru", 3, slots=SLOTS), [PROMPT])[0].output_ids


class Keeps(LruPolicy):
    """Keeps everything, from some decision on: more than the capacity."""

    after = 5

    def on_route(self, routing):
        decision = super().on_route(routing)
        self.after -= 1
        if self.after < 0:
            return dataclasses.replace(decision, keep=routing.resident | (routing.loads > 0))
        return decision


def test_an_illegal_decision_is_an_error_that_names_the_policy(model, expected):
    policy = Keeps(context(model[0], 3))
    engine = build(*model, policy, slots=SLOTS)
    with pytest.raises(PolicyError, match=r"policy 'lru', layer \d: it keeps \d+ experts, the capacity is 3"):
        run(engine, [PROMPT])
    check_residency(engine)
    policy.after = 10**9
    assert run(engine, [PROMPT])[0].output_ids == expected


class BackendBrokeError(Exception):
    """Raised by the backend below and by nothing else."""


def test_a_cpu_backend_that_raises_reaches_the_caller(model, expected, monkeypatch):
    engine = build(*model, "oled:dispatch=cpu", 3, cpu="numpy", slots=SLOTS)
    compute, calls = engine.cpu_experts._compute, []

    def failing(*operands):
        calls.append(1)
        if len(calls) == 7:
            raise BackendBrokeError("expert 7")
        return compute(*operands)

    monkeypatch.setattr(engine.cpu_experts, "_compute", failing)
    with pytest.raises(BackendBrokeError, match="expert 7"):
        run(engine, [PROMPT])
    check_residency(engine)
    assert run(engine, [PROMPT])[0].output_ids == expected
    engine.close()


def test_a_cpu_backend_that_returns_nan_is_named(model, expected, monkeypatch):
    engine = build(*model, "oled:dispatch=cpu", 3, cpu="numpy", slots=SLOTS)
    compute, calls = engine.cpu_experts._compute, []

    def poisoned(*operands):
        calls.append(1)
        rows = compute(*operands)
        return rows * np.float32(np.nan) if len(calls) == 3 else rows

    monkeypatch.setattr(engine.cpu_experts, "_compute", poisoned)
    with pytest.raises(RuntimeError, match=r"layer \d+.*expert \d+|expert \d+.*layer \d+"):
        run(engine, [PROMPT])
    assert run(engine, [PROMPT])[0].output_ids == expected
    engine.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # dying is what is tested
def test_a_worker_that_dies_is_noticed_and_replaced(model, expected, monkeypatch):
    engine = build(*model, "oled:dispatch=cpu", 3, cpu="numpy", slots=SLOTS)
    assert isinstance(engine.cpu_experts, ThreadedCpuExperts)
    compute, calls = engine.cpu_experts._compute, []

    def dying(*operands):
        calls.append(1)
        if len(calls) == 5:
            raise SystemExit("the thread ends here")
        return compute(*operands)

    monkeypatch.setattr(engine.cpu_experts, "_compute", dying)
    with pytest.raises((RuntimeError, SystemExit)):
        run(engine, [PROMPT])
    assert run(engine, [PROMPT])[0].output_ids == expected
    engine.close()


def resident_kb() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.slow
def test_two_thousand_iterations_leave_the_memory_flat(golden):
    smallest = open_golden(golden / "variants" / "base-float32")
    engine = build_plain(*smallest, "oled", 2, cpu="numpy")
    decoding = dataclasses.replace(GREEDY, mask_id=95, gen_length=128, eos_id=-1, threshold=2.0, steps=8)

    def passes(least: int) -> int:
        done = 0
        while done < least:
            done += sum(run(engine, [[1, 2, 3]], decoding)[0].passes.values())
        return resident_kb()

    before = passes(400)
    growth = passes(2000) - before
    engine.close()
    # 2,000 passes x 2 layers: one leaked plan (about 4 KB) each would be 16 MB. The allocator drifts by less than 8.
    assert growth < 8_000


class SamplerBrokeError(Exception):
    """Raised by the sampler below and by nothing else."""


@pytest.fixture
def interruptible():
    """Ctrl-C raises, whatever the process that runs the tests makes of it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(
    ("policy", "carrier"), [("all", "auto"), ("lru", "auto"), ("oled", "auto"), ("lru", "portable")]
)
@pytest.mark.parametrize("error", [SamplerBrokeError, KeyboardInterrupt])
def test_what_breaks_while_a_pass_runs_waits_until_it_is_over(model, expected, monkeypatch, policy, carrier, error):
    slots = {} if policy == "all" else {"slots": SLOTS, "carrier": carrier}
    engine = build(*model, policy, 3, **slots)
    run(engine, [PROMPT])
    sample, calls = session.sample, []
    if engine.manager is not None:  # so that layers are still planned when the sampler breaks
        plan = engine.manager._plan
        monkeypatch.setattr(engine.manager, "_plan", lambda *arguments: (time.sleep(0.01), plan(*arguments))[1])

    def breaks(*arguments):
        calls.append(arguments)
        if len(calls) == 3 and error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        elif len(calls) == 3:
            raise error
        return sample(*arguments)

    monkeypatch.setattr(session, "sample", breaks)
    with pytest.raises(error):
        run(engine, [PROMPT])
    monkeypatch.setattr(session, "sample", sample)
    assert run(engine, [PROMPT])[0].output_ids == expected
