"""The native carrier: the same decisions and the same bits as the portable one, whatever fails surfaces, nothing leaks.

On a machine without a GPU the pager copies pages by memcpy; all but the CUDA calls themselves is the same code.
"""

import dataclasses
import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import GREEDY, build, check_residency, context, open_golden
from engines import run as run_engine

from oled_jax import native
from oled_jax.decode.events import FinishEvent
from oled_jax.errors import UsageError
from oled_jax.models.moe import DenseExperts
from oled_jax.offload.carriers import native as native_carrier
from oled_jax.offload.carriers.native import NativeCarrier, NativeMover
from oled_jax.offload.carriers.registry import choose
from oled_jax.offload.layer import ExpertCarry, OffloadedExperts
from oled_jax.offload.plan import PlanLayout
from oled_jax.offload.pool import Pool, empty_pool
from oled_jax.offload.store import allocate_store
from oled_jax.ops.grouping import ItemShape
from oled_jax.passes import PassKind
from oled_jax.policies.lru import LruPolicy

pytestmark = [
    pytest.mark.skipif(native.extension is None, reason=f"no compiled extension: {native.UNAVAILABLE}"),
    pytest.mark.usefixtures("roomy_kv_cache"),
]

# The smallest golden model: 2 MoE layers of 8 experts.
SLOTS = 2 * 8 + 5  # one size of the pool for all engines: they share programs
DECODING = dataclasses.replace(GREEDY, mask_id=95, eos_id=-1)

PROMPTS = [list(range(40, 69)), [5, 6, 7, 8, 9]]  # three blocks and a part, less than one


def set_rounds(plan, ends, hits=0):
    """The plan has rounds that end after so many transfers of one item each, behind `hits` items that need none."""
    transfer_end, item_end = np.array(ends), np.array(ends) + hits
    for field, values in (("transfer_end", transfer_end), ("item_end", item_end)):
        plan[field][:] = values[-1]
        plan[field][: values.size] = values
    early = len(ends) - 1
    first = item_end[early - 1] if early else 0
    plan["num_rounds"][:], plan["early_rounds"][:], plan["hit_end"][:] = len(ends), early, hits
    plan["late_items"][:] = first, first if early else hits, item_end[-1]


@pytest.fixture(scope="module")
def model(golden):
    return open_golden(golden / "variants" / "base-float32")


def run(engine, prompts):
    return run_engine(engine, prompts, DECODING)


def logged(engine):
    """Every plan that the manager makes, as bytes."""
    plans, on_route = [], engine.manager.on_route

    def spy(layer, packed, hidden=None):
        plan = on_route(layer, packed, hidden)
        plans.append((layer, plan.tobytes()))
        return plan

    return plans, spy


def native_engine(model, policy, capacity=3, **options):
    return build(*model, policy, capacity, slots=SLOTS, carrier="native", **options)


def check_pages(engine):
    """Every page that the tables promise lies where they say."""
    engine.mover.drain(engine.pool)
    pool = [np.asarray(array) for array in engine.pool]
    slots = engine.manager.residency.slot
    for layer, expert in zip(*np.nonzero(slots >= 0), strict=True):
        for view, array in zip(engine.store.views(layer), pool, strict=True):
            np.testing.assert_array_equal(view[expert], array[slots[layer, expert]])


@pytest.mark.parametrize(
    ("policy", "cpu"), [("oled", None), ("oled:dispatch=load", "numpy"), ("moe-infinity", None), ("sida", None)]
)
def test_both_carriers_decide_alike_and_give_the_same_bits(model, policy, cpu, monkeypatch):
    engines = {}
    for carrier in ("portable", "native"):
        engine = build(*model, policy, 3, slots=SLOTS, cpu=cpu, carrier=carrier)
        # Pages for far layers leave at the same time: the only freedom that a carrier has.
        engine.manager.overlapping = False
        plans, spy = logged(engine)
        monkeypatch.setattr(engine.manager, "on_route", spy)
        results = run(engine, PROMPTS)
        engines[carrier] = engine, plans, results
    (one, one_plans, one_results), (other, other_plans, other_results) = engines.values()
    assert len(one_plans) > 30
    assert one_plans == other_plans
    assert [result.output_ids for result in one_results] == [result.output_ids for result in other_results]
    for (_, expected), (_, logits) in zip(one.recorded, other.recorded, strict=True):
        np.testing.assert_array_equal(expected, logits)
    check_pages(other)


