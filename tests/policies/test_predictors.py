"""MoE-Infinity and FineMoE against slow transcriptions of their predictions; SiDA and SwapMoE by hand."""

import numpy as np
import pytest
from driver import Driver, context, make_pass, random_passes

from oled_jax.passes import PassKind
from oled_jax.policies.registry import make_policy


def cosine(one, other):
    scale = np.linalg.norm(one) * np.linalg.norm(other)
    return float(one @ other / scale) if scale else 0.0


def loads_of(step):
    return np.stack([step.loads(layer, 16) for layer in range(3)]).astype(float)


# MoE-Infinity


@pytest.mark.parametrize("store_size", [1000, 2])
def test_moe_infinity_predicts_from_the_nearest_stored_matrix(store_size):
    policy = make_policy(f"moe-infinity:store_size={store_size}", context())
    driver, store, own = Driver(policy), [], np.zeros((3, 16))
    seen = []
    on_route = policy.on_route
    policy.on_route = lambda routing: (on_route(routing), seen.append(policy.scores(routing.layer).copy()))[0]
    for step in random_passes(3, 100):
        if step.begins_request:
            if own.any():
                if len(store) == store_size:
                    distances = [1 - np.mean([cosine(own[r], old[r]) for r in range(3)]) for old in store]
                    store[int(np.argmin(distances))] = own.copy()
                else:
                    store.append(own.copy())
            own = np.zeros((3, 16))
        loads = loads_of(step)
        driver.run_pass(step)
        for layer in range(3):
            own[layer] += loads[layer]
            predicted = own
            if store:
                distances = [1 - np.mean([cosine(own[row], old[row]) for row in range(layer + 1)]) for old in store]
                predicted = store[int(np.argmin(distances))]
            expected = predicted[layer] / max(predicted[layer].sum(), 1)
            np.testing.assert_allclose(seen[-3 + layer], expected, rtol=1e-4, atol=1e-6)


def test_moe_infinity_fetches_later_layers_by_share_and_distance():
    ids = np.array([[[0, 1]], [[2, 3]], [[4, 5]]])
    policy = make_policy("moe-infinity", context(total_slots=6))
    driver = Driver(policy).run([make_pass(ids, begins_request=True)])
    driver.resident[:] = False
    policy.forget_residents()
    driver.run_pass(make_pass(ids))
    first = driver.log[3][1].prefetch
    assert [(page.layer, page.expert) for page in first] == [(1, 2), (1, 3), (2, 4), (2, 5)]
    # share 1/2; factor 1 - distance / (L + 1)
    np.testing.assert_allclose([page.priority for page in first], [0.375, 0.375, 0.25, 0.25], rtol=1e-6)
    assert driver.log[4][1].prefetch == ()


# FineMoE


class SlowFineMoe:
    """Maps and tokens as plain lists."""

    def __init__(self, distance):
        self.distance = distance
        self.maps, self.meanings = [], []
        self.visits = np.zeros((3, 16))
        self.predicted = np.ones((3, 16))
        self.similarity = np.zeros(3)

    def search_tokens(self, token_ids, known):
        self.meaning = np.eye(50)[token_ids[known]].sum(axis=0)
        if self.maps and self.meaning.any():
            found = [cosine(self.meaning, old) for old in self.meanings]
            best = int(np.argmax(found))
            for layer in range(self.distance):
                self.predicted[layer], self.similarity[layer] = self.maps[best][layer], found[best]

    def route(self, step, layer):
        self.visits[layer] += step.loads(layer, 16) > 0
        if step.info.kind is PassKind.PREFILL:
            return
        row = np.zeros(16)
        real = np.flatnonzero(step.info.token_mask)
        for token in real:
            gates = step.gates[layer, token]
            for expert, gate in zip(step.ids[layer, token], gates, strict=True):
                row[expert] += gate / gates.sum() / real.size
        self.map[layer] = row
        target = layer + self.distance
        if self.maps and target < 3:
            flat = self.map[: layer + 1].ravel()
            found = [cosine(flat, old[: layer + 1].ravel()) for old in self.maps]
            best = int(np.argmax(found))
            self.predicted[target], self.similarity[target] = self.maps[best][target], found[best]

    def selected(self, layer):
        p, chosen, total = self.predicted[layer], [], 0.0
        for expert in np.argsort(-p, kind="stable"):
            if len(chosen) >= 2 and total >= min(max(1 - self.similarity[layer], 0), 1) - 1e-6:
                break
            chosen.append(int(expert))
            total += p[expert]
        return {expert for expert in chosen if p[expert] > 0}


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_finemoe_follows_its_definition(distance):
    policy = make_policy(f"finemoe:distance={distance}", context())
    driver, slow = Driver(policy), SlowFineMoe(distance)
    fetched = []
    on_route = policy.on_route

    def checked(routing):
        slow.route(step, routing.layer)
        decision = on_route(routing)
        expected = slow.predicted[routing.layer] * slow.visits[routing.layer]
        np.testing.assert_allclose(policy.scores(routing.layer), expected, rtol=1e-4, atol=1e-6)
        target = routing.layer + distance
        if target < 3 and slow.maps and step.info.kind is not PassKind.PREFILL:
            selected = np.flatnonzero(policy._maps.selected(target)).tolist()
            assert set(selected) == slow.selected(target)
            assert {page.expert for page in decision.prefetch} <= set(selected)
            fetched.extend(decision.prefetch)
        return decision

    policy.on_route = checked
    for step in random_passes(4, 60, stay=0.9):
        slow.map = np.zeros((3, 16))
        slow.search_tokens(step.info.token_ids, step.info.token_mask & ~step.info.masked)
        driver.run_pass(step)
        if step.info.kind is not PassKind.PREFILL:
            slow.maps.append(slow.map)
            slow.meanings.append(slow.meaning)
        now_known = (~step.info.masked | step.outcome.written) & step.info.token_mask
        slow.search_tokens(step.outcome.token_ids, now_known)
    assert len(fetched) > 0 or distance == 3
    assert len(driver.staged) > 0


