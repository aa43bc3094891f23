"""Folded commits in the engine: the run that commits, in fewer passes, up to float32 noise; lossless as every run."""

import dataclasses

import numpy as np
import pytest
from engines import GREEDY, RecordedEngine, build, build_plain, context, open_tiny, run

from oled_jax import native, session
from oled_jax.bench.replay import EngineReplay, greedy_sampling
from oled_jax.decode.events import BlockEvent, FinishEvent
from oled_jax.passes import PassKind
from oled_jax.policies.registry import make_policy
from oled_jax.prefix import KeptPrefix
from oled_jax.program import forward_pass, resident_pass, sample
from oled_jax.sim.replay import ManagedReplay
from oled_jax.traces.files import open_trace
from oled_jax.traces.folded import fold_commits
from oled_jax.traces.locality_meter import measure_locality
from oled_jax.traces.spec import make_spec
from oled_jax.traces.synthetic import synthesise

L, E = GREEDY.block_length, 32
ATOL = 1e-4  # of logits: sums of other shapes
COMMITTING = dataclasses.replace(GREEDY, eos_id=-1, fold_commits=False)
FOLDING = dataclasses.replace(COMMITTING, fold_commits=True)
LENGTHS = (0, L - 1, L, L + 1, 3 * L)
PROMPTS = [np.random.default_rng(length).integers(0, 500, length).tolist() for length in LENGTHS]

TIGHT = session.kv_capacity  # as it is without the fixture

pytestmark = pytest.mark.usefixtures("roomy_kv_cache")


@pytest.fixture(scope="module")
def model(golden):
    return open_tiny(golden)


@pytest.fixture(scope="module")
def engine(model):
    return build(*model, "oled", 6)


def logits_of(engine: RecordedEngine, prompt, decoding):
    """The result, and kind and logits of each pass."""
    engine.recorded.clear()
    (result,) = run(engine, [prompt], decoding)
    return result, list(engine.recorded)


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_a_folded_pass_is_the_two_passes(engine, prompt):
    expected, two = logits_of(engine, prompt, COMMITTING)
    result, passes = logits_of(engine, prompt, FOLDING)
    assert result.output_ids == expected.output_ids
    assert result.passes == {**expected.passes, PassKind.COMMIT: 0}
    assert len(passes) == len(two) - expected.passes[PassKind.COMMIT]
    assert expected.passes[PassKind.COMMIT] == (len(prompt) + 23) // L - len(prompt) // L > 0
    separate = iter(two)
    for kind, logits in passes:
        (other_kind, other) = next(separate)
        if other_kind is PassKind.COMMIT:
            (other_kind, first) = next(separate)
            other = np.concatenate([other, first])
        assert kind is other_kind
        np.testing.assert_allclose(logits, other, rtol=0, atol=ATOL)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"])
def test_requests_that_come_and_go_have_the_text_of_runs_that_commit(engine, changes):
    alone = [run(engine, [prompt], dataclasses.replace(COMMITTING, **changes))[0] for prompt in PROMPTS]
    results = engine.generate(PROMPTS, dataclasses.replace(FOLDING, **changes), batch=3)
    assert [result.output_ids for result in results] == [result.output_ids for result in alone]
    assert all(result.passes[PassKind.COMMIT] == 0 for result in results)


@pytest.mark.slow
def test_a_row_in_its_last_block_has_room_for_a_pass_over_two(engine, monkeypatch):
    """It writes nothing behind its text when another row folds; a KV cache without room there would be damaged."""
    monkeypatch.setattr(session, "kv_capacity", TIGHT)
    folding, committing = (dataclasses.replace(decoding, gen_length=40) for decoding in (FOLDING, COMMITTING))
    prompts = PROMPTS[2:]
    assert max(map(len, prompts)) + 40 == 64, "a text that ends where a capacity may"
    results = engine.generate(prompts, folding)
    alone = [run(engine, [prompt], committing)[0] for prompt in prompts]
    assert [result.output_ids for result in results] == [result.output_ids for result in alone]


@pytest.mark.parametrize("carrier", ["native", "portable"])
def test_folded_passes_are_bit_identical_at_every_capacity(model, carrier):
    if carrier == "native" and native.extension is None:
        pytest.skip(f"no compiled extension: {native.UNAVAILABLE}")
    slots = 3 * E + 5
    expected = None
    for policy, capacity in (("lru", E), ("oled", 1), ("oled+", 5)):
        engine = build(*model, policy, capacity, slots=slots, carrier=carrier)
        found = logits_of(engine, PROMPTS[3], FOLDING)[1]
        expected = expected or found
        for (kind, logits), (other_kind, other) in zip(found, expected, strict=True):
            assert kind is other_kind
            np.testing.assert_array_equal(logits, other)


