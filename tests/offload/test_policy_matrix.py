"""Every policy in the engine: same tokens as `all`, same bits where nothing ran on the CPU, residency always sound."""

import dataclasses
import functools

import numpy as np
import pytest
from engines import GREEDY, build, open_golden, run

from oled_jax.passes import PassKind
from oled_jax.policies.registry import POLICIES

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")

# The smallest golden model: 2 MoE layers of 8 experts.
CAPACITIES = (1, 5)
SLOTS = 2 * 5 + 5  # capacity 5 and the spare slots: with one size, all runs share programs (test_lossless.py: others)
DECODING = dataclasses.replace(GREEDY, mask_id=95, eos_id=-1, gen_length=18, steps=4)
NEEDS_CPU = [name for name, entry in POLICIES.items() if entry.needs_cpu]
TRANSFERRING = [
    name for name, entry in POLICIES.items() if not (entry.needs_cpu or entry.needs_future or entry.is_reference)
]
OPTIONS = [
    "oled:retention=lru:allocation=uniform:dispatch=gpu",
    "oled:psi=ones:confidence=none",
    "oled:allocation=uniform",
    "finemoe:distance=1",
]
OTHER_LENGTHS = [pytest.param(length, marks=pytest.mark.slow) for length in (4, 16)]
ON_CPU = [*NEEDS_CPU, "oled", *(f"oled:dispatch={rule}" for rule in ("load", "cpu", "makespan"))]
# Against logits of standard deviation about 4: the CPU keeps float32 between the two products, as the device does, and
# sums in another order. Observed at most 2e-5.
CPU_ATOL = 2e-4

# One after the other: a batch of unequal prompts, one of them long, then one of short ones; several blocks each. No
# empty prompt: in a block of masks alone all positions tie, and rounding would choose between them.
BATCHES = (
    [[5, 6, 7, 8, 9], list(range(40, 59)), np.random.default_rng(3).integers(0, 90, 60).tolist()],
    [[1, 2, 3], [80], [7, 70]],
)


@pytest.fixture(scope="module")
def model(golden):
    return open_golden(golden / "variants" / "base-float32")


def outcome(engine, block_length):
    """Output ids and the logits of every pass."""
    decoding = dataclasses.replace(DECODING, block_length=block_length)
    results = [result for prompts in BATCHES for result in run(engine, prompts, decoding)]
    return [result.output_ids for result in results], [logits for _, logits in engine.recorded]


@pytest.fixture(scope="module")
def reference(model):
    """By block length: tokens of `all`; logits of one policy at one capacity (test_lossless.py compares capacities)."""

    @functools.cache
    def of(block_length):
        tokens, _ = outcome(build(*model, "all"), block_length)
        same_tokens, logits = outcome(build(*model, "lru", CAPACITIES[1], slots=SLOTS), block_length)
        assert same_tokens == tokens
        return tokens, logits

    return of


@pytest.mark.parametrize(
    ("block_length", "policy", "capacity"),
    [
        *((8, policy, capacity) for policy in TRANSFERRING for capacity in CAPACITIES),
        *((8, policy, CAPACITIES[0]) for policy in OPTIONS),
        *(
            pytest.param(length, policy, CAPACITIES[0], marks=pytest.mark.slow)
            for length in (4, 16)
            for policy in TRANSFERRING
        ),
    ],
)
def test_policies_that_transfer_give_the_same_bits(model, reference, block_length, policy, capacity):
    engine = build(*model, policy, capacity, slots=SLOTS)
    tokens, logits = outcome(engine, block_length)
    expected_tokens, expected_logits = reference(block_length)
    assert tokens == expected_tokens
    for mine, expected in zip(logits, expected_logits, strict=True):
        np.testing.assert_array_equal(mine, expected)
    assert engine.statistics.summary(*PassKind).to_cpu == 0


@pytest.mark.parametrize("policy", ON_CPU)
@pytest.mark.parametrize("block_length", [8, *OTHER_LENGTHS])
def test_policies_that_use_the_cpu_give_the_same_tokens(model, reference, block_length, policy):
    engine = build(*model, policy, CAPACITIES[0], cpu="numpy", slots=SLOTS)
    tokens, logits = outcome(engine, block_length)
    engine.close()
    expected_tokens, expected_logits = reference(block_length)
    assert tokens == expected_tokens
    for mine, expected in zip(logits, expected_logits, strict=True):
        np.testing.assert_allclose(mine, expected, atol=CPU_ATOL)
    assert engine.statistics.summary(PassKind.DENOISE).to_cpu > 0, "nothing ran on the CPU: this says nothing"
    assert engine.statistics.summary(PassKind.PREFILL).to_cpu == 0 or policy.startswith(("kt", "tide"))


@pytest.mark.parametrize("backend", ["xla", "numba"])
def test_every_cpu_backend_serves_the_engine(model, reference, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    engine = build(*model, "oled:dispatch=cpu", CAPACITIES[0], cpu=backend, slots=SLOTS)
    tokens, logits = outcome(engine, 8)
    engine.close()
    expected_tokens, expected_logits = reference(8)
    assert tokens == expected_tokens
    for mine, expected in zip(logits, expected_logits, strict=True):
        np.testing.assert_allclose(mine, expected, atol=CPU_ATOL)


def test_the_list_is_complete():
    """A policy that is added must be covered here."""
    assert {name for name, entry in POLICIES.items() if entry.needs_future or entry.is_reference} == {
        "all", "oracle", "belady",
    }  # fmt: skip
    assert len(TRANSFERRING) + len(NEEDS_CPU) + 3 == len(POLICIES)
