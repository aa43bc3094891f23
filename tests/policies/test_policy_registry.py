"""Policy specifications: what parses, what is refused, and with which words."""

import dataclasses

import pytest
from driver import context, future_of, random_passes

from oled_jax.errors import UsageError
from oled_jax.policies.oled import OledOptions
from oled_jax.policies.registry import POLICIES, describe_policies, make_policy, parse_policy

NAMES = (
    *("oled", "oled+", "lru", "lru-global", "lfu", "lfu-decay", "moe-infinity", "moe-infinity-lfu", "finemoe"),
    *("ktransformers", "kt-uniform", "kt-dynamic", "fiddler", "tide", "sida", "swapmoe"),
    *("oracle", "belady", "all"),
)


def test_every_policy_is_registered():
    assert set(POLICIES) == set(NAMES)


def test_plain_name_gives_the_defaults():
    assert parse_policy("oled") == ("oled", OledOptions())
    assert OledOptions().confidence == "previous+rerank"
    assert OledOptions().decay == 0.8
    assert (OledOptions().interval, OledOptions().swaps) == (5, 8)


def test_options_are_read_by_the_type_of_their_field():
    name, options = parse_policy("oled:dispatch=gpu:confidence=none:decay=0.5:interval=3")
    assert name == "oled"
    assert options == OledOptions(dispatch="gpu", confidence="none", decay=0.5, interval=3)
    assert parse_policy("ktransformers:calibration=a/b.npz")[1].calibration == "a/b.npz"
    assert parse_policy("ktransformers:calibration=auto")[1].calibration is None


def test_dashes_and_underscores_are_the_same():
    assert parse_policy("oled:reuse-weight=2")[1] == parse_policy("oled:reuse_weight=2")[1]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lur", ["'lur'", "did you mean 'lru'", "moe-infinity", "belady"]),
        ("", ["unknown policy ''", "lru"]),
        ("oled:dispach=gpu", ["no option 'dispach'", "did you mean 'dispatch'", "retention", "swaps"]),
        ("lru:x=1", ["no option 'x'", "its options: none"]),
        ("oled:dispatch=gpuu", ["dispatch=gpuu", "did you mean 'gpu'", "makespan"]),
        ("oled:decay=often", ["decay=often", "a number"]),
        ("oled:interval=2.5", ["interval=2.5", "a whole number"]),
        ("oled:interval=0", ["interval is 0", "at least 1"]),
        ("oled:decay=1.5", ["decay is 1.5", "between 0.0 and 1.0"]),
        ("oled:decay=nan", ["decay is nan"]),
        ("oled:dispatch", ["'dispatch' needs a value"]),
        ("oled:decay=0.5:decay=0.5", ["'decay' is given twice"]),
    ],
)
def test_mistakes_name_the_culprit_and_what_is_known(spec, words):
    with pytest.raises(UsageError) as caught:
        parse_policy(spec)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_options_have_defaults_and_are_frozen(name):
    options = POLICIES[name].options()
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen


def test_a_policy_is_called_what_it_was_asked_for():
    assert make_policy("oled:dispatch=gpu", context()).name == "oled:dispatch=gpu"


def test_the_reference_is_no_policy():
    assert POLICIES["all"].is_reference
    with pytest.raises(UsageError, match="every expert resident"):
        make_policy("all", context())


@pytest.mark.parametrize("name", ["ktransformers", "kt-uniform", "kt-dynamic", "fiddler", "tide"])
def test_cpu_policies_need_a_backend(name):
    with pytest.raises(UsageError, match=rf"'{name}'.*--cpu-experts"):
        make_policy(name, context(cpu_available=False))


@pytest.mark.parametrize("choice", ["oled", "load", "cpu", "makespan"])
def test_an_explicit_cpu_dispatch_needs_a_backend(choice):
    with pytest.raises(UsageError, match=rf"dispatch={choice}.*--cpu-experts"):
        make_policy(f"oled:dispatch={choice}", context(cpu_available=False))


@pytest.mark.parametrize("name", ["oracle", "belady"])
def test_oracles_need_a_trace(name):
    with pytest.raises(UsageError, match=f"'{name}'.*trace"):
        make_policy(name, context())
    make_policy(name, context(future=future_of(random_passes(0, 2))))


def test_the_list_has_one_line_per_policy():
    lines = describe_policies().splitlines()
    assert [line.split()[0] for line in lines] == list(POLICIES)
    assert all(len(line) < 120 for line in lines)