@pytest.mark.parametrize("capacity", [1, 2, 5])
def test_logits_are_the_same_bits_at_every_capacity(model, capacity):
    small, full = native_engine(model, "oled", capacity), native_engine(model, "oled", 8)
    results = [run(engine, PROMPTS) for engine in (small, full)]
    assert results[0][0].output_ids == results[1][0].output_ids
    for (_, expected), (_, logits) in zip(full.recorded, small.recorded, strict=True):
        np.testing.assert_array_equal(expected, logits)
    check_pages(small)


@pytest.mark.parametrize("policy", ["moe-infinity", "sida", "finemoe"])
def test_pages_moved_ahead_beside_the_arithmetic_change_no_token(model, policy):
    engine = native_engine(model, policy)
    assert engine.manager.overlapping
    expected = [result.output_ids for result in run(native_engine(model, "lru"), PROMPTS)]
    for _ in range(2):  # later requests find earlier ones' maps
        assert [result.output_ids for result in run(engine, PROMPTS)] == expected
        check_pages(engine)
        check_residency(engine)
    prefetched = engine.statistics.summary(*PassKind).prefetched
    page = sum(array.nbytes for array in engine.pool) // SLOTS
    moved = engine.mover.statistics
    assert prefetched > 0
    assert moved["ahead_bytes"] + moved["cancelled_pages"] * page == prefetched * page


class BreaksOnce(LruPolicy):
    """Raises at its 40th decision."""

    decisions = 0

    def on_route(self, routing):
        self.decisions += 1
        if self.decisions == 40:
            raise PolicyBrokeError(routing.layer)
        return super().on_route(routing)


class PolicyBrokeError(Exception):
    pass


def test_what_a_policy_raises_surfaces_as_itself_and_the_engine_lives(model):
    policy = BreaksOnce(context(model[0], 3))
    engine = native_engine(model, policy)
    with pytest.raises(PolicyBrokeError):
        run(engine, PROMPTS)
    check_residency(engine)
    expected = [result.output_ids for result in run(native_engine(model, "lru"), PROMPTS)]
    assert [result.output_ids for result in run(engine, PROMPTS)] == expected
    check_pages(engine)


def test_an_error_inside_the_pager_is_a_python_exception_and_the_engine_lives(model):
    engine = native_engine(model, "lru")
    on_route, calls = engine.manager.on_route, []

    def cut_short(layer, packed, hidden=None):
        calls.append(layer)
        plan = on_route(layer, packed, hidden)
        return plan[:-1] if len(calls) == 20 else plan

    engine.manager.on_route = cut_short
    with pytest.raises(Exception, match=r"the manager's plan has .* entries, the program expects"):
        run(engine, PROMPTS)
    expected = [result.output_ids for result in run(native_engine(model, "lru"), PROMPTS)]
    assert [result.output_ids for result in run(engine, PROMPTS)] == expected
    check_pages(engine)


def test_two_engines_take_turns(model):
    engines = [native_engine(model, "oled", 2), native_engine(model, "lru", 5)]
    expected = [[result.output_ids for result in run(engine, PROMPTS)] for engine in engines]
    running = {index: engine.stream(PROMPTS, DECODING) for index, engine in enumerate(engines)}
    found = [[None] * len(PROMPTS) for _ in engines]
    while running:
        for index, stream in list(running.items()):
            event = next(stream, None)
            if event is None:
                del running[index]
            elif isinstance(event, FinishEvent):
                found[index][event.row] = event.result.output_ids
    assert found == expected
    for engine in engines:
        check_pages(engine)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@pytest.mark.slow
def test_ten_thousand_layers_leak_nothing():
    L, E, D, F, N, K = 1, 8, 16, 8, 4, 2
    items = ItemShape(num_tokens=N, top_k=K, num_experts=E)
    store = allocate_store(L, E, D, F, np.dtype(np.float32))
    for view in store.views(0):
        view[:] = 1.0
    layout = PlanLayout(items=items, spare=4)

    class Rotating:
        """Moves every page anew, in rounds of four, and leaves a share to the CPU."""

        def account(self):
            pass

        def on_route(self, layer, packed, hidden):
            flat = layout.empty()
            plan = layout.fields(flat)
            plan["cpu_pairs"][:] = 1
            set_rounds(plan, [4, E])
            plan["transfer_expert"][:] = np.arange(E)
            plan["transfer_slot"][:] = plan["item_slot"][:] = np.arange(E) % 4
            plan["pair_row"][:] = np.arange(N * K) % E * items.rows
            return flat

        def collect(self, layer, shape):
            return np.ones(shape, np.float32)

    mover = NativeMover(store, Rotating())
    pool = empty_pool(4, D, F, jnp.float32)
    mover.attach(pool)

    def step(pool, x, ids, gates):
        experts = OffloadedExperts(NativeCarrier(uses_cpu=True), layout)
        y, carry = experts(0, x, ids, gates, ExpertCarry.start(pool, items))
        return carry.pool, y

    step = jax.jit(step, donate_argnums=0)
    x, ids, gates = jnp.ones((N, D)), jnp.zeros((N, K), jnp.int32), jnp.ones((N, K))
    expected = None
    for turn in range(10_000):
        arrays, y = step(Pool(*pool), x, ids, gates)
        pool = Pool(*arrays)
        if turn % 1000 == 0:
            gc.collect()
            values = np.asarray(y)
            expected = values if expected is None else expected
            np.testing.assert_array_equal(values, expected)
        if turn == 2000:
            before = resident_bytes()
    jax.block_until_ready(pool)
    # A plan of 8,000 turns is 12 MB; what other tests left to the allocator moves by up to 1 MB.
    assert resident_bytes() - before < 3 * 2**20
    assert mover.statistics["routes"] == 10_000


