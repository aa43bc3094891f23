"""LLaDA2.1: its modes, reading a checkpoint as 2.1, and what the expert cache sees of edit passes."""

import pytest
from engines import build_plain, context, open_tiny

from oled_jax.config import DecodingConfig
from oled_jax.decoding_options import resolve_decoding
from oled_jax.errors import UsageError
from oled_jax.loading import open_model
from oled_jax.models.llada2 import LLADA2, LLADA21
from oled_jax.passes import PassKind
from oled_jax.policies.registry import make_policy
from oled_jax.text import TokenIds

IDS = TokenIds(mask_id=511, eos_id=-1)


def resolve(family=LLADA21, generation_config=(), **flags):
    return resolve_decoding(flags, family=family, generation_config=dict(generation_config), ids=IDS)


@pytest.mark.parametrize(
    ("flags", "threshold", "editing"),
    [
        ({}, 0.7, 0.5),
        ({"mode": "quality"}, 0.7, 0.5),
        ({"mode": "speed"}, 0.5, 0.0),
        ({"mode": "speed", "threshold": 0.9}, 0.9, 0.0),
        ({"mode": "speed", "editing_threshold": None}, 0.5, None),
        ({"mode": "quality", "editing_threshold": 0.0}, 0.7, 0.0),
    ],
)
def test_a_flag_goes_before_the_mode(flags, threshold, editing):
    decoding = resolve(**flags)
    assert (decoding.editing, decoding.threshold, decoding.editing_threshold) == (True, threshold, editing)


def test_a_mode_goes_before_what_the_checkpoint_says():
    said = {"threshold": 0.95, "editing_threshold": 0.9, "block_length": 8}
    decoding = resolve(generation_config=said, mode="speed")
    assert (decoding.threshold, decoding.editing_threshold, decoding.block_length) == (0.5, 0.0, 8)


@pytest.mark.parametrize(
    ("family", "flags", "words"),
    [
        (LLADA21, {"mode": "speed", "threshold": 0.5, "editing_threshold": 0.1}, "are given: leave it out"),
        (LLADA2, {"mode": "speed"}, "--mode speed has no effect, models of family llada2 have no modes"),
        (LLADA2, {"mode": "speed"}, "--family llada21"),
        (LLADA2, {"editing_threshold": 0.5}, r"do not edit tokens.*--family llada21"),
        (LLADA2, {"max_post_steps": 3}, r"do not edit tokens.*--family llada21"),
    ],
)
def test_modes_and_editing_are_refused_where_they_do_nothing(family, flags, words):
    with pytest.raises(UsageError, match=words):
        resolve(family, **flags)


def test_a_checkpoint_that_says_llada2_can_be_read_as_21(golden):
    directory = str(golden / "llada2-tiny")
    assert open_model(directory).family is LLADA2
    assert open_model(directory, family="llada21").family is LLADA21


def test_every_edit_pass_is_an_iteration_of_the_cache(golden):
    config, source = open_tiny(golden)
    policy = make_policy("oled:dispatch=gpu", context(config, 6))
    begun, ended = [], []
    begin, end = policy.begin_iteration, policy.end_iteration
    policy.begin_iteration = lambda info: (begun.append((info.kind, bool(info.masked.any()))), begin(info))[1]
    policy.end_iteration = lambda outcome: (ended.append(outcome.kind), end(outcome))[1]
    engine = build_plain(config, source, policy)
    decoding = DecodingConfig(
        mask_id=511, eos_id=-1, gen_length=16, block_length=8, threshold=0.2, editing=True, editing_threshold=0.0
    )
    (result,) = engine.generate([[5, 6, 7]], decoding)
    engine.close()
    assert result.passes[PassKind.EDIT] > 2
    assert [kind for kind, _ in begun] == ended
    assert begun.count((PassKind.EDIT, False)) == result.passes[PassKind.EDIT]
    counted = {kind: engine.statistics.summary(kind) for kind in PassKind}
    assert {kind: counted[kind].passes for kind in PassKind} == result.passes
    assert counted[PassKind.EDIT].hits > 0
