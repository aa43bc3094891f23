"""Keys and values kept between runs: the text is that of a fresh start, whatever happened in between."""

import dataclasses

import numpy as np
import pytest
from engines import GREEDY, SLOTS, build, open_tiny

from oled_jax.config import RopeScaling
from oled_jax.decode.events import BlockEvent, FinishEvent
from oled_jax.passes import PassKind
from oled_jax.prefix import KeptPrefix

POSITIONS, CHUNK, L = 192, 32, GREEDY.block_length
DECODING = dataclasses.replace(GREEDY, eos_id=-1)
PROMPT = np.random.default_rng(0).integers(0, 500, 29).tolist()


@pytest.fixture(scope="module")
def engine(golden):
    return build(*open_tiny(golden), "oled:dispatch=gpu", 6, slots=SLOTS)


@pytest.fixture
def kept(engine):
    return KeptPrefix(engine.config, POSITIONS, CHUNK, L)


def answer(engine, kept, prompt):
    """The answer, and how many prompt passes it took."""
    engine.recorded.clear()
    events = list(engine.stream([prompt], DECODING, kept=kept))
    prefills = sum(kind is PassKind.PREFILL for kind, _ in engine.recorded)
    return list(next(event for event in events if isinstance(event, FinishEvent)).result.output_ids), prefills


def fresh(engine, prompt):
    return answer(engine, KeptPrefix(engine.config, POSITIONS, CHUNK, L), prompt)


def test_turns_that_continue_a_text_equal_fresh_starts(engine, kept):
    prompt, passes = PROMPT, []
    for _ in range(3):
        said, prefills = answer(engine, kept, prompt)
        assert said == fresh(engine, prompt)[0]
        passes.append((kept.reused, prefills))
        prompt = prompt + said + [7, 8, 9]
    # 29 tokens; their answer of 24 ends at 53, inside the block that the run left unfinished; then 56 and 27 more.
    assert passes == [(0, 1), (48, 1), (72, 1)]
    assert fresh(engine, PROMPT)[1] == 1


def test_what_differs_is_computed_again(engine, kept):
    said, _ = answer(engine, kept, PROMPT)
    changed = [*PROMPT[:10], PROMPT[10] ^ 1, *PROMPT[11:], *said]
    for prompt, reused in ((changed, 8), (PROMPT, 8), (PROMPT[:5], 0), (PROMPT, 0), (PROMPT, 24), ([1, *PROMPT], 0)):
        assert answer(engine, kept, prompt)[0] == fresh(engine, prompt)[0]
        assert kept.reused == reused


def test_a_run_that_is_given_up_leaves_what_was_final(engine, kept):
    stream = engine.stream([PROMPT], DECODING, kept=kept)
    for event in stream:
        if isinstance(event, BlockEvent) and event.block == 4:
            stream.close()
            break
    said = fresh(engine, PROMPT)[0]
    longer = PROMPT + said
    assert answer(engine, kept, longer)[0] == fresh(engine, longer)[0]
    assert kept.reused == 32  # block 3 was committed, block 4 not yet


def test_a_run_that_broke_leaves_nothing(engine, kept, monkeypatch):
    answer(engine, kept, PROMPT)

    def fail(*_):
        raise ValueError("broken policy")

    with monkeypatch.context() as patch:
        patch.setattr(engine.manager, "_plan", fail)
        with pytest.raises(ValueError, match="broken policy"):
            answer(engine, kept, PROMPT)
    assert answer(engine, kept, PROMPT) == fresh(engine, PROMPT)
    assert kept.reused == 0


def test_angles_that_depend_on_the_length_keep_nothing(engine):
    config = dataclasses.replace(engine.config, rope_scaling=RopeScaling(rope_type="dynamic", factor=2.0))
    kept = KeptPrefix(config, POSITIONS, CHUNK, L)
    answer(engine, kept, PROMPT)
    answer(engine, kept, PROMPT)
    assert kept.reused == 0


def test_one_prompt_and_one_block_length(engine, kept):
    with pytest.raises(ValueError, match="for one prompt"):
        list(engine.stream([PROMPT, PROMPT], DECODING, kept=kept))
    with pytest.raises(ValueError, match="one block length"):
        list(engine.stream([PROMPT], dataclasses.replace(DECODING, block_length=16), kept=kept))