def test_a_page_asked_for_ahead_is_computed_with_before_its_slot_is_given_away():
    """Layer 0 computes with slot 0 and asks for a page of layer 1 there, which can move only when layer 0 is done.
    Layer 1 finds it resident and drops it, and its second round takes the slot."""
    N, K, E, D, F = 4, 3, 8, 8, 8
    store = allocate_store(2, E, D, F, jnp.dtype(jnp.float32))
    rng = np.random.default_rng(0)
    for layer in range(2):
        for view in store.views(layer):
            view[:] = rng.standard_normal(view.shape)
    items = ItemShape(num_tokens=N, top_k=K, num_experts=E)
    layout = PlanLayout(items=items, spare=2)

    class Scripted:
        def account(self):
            pass

        def on_route(self, layer, packed, hidden):
            flat = layout.empty()
            plan = layout.fields(flat)
            moves, slots, hits, ends = (
                ([(0, 0)], [0], 0, [1]) if layer == 0 else ([(2, 1), (3, 0)], [0, 1, 0], 1, [1, 2])
            )
            set_rounds(plan, ends, hits)
            plan["transfer_expert"][: len(moves)], plan["transfer_slot"][: len(moves)] = zip(*moves, strict=True)
            plan["item_slot"][: len(slots)] = slots
            row = np.arange(K) * items.rows * (layer == 1) + np.arange(N)[:, None]
            plan["pair_row"][:] = row.ravel()
            if layer == 0:
                plan["prefetch_count"][:] = 1
                plan["prefetch_layer"][0], plan["prefetch_expert"][0], plan["prefetch_slot"][0] = 1, 1, 0
            return flat

    mover = NativeMover(store, Scripted())
    pool = empty_pool(2, D, F, jnp.float32)
    mover.attach(pool)
    ids = {0: jnp.zeros((N, K), jnp.int32), 1: jnp.broadcast_to(jnp.array([1, 2, 3], jnp.int32), (N, K))}
    x, gates = jnp.asarray(rng.standard_normal((N, D)), jnp.float32), jnp.ones((N, K))

    def step(pool, x):
        experts, carry = OffloadedExperts(NativeCarrier(uses_cpu=False), layout), ExpertCarry.start(pool, items)
        for layer in range(2):
            # Gates that depend on x: as in a model, a layer is routed when the one before it is done.
            x, carry = experts(layer, x, ids[layer], gates + jnp.minimum(jnp.abs(x[:, :K]), 0.0), carry)
        return carry.pool, x

    _, y = jax.jit(step, donate_argnums=0)(pool, x)
    dense = DenseExperts(*(jnp.stack([store.views(layer)[part] for layer in range(2)]) for part in range(2)))
    expected = x
    for layer in range(2):
        expected, _ = dense(layer, expected, ids[layer], gates, None)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4 * float(jnp.abs(expected).max()))
    mover.reset()


def test_the_extension_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setattr(native_carrier, "extension", None)
    monkeypatch.setattr(native_carrier, "UNAVAILABLE", "it was not built")
    with pytest.raises(UsageError, match=r"--carrier native: the compiled extension is missing .it was not built."):
        choose("native")
    assert choose("auto")[0] == "portable"


def test_an_unknown_carrier_is_refused():
    with pytest.raises(UsageError, match="carrier 'pigeon' is unknown; choose auto, portable, native"):
        choose("pigeon")


def test_a_pool_that_xla_copied_is_refused(model):
    engine = native_engine(model, "lru")
    engine.mover.attach(empty_pool(SLOTS, model[0].hidden_size, model[0].moe_intermediate_size, jnp.float32))
    with pytest.raises(Exception, match="no engine's pool lies where this program reads pages"):
        run(engine, PROMPTS)
