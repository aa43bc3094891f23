"""oled+: its estimates against slow transcriptions, slots that move, staging, and what it keeps in a file."""

import numpy as np
import pytest
from driver import Driver, context, make_pass, random_passes

from oled_jax.errors import UsageError
from oled_jax.passes import PassKind
from oled_jax.policies.certainty import DOUBT, MissingCertainty
from oled_jax.policies.lasting import DISCOUNT, FORGET, PRIOR, LastingValue
from oled_jax.policies.registry import make_policy
from oled_jax.policies.reuse import DECODED, KEPT_PACE, LASTING_SHARE, MASKED, WRITTEN, ExpectedReuse, StateReuse
from oled_jax.policies.token_table import TokenTable


def run_states(passes, **changes):
    """A `StateReuse` that has seen the passes."""
    states = StateReuse(context(**changes))
    for step in passes:
        states.begin_pass(step.info)
        states.ids[:] = step.ids
        activated = np.stack([step.loads(layer, 16) > 0 for layer in range(3)])
        states.end_pass(step.outcome, activated)
    return states


def two_passes(state):
    """One token that keeps the first of two routes, and was in this state after the first pass."""
    masked, written = state != DECODED, state == WRITTEN
    first = make_pass([[[0, 1]]] * 3, masked=np.array([masked]), written=np.array([written]))
    return [first, make_pass([[[0, 2]]] * 3, masked=np.array([state == MASKED]))]


@pytest.mark.parametrize("state", [DECODED, MASKED, WRITTEN])
def test_kept_routes_are_learned_for_the_tokens_state_and_nothing_else(state):
    before = StateReuse(context()).kept
    after = run_states(two_passes(state)).kept
    expected = before.copy()
    expected[:, state] += KEPT_PACE * (np.array([1.0, 0.0]) - before[:, state])
    np.testing.assert_allclose(after, expected)


def test_a_token_that_became_another_teaches_nothing():
    first, second = two_passes(MASKED)
    moved = make_pass(second.ids, token_ids=np.array([7], np.int32))
    np.testing.assert_array_equal(run_states([first, moved]).kept, StateReuse(context()).kept)


def test_the_chance_of_use_is_that_of_independent_tokens():
    steps = random_passes(2, 9)
    step = steps[8]
    reuse = ExpectedReuse(context(), None, as_shares=False)
    states = reuse.states = run_states(steps[:8])
    kept, written = states.kept.copy(), states.written.copy()
    reuse.begin_iteration(step.info)
    lasting = reuse.lasting
    for layer in range(3):
        absent = np.ones(16)
        for token in np.flatnonzero(step.info.token_mask):
            group = np.searchsorted([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95], step.info.confidence[token])
            for k, expert in enumerate(step.ids[layer, token]):
                stays = kept[layer, DECODED, k]
                if step.info.masked[token]:
                    share = written[group]
                    stays = (1 - share) * kept[layer, MASKED, k] + share * kept[layer, WRITTEN, k]
                absent[expert] *= 1 - stays
        driver = Driver(make_policy("lru", context())).run([step])
        routing = driver.log[layer][0]
        routing.expert_ids[:] = step.ids[layer]
        reuse.observe(routing)
        value = np.where(routing.activated, lasting.active[layer], lasting.idle[layer])
        np.testing.assert_allclose(reuse.scores(layer), 1 - absent + LASTING_SHARE * value, atol=1e-12)
        np.testing.assert_array_equal(states.ids[layer], step.ids[layer])
        np.testing.assert_array_equal(reuse.activated[layer], routing.activated)


def test_values_are_learned_by_temporal_differences():
    value = LastingValue(1, 2)
    used = np.array([[True, False]])
    value.end_pass(used)
    before = (value.sums / value.weights)[:, 0]
    value.end_pass(used)
    # One of two experts was used just now, and is again; the other was never used, and is not.
    just_now, never = 0, -1
    expected = FORGET * PRIOR * before[just_now] + 1.0
    assert value.sums[just_now].sum() - FORGET * PRIOR * before[just_now] * 10 == pytest.approx(expected)
    found = DISCOUNT * before[never]
    assert value.sums[never, 0] == pytest.approx(FORGET * PRIOR * before[never] + found)


def test_slots_move_to_the_layer_that_would_use_them():
    policy = make_policy("oled+", context(total_slots=24, cpu_available=False))
    # Layers 0 and 1 use two experts for ever, layer 2 any of sixteen: eight slots each are too many and too few.
    rng = np.random.default_rng(0)
    passes = []
    for _ in range(150):
        steady = np.tile([0, 1], (4, 1))
        passes.append(make_pass([steady, steady, rng.integers(0, 16, (4, 2))]))
    Driver(policy).run(passes)
    capacities = policy.capacities()
    assert capacities.sum() == 24
    assert capacities[2] > 12
    assert capacities.min() >= 2


def test_the_table_recalls_a_tokens_routes_and_forgets_the_oldest_token():
    table = TokenTable(num_layers=1, num_experts=16, top_k=2, tokens=2)
    for token in (5, 6, 5, 7):
        table.learn(np.array([token]), np.array([[[token, token + 1]]]))
    assert table.knows(np.array([5, 6, 7])).tolist() == [True, False, True]
    chance = 1 - np.exp(table.log_absent(np.array([5])))
    assert np.flatnonzero(chance[0]).tolist() == [5, 6]
    np.testing.assert_allclose(chance[0, 5:7], 0.5 + 0.5 / 3)  # 1/2 after the first time, then a third of the way to 1
    assert (table.weights <= 1).all()


