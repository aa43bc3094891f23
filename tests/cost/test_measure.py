"""Measuring on the CPU platform with tiny pages: every figure is there and positive. No figure is judged."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_model import model_config

from oled_jax.cost import measure, probes
from oled_jax.cost.lookup import profile_for
from oled_jax.cost.measure import measure_full, measure_quick, profile_key, thread_counts
from oled_jax.cost.probes import CpuProbe, Scratch, TransferLoop
from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts import make_cpu_experts


@pytest.fixture(autouse=True)
def _short(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(measure, "QUICK", measure.Budget(transfer_s=0.01, cpu_alone_s=None, together_s=0.05))
    monkeypatch.setattr(measure, "FULL", measure.Budget(transfer_s=0.01, cpu_alone_s=0.05, together_s=0.05))
    for name in ("THREADS_S", "FFN_S", "READ_S"):
        monkeypatch.setattr(measure, name, 0.01)


@pytest.fixture
def key():
    return profile_key(model_config("float32"), "numpy", 1)


@pytest.fixture
def scratch(key):
    return Scratch(key)


def test_the_key_names_machine_and_page(key):
    assert (key.platform, key.backend, key.threads) == (jax.default_backend(), "numpy", 1)
    config = model_config("float32")
    assert key.page_bytes == config.page_parameters * 4
    assert dataclasses.replace(key, dtype="bfloat16").page_bytes == config.page_parameters * 2
    assert profile_key(config, "auto", None).threads >= 1


def test_quick_measures_what_policies_need(key):
    profile = measure_quick(key)
    assert profile.quick
    assert (profile.key, profile.backend) == (key, "numpy")
    assert profile.alone.cpu is None
    assert (profile.ffn, profile.threads, profile.host_read_gbs) == ((), (), None)
    assert {point.threads for point in profile.together.cpu.points} == {1}
    assert profile.costs.h2d_us > 0
    assert profile.costs.cpu_us(1.0) > 0


def test_full_measures_everything(key):
    said = []
    profile = measure_full(key, said.append)
    assert not profile.quick
    assert len(said) == 3
    assert [time.tokens for time in profile.ffn] == [16, 32]
    assert {time.tokens for time in profile.threads} == {2}
    assert profile.host_read_gbs > 0
    assert len(profile.alone.cpu.points) >= 2


def test_an_unusable_backend_is_the_users_mistake(key):
    with pytest.raises(UsageError, match="unknown"):
        measure_quick(dataclasses.replace(key, backend="nonesuch"))


def test_scratch_pages_are_written_and_bounded(key, scratch):
    pages = len(scratch.views[1])
    assert pages == probes.STORE_PAGES[1]
    assert scratch.views[0].shape == (pages, 2 * key.width, key.hidden)
    assert not any(view.any() for view in scratch.views)
    large = dataclasses.replace(key, hidden=2048, width=512)
    assert probes._within(probes.STORE_BYTES // large.page_bytes, *probes.STORE_PAGES) * large.page_bytes < 1.1e9


def test_transfers_move_pages_in_turn(scratch):
    pages, slots = len(scratch.views[1]), scratch.pool.down.shape[0]
    for view in scratch.views:
        view[...] = np.arange(1, pages + 1).reshape(-1, 1, 1)
    scratch.pages_per_call = slots
    seen = set()
    for _ in range(pages // slots):
        assert scratch.transfer() > 0
        seen |= set(np.asarray(scratch.pool.gate_up[:, 0, 0]).astype(int).tolist())
    assert seen == set(range(1, pages + 1))


def test_an_error_in_the_transfer_thread_reaches_the_caller(scratch, monkeypatch):
    def fail():
        raise RuntimeError("the link broke")

    monkeypatch.setattr(scratch, "transfer", fail)
    with pytest.raises(RuntimeError, match="the link broke"), TransferLoop(scratch):
        pass


def test_the_transfer_loop_ends_with_its_body(scratch):
    with TransferLoop(scratch) as transfers:
        pass
    assert not transfers._thread.is_alive()
    assert transfers.page_us > 0


def test_visits_take_pages_in_turn_and_slow_hosts_fewer_tokens(scratch, monkeypatch):
    with make_cpu_experts("numpy", [scratch.views], threads=1) as experts:
        submitted = []
        submit = experts.submit
        monkeypatch.setattr(experts, "submit", lambda work: (submitted.append(work), submit(work)))
        probe = CpuProbe(experts)
        points = probe.points((1, 2, 4), 0.0)
        assert [point.tokens for point in points] == [1, 2], "no time at all: the first two, all the same"
        assert [len(work.hidden) for work in submitted] == [1, 1, 2, 1, 2]
        visited = [expert for work in submitted for expert in work.experts]
        assert len(set(visited)) == len(visited) == 5 * probes.VISIT_EXPERTS
        assert [point.tokens for point in probe.points((1, 2, 4), 5.0e-2)] in ([1, 2], [1, 2, 4])


def test_thread_counts_are_distinct_and_positive():
    assert thread_counts({0}) == [1]
    assert all(count >= 1 for count in thread_counts(set(range(64))))
    assert len(set(thread_counts({0, 1, 2}))) == len(thread_counts({0, 1, 2}))


def test_a_run_measures_once(key, monkeypatch):
    said = []
    first = profile_for(key, said.append)
    assert "measured in" in said[0]
    monkeypatch.setattr("oled_jax.cost.lookup.measure_quick", lambda _: pytest.fail("measured again"))
    assert profile_for(key, said.append) == first
    assert len(said) == 2
    assert "by a quick measurement" in said[1]


def test_a_damaged_file_is_measured_again_and_replaced(key):
    from oled_jax.cost.cache import load_profile, profile_path

    profile_path(key).parent.mkdir(parents=True)
    profile_path(key).write_text("{")
    said = []
    profile = profile_for(key, said.append)
    assert "cannot be used" in said[0]
    assert load_profile(key) == (profile, None)
