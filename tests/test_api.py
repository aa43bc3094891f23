"""The package from Python: what `load` gives, what it refuses, and that importing it costs nothing."""

import subprocess
import sys
import threading

import pytest

import oled_jax
from oled_jax import api
from oled_jax.errors import UsageError
from oled_jax.machine import MEMORY_FRACTION_VARIABLE
from oled_jax.text import TextCodec
from oled_jax.text_stream import TextStream

SHORT = {"gen_length": 16, "block_length": 8, "threshold": 0.3}
IMPORTING = """
import os, sys
import oled_jax
assert not {"jax", "numpy", "transformers"} & set(sys.modules), "importing the package is not cheap"
from oled_jax import load
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
model = load(sys.argv[1], policy="all", positions=64)
assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
assert {"load", "Model"} <= set(dir(oled_jax))
model.close()
"""


@pytest.fixture(scope="module")
def model(tiny_model):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MEMORY_FRACTION_VARIABLE, "0.5")
        with oled_jax.load(str(tiny_model), expert_cache=6, policy="lru", positions=48, batch=2) as model:
            yield model


@pytest.mark.slow
def test_importing_is_cheap_and_loading_prepares_jax(tiny_model):
    subprocess.run([sys.executable, "-c", IMPORTING, str(tiny_model)], check=True, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        oled_jax.lode  # noqa: B018


def test_the_parts_of_a_stream_are_the_answer(model):
    answer = model.generate("Hé", **SHORT)
    parts = list(model.stream("Hé", **SHORT))
    assert answer.text == "".join(part.text for part in parts) == parts[-1].answer.text
    assert answer.ids == tuple(token for part in parts for token in part.ids) == parts[-1].answer.ids
    assert len(answer.ids) == 16
    assert [part.answer is None for part in parts] == [True, True, True, False]  # 3 + 5, 8 and 3 tokens
    assert answer.result.share.passes == answer.result.passes["denoise"]
    figures = model.statistics()["cache"]
    assert figures["policy"] == "lru"
    assert figures["bytes_per_token"] == figures["bytes_h2d"] / 32


def test_text_and_ids_alone_or_several(model):
    ids = model.encode("Hé")
    alone = model.generate(ids, **SHORT)
    assert alone.ids == model.generate("Hé", **SHORT).ids
    several = model.generate(["Hé", ids, "x"], **SHORT)
    assert [answer.ids for answer in several[:2]] == [alone.ids, alone.ids]


def test_settings_are_those_of_the_checkpoint_and_the_call(model):
    assert model.decoding().block_length == 16
    assert model.decoding(block_length=8, temperature=1.0, seed=3).seed == 3


@pytest.mark.parametrize(
    ("prompt", "settings", "words"),
    [
        ("x", {"tresh": 1}, "no setting 'tresh'"),
        ("x", {"top_k": 3}, "--top-k has no effect"),
        ("x", {"mode": "speed"}, "have no modes"),
        ("x", {"gen_length": 400}, "positions that memory was planned for"),
        ([], {}, "empty"),
        (["x", 3], {}, "mixture"),
        ([{"role": "user", "content": "x"}], {}, "chat template"),
        ([600], SHORT, "outside the vocabulary"),
        ([1], {"system": "x"}, "for prompts that are text"),
    ],
)
def test_a_callers_mistake_is_named(model, prompt, settings, words):
    with pytest.raises(UsageError, match=words):
        model.generate(prompt, **settings)


def test_impossible_loads(tiny_model):
    with pytest.raises(UsageError, match="at least 1"):
        oled_jax.load(str(tiny_model), batch=0)
    with pytest.raises(UsageError, match="1 to 32"):
        oled_jax.load(str(tiny_model), expert_cache=33)


def test_a_second_generation_is_refused_whatever_thread_it_comes_from(model):
    stream = model.stream("Hé", **SHORT)
    first = next(stream)
    caught = []

    def call():
        try:
            model.generate("x", **SHORT)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "already generating" in caught[0]
    rest = list(stream)
    assert first.ids + rest[0].ids + rest[1].ids == model.generate("Hé", **SHORT).ids
    stream = model.stream("Hé", **SHORT)
    next(stream)
    stream.close()
    assert model.generate("Hé", **SHORT).ids[:5] == first.ids


def test_no_part_of_a_text_holds_half_a_character(tiny_model):
    codec = TextCodec.open(tiny_model)
    for text in ("aé😀b", "é\ufffd", "😀"):
        ids, stream = codec.encode_prompt(text), TextStream(codec)
        parts = [stream.add([token]) for token in ids]
        assert all(part == "" or part in text for part in parts)
        assert "".join(parts) + stream.finish() == text
    stream = TextStream(codec)
    assert stream.add(codec.encode_prompt("a😀")[:3]) == "a"
    assert stream.finish() == "\ufffd"


def test_prompts_alone_and_several_are_told_apart():
    assert api._as_prompts("x") == (["x"], False)
    assert api._as_prompts([1, 2]) == ([[1, 2]], False)
    assert api._as_prompts([[1, 2], "x"]) == ([[1, 2], "x"], True)
    message = {"role": "user", "content": "x"}
    assert api._as_prompts([message]) == ([[message]], False)
    assert api._as_prompts([[message], [message]])[1]