def test_the_end_token_ends_a_text_as_it_does_in_a_run_that_commits(engine):
    text = run(engine, [PROMPTS[1]], COMMITTING)[0].output_ids
    for early in (False, True):
        changes = {"eos_id": text[12], "eos_early_stop": early}
        expected, result = (
            run(engine, [PROMPTS[1]], dataclasses.replace(decoding, **changes))[0] for decoding in (COMMITTING, FOLDING)
        )
        assert (result.output_ids, result.finish) == (expected.output_ids, "eos")
        assert result.passes == {**expected.passes, PassKind.COMMIT: 0}


@pytest.mark.slow
def test_nothing_compiles_once_a_run_has_begun(engine):
    batch = [PROMPTS[1], PROMPTS[3]]
    events = engine.stream(batch, FOLDING)
    next(events)
    programs = forward_pass, resident_pass, sample
    compiled = [program._cache_size() for program in programs]
    for _ in events:
        pass
    assert [program._cache_size() for program in programs] == compiled


@pytest.mark.slow
def test_a_conversation_keeps_what_folded_passes_stored(engine):
    def answer(kept, prompt, until=None):
        stream = engine.stream([prompt], FOLDING, kept=kept)
        for event in stream:
            if isinstance(event, FinishEvent):
                return list(event.result.output_ids)
            if isinstance(event, BlockEvent) and event.block == until:
                stream.close()
        return []

    kept, prompt = KeptPrefix(engine.config, 192, 32, L), PROMPTS[4] + PROMPTS[1][:5]
    said = answer(kept, prompt)
    longer = [*prompt, *said, 7, 8]
    assert answer(kept, longer) == list(run(engine, [longer], COMMITTING)[0].output_ids)
    assert kept.reused == (len(prompt) + len(said)) // L * L - L * ((len(prompt) + len(said)) % L == 0)
    kept = KeptPrefix(engine.config, 192, 32, L)
    answer(kept, prompt, until=4)  # given up: block 3 was stored by the first pass over block 4
    assert answer(kept, longer) == list(run(engine, [longer], COMMITTING)[0].output_ids)
    assert kept.reused == 4 * L


@pytest.mark.slow
def test_a_trace_of_folded_passes(engine, tmp_path):
    """As the trace of the run that commits, with commit passes folded afterwards; and as local."""
    for name, decoding in (("folded", FOLDING), ("committing", COMMITTING)):
        with engine.record(tmp_path / name, decoding, hidden=True):
            for prompt in PROMPTS[2:]:
                engine.generate([prompt], decoding)
    folded, committing = open_trace(tmp_path / "folded"), open_trace(tmp_path / "committing")
    made = fold_commits(committing)
    assert len(made) == len(folded) < len(committing)
    for ours, recorded in zip(made, folded, strict=True):
        assert (ours.info.kind, ours.new_blocks) == (recorded.info.kind, recorded.new_blocks)
        for name in ("token_ids", "masked", "token_mask", "folds"):
            np.testing.assert_array_equal(getattr(ours.info, name), getattr(recorded.info, name))
        for name in ("token_ids", "written", "masked"):
            np.testing.assert_array_equal(getattr(ours.outcome, name), getattr(recorded.outcome, name))
        np.testing.assert_allclose(ours.info.confidence, recorded.info.confidence, atol=ATOL)
        np.testing.assert_allclose(ours.outcome.confidence, recorded.outcome.confidence, atol=ATOL)
        np.testing.assert_array_equal(ours.expert_ids, recorded.expert_ids)
        np.testing.assert_array_equal(ours.block_starts, recorded.block_starts)
        np.testing.assert_allclose(ours.cosine, recorded.cosine, atol=ATOL)
    found, expected = measure_locality(folded), measure_locality(committing)
    for name in ("overlap", "boundary", "kept", "tokens"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=ATOL)
    assert found.generated == expected.generated


@pytest.mark.slow
def test_a_folded_trace_drives_an_engine(model):
    """As it drives a simulated cache, under a policy that does not look at gates: those are not replayed."""
    spec = make_spec(
        num_layers=3, num_experts=E, top_k=4, block_length=L, requests=2, iterations=None, blocks=3, prompt_tokens=16,
        targets={"distinct_experts": 12.0},
    )  # fmt: skip
    trace = fold_commits(synthesise(spec))
    engine = build_plain(*model, "lru", 6)
    times = list(EngineReplay(engine, trace, greedy_sampling(engine.config)).run())
    simulated = ManagedReplay(make_policy("lru", context(engine.config, 6)), page_bytes=0, spare=5)
    for step in trace:
        simulated.run_pass(step)
    assert [each.kind for each in times] == [step.info.kind for step in trace]
    assert PassKind.COMMIT not in {each.kind for each in times}
    found, expected = (counts.summary(PassKind.DENOISE) for counts in (engine.statistics, simulated.statistics))
    assert (found.hits, found.misses, found.to_gpu) == (expected.hits, expected.misses, expected.to_gpu)