def test_a_full_entry_gives_up_its_least_routes():
    table = TokenTable(num_layers=1, num_experts=16, top_k=2, tokens=1)
    for first in (0, 2, 4):
        table.learn(np.array([9]), np.array([[[first, first + 1]]]))
    assert sorted(table.experts[0, 0].tolist()) in ([0, 1, 4, 5], [2, 3, 4, 5])


def test_certainty_is_what_missing_pages_showed():
    certainty = MissingCertainty(1, 4)
    likely, missing = np.array([[0.96, 0.96, 0.1, 0.96]]), np.array([[True, True, True, False]])
    used = np.array([[True, False, True, True]])
    certainty.measured(used, likely, missing, opening=False)
    chances = certainty.measured(used, likely, missing, opening=False)
    assert np.flatnonzero(chances[0]).tolist() == [0, 1]
    doubt = DOUBT * 0.995**2
    np.testing.assert_allclose(chances[0, :2], 1 / (2 + doubt))
    assert not certainty.measured(used, likely, missing, opening=True).any()


def test_pages_are_staged_once_predictions_have_proved_right():
    """A written token's table entry names pages that are not resident; its tokens return again and again."""
    policy = make_policy("oled+:stage=4:certainty=0.6", context(total_slots=12, cpu_available=False))
    driver, routes = Driver(policy), {1: [0, 1], 2: [2, 3], 3: [4, 5], 4: [6, 7]}
    end, asked = policy.end_iteration, []
    policy.end_iteration = lambda outcome: (asked.append(end(outcome)), asked[-1])[1]
    for number in range(400):
        token = 1 + number % 4
        mask = make_pass([[[8, 9]]] * 3, token_ids=np.array([0], np.int32), masked=np.array([True]))
        wrote = make_pass(mask.ids, token_ids=np.array([token], np.int32), written=np.array([True]))
        step = type(mask)(info=mask.info, outcome=wrote.outcome, ids=mask.ids, gates=mask.gates)
        text = make_pass([[routes[token]]] * 3, token_ids=np.array([token], np.int32), masked=np.array([False]))
        driver.run([step, text])
    assert len(driver.staged) > 100
    assert max(map(len, asked)) == 4
    for requests in asked:
        layers = [page.layer for page in sorted(requests, key=lambda page: -page.priority)]
        assert layers == sorted(layers)
    assert {expert for _, expert in driver.staged} <= set(range(8))
    quiet = Driver(make_policy("oled+", context(total_slots=12, cpu_available=False)))
    quiet.run(random_passes(4, 45))
    assert quiet.staged == []


def test_what_was_learned_is_kept_in_a_file(tmp_path):
    file = tmp_path / "learned.npz"
    spec = f"oled+:stage=4:table={file}"
    policy = make_policy(spec, context())
    assert "will be kept" in policy.notes[0]
    Driver(policy).run(random_passes(1, 45))
    policy.close()
    again = make_policy(spec, context())
    assert "begins with" in again.notes[0]
    for mine, others in zip(policy._parts, again._parts, strict=True):
        for name, array in mine.arrays().items():
            np.testing.assert_array_equal(array, others.arrays()[name])
    Driver(again).run(random_passes(1, 20))
    with pytest.raises(UsageError, match=r"learned\.npz \(kept has shape"):
        make_policy(spec, context(num_layers=2))
    with np.load(file) as archive:
        arrays = dict(archive)
    for name, value in (("rate", 1.5), ("rate", -0.5), ("rate", np.nan), ("value_weights", 0.0), ("experts", 16)):
        broken = arrays[name].copy()
        broken.flat[0] = value
        np.savez(file, **(arrays | {name: broken}))
        with pytest.raises(UsageError, match=f"{name} has values that are not between"):
            make_policy(spec, context())
    whole = file.read_bytes()
    for damaged in (b"nothing", b"", whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(UsageError, match="cannot be read"):
            make_policy(spec, context())


def test_what_is_never_seen_again_does_not_fade_away():
    value, certainty = LastingValue(1, 2), MissingCertainty(1, 4)
    nobody = np.zeros((1, 4), bool)
    for _ in range(20_000):
        value._learn(np.zeros(1, np.int64), np.ones(1), 1)
        certainty.measured(nobody, np.zeros((1, 4)), nobody, opening=False)
    assert value.weights.min() > 1e-9
    assert certainty.seen.min() > 1e-9


def test_the_cache_is_by_model_and_never_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UsageError, match="which model"):
        make_policy("oled+:table=cache", context())
    first = make_policy("oled+:table=cache", context(model="one"))
    first.close()
    (file,) = (tmp_path / "oled_jax" / "reuse").iterdir()
    assert file.name.startswith("one-")
    assert "begins with" in make_policy("oled+:table=cache", context(model="one")).notes[0]
    assert "will be kept" in make_policy("oled+:table=cache", context(model="two")).notes[0]
    file.write_bytes(b"nothing")
    assert "starts anew" in make_policy("oled+:table=cache", context(model="one")).notes[0]


def test_prefill_and_commit_rank_by_what_a_block_begins_with():
    opening = make_pass([[[3, 4]]] * 3, masked=np.array([True]))
    commit = make_pass([[[0, 1]]] * 3, kind=PassKind.COMMIT, masked=np.array([False]))
    policy = make_policy("oled+", context(total_slots=9, cpu_available=False))
    Driver(policy).run([commit, opening] * 30 + [commit])
    scores = policy.scores(0)
    assert set(np.argsort(-scores)[:2].tolist()) == {3, 4}