def test_finemoe_finds_the_pass_that_shares_most_tokens_in_any_request():
    policy = make_policy("finemoe:distance=1", context(num_layers=2, total_slots=8))

    def step(expert, ids, **marks):
        both = np.full((2, 2, 2), expert)
        both[:, :, 1] += 1
        return make_pass(both, token_ids=np.int32(ids), masked=np.array([False, False]), **marks)

    driver = Driver(policy).run([step(0, [7, 8], begins_request=True), step(4, [20, 21])])
    driver.run([step(8, [7, 21])])
    # After that pass the same two tokens are nearest to its own map, not to those of {7, 8} or {20, 21}.
    assert np.flatnonzero(policy._maps.predicted[0]).tolist() == [8, 9]
    policy.begin_request(np.int32([7, 8]))
    policy.begin_iteration(step(0, [8, 7]).info)
    assert np.flatnonzero(policy._maps.predicted[0]).tolist() == [0, 1]


# SiDA and SwapMoE


def test_sida_stages_what_earlier_blocks_used_most():
    prompt = make_pass([[[0, 1], [0, 2], [0, 1]]], kind=PassKind.PREFILL, begins_request=True)
    first = make_pass([[[4, 5], [4, 6]]], begins_block=True)
    driver = Driver(make_policy("sida", context(num_layers=1, total_slots=2))).run([prompt])
    assert driver.staged == []
    driver.run([first])
    # 3, 2 and 1 tokens of the prompt: experts 0 and 1 are the block's, whatever it routes to.
    assert driver.policy.scores(0)[:3].tolist() == [3, 2, 1]
    assert np.flatnonzero(driver.resident[0]).tolist() == [0, 1]
    driver.run([make_pass([[[4, 6], [4, 6]]], begins_block=True)])
    # 0.5 * (3, 2, 1) for the prompt, 2, 1, 1 for experts 4, 5, 6 of the first block.
    assert driver.policy.scores(0)[[0, 1, 2, 4, 5, 6]].tolist() == [1.5, 1, 0.5, 2, 1, 1]
    assert driver.staged == [(0, 4)]


def test_swapmoe_keeps_a_running_mean_of_gate_shares():
    passes = random_passes(6, 30)
    driver = Driver(make_policy("swapmoe:decay=0.75", context()))
    mean = np.zeros((3, 16))
    for step in passes:
        driver.run_pass(step)
        for layer in range(3):
            share = np.zeros(16)
            for token in np.flatnonzero(step.info.token_mask):
                np.add.at(share, step.ids[layer, token], step.gates[layer, token])
            mean[layer] = 0.75 * mean[layer] + 0.25 * share / share.sum()
            np.testing.assert_allclose(driver.policy.scores(layer), mean[layer], rtol=1e-5)


def test_swapmoe_fetches_only_the_next_layers_best():
    driver = Driver(make_policy("swapmoe", context())).run(random_passes(6, 40))
    requests = [(routing.layer, page) for routing, decision in driver.log for page in decision.prefetch]
    assert all(page.layer == layer + 1 for layer, page in requests)
    lost = make_policy("swapmoe:max_prefetch=2", context(num_layers=2, total_slots=6))
    driver = Driver(lost).run([make_pass([[[0, 1], [2, 3]], [[4, 5], [5, 6]]])])
    driver.resident[:] = False
    lost.forget_residents()
    driver.run([make_pass([[[0, 1], [2, 3]], [[4, 5], [5, 6]]])])
    assert [(page.layer, page.expert) for page in driver.log[2][1].prefetch] == [(1, 5), (1, 4)]
