"""Host callbacks stay healthy: no deadlock, and a policy's exception reaches the caller as itself."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from engines import GREEDY, SLOTS, build, check_residency, context, open_tiny, run

from oled_jax.policies.lru import LruPolicy

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")


class PolicyBrokeError(Exception):
    """Raised by the policy below and by nothing else."""


class Breaks(LruPolicy):
    """Least recently used, until `fuse` decisions have been made."""

    fuse = 0

    def on_route(self, routing):
        self.fuse -= 1
        if self.fuse == 0:
            raise PolicyBrokeError(f"in layer {routing.layer}")
        return super().on_route(routing)


@pytest.mark.parametrize("fuse", [1, 2, 20])
def test_an_exception_in_a_policy_reaches_the_caller_and_the_engine_lives_on(golden, fuse):
    config, source = open_tiny(golden)
    policy = Breaks(context(config, 4))
    engine = build(config, source, policy, slots=SLOTS, carrier="portable")
    expected = run(engine, [[1, 2, 3]])[0].output_ids
    policy.fuse = fuse
    with pytest.raises(PolicyBrokeError, match="in layer"):
        run(engine, [list(range(20))])
    check_residency(engine)
    assert run(engine, [[1, 2, 3]])[0].output_ids == expected


def test_an_engine_refuses_two_runs_at_once(golden):
    engine = build(*open_tiny(golden), "lru", 4, slots=SLOTS, carrier="portable")
    first = engine.stream([[1, 2, 3]], GREEDY)
    next(first)
    with pytest.raises(RuntimeError, match="already generating"):
        run(engine, [[1]])
    first.close()
    assert run(engine, [[1]])


WATCHED = """
    import faulthandler, os, sys
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    faulthandler.dump_traceback_later(240, exit=True)
    import dataclasses
    from pathlib import Path
    from engines import GREEDY, build_plain, open_golden, run
    engine = build_plain(*open_golden(Path(sys.argv[1])), "oled", 3, carrier="portable")
    decoding = dataclasses.replace(GREEDY, mask_id=95, gen_length=128, eos_id=-1, threshold=2.0, steps=8)
    passes = 0
    while passes < 1000:
        result = run(engine, [[passes % 90]], decoding)[0]
        passes += sum(result.passes.values())
    print("passes", passes)
"""


@pytest.mark.slow
def test_a_thousand_iterations_on_two_cores_under_a_watchdog(golden):
    child = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WATCHED), str(golden / "variants" / "base-float32")],
        env=os.environ | {"PYTHONPATH": f"{Path(__file__).parents[1]}:{Path(__file__).parents[2]}"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    assert int(child.stdout.split()[-1]) >= 1000


@pytest.mark.slow
def test_hidden_states_of_a_large_pass_cross_the_callback(golden):
    """Operands beyond a few KB are copied asynchronously by XLA: a callback must not wait for itself."""
    engine = build(*open_tiny(golden), "lru", 3, carrier="portable")
    prompt = np.random.default_rng(0).integers(0, 500, 1030).tolist()
    assert len(run(engine, [prompt])[0].output_ids) == 24
