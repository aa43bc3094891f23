"""Choosing a CPU expert backend by name or by measurement, and what is particular to the XLA one."""

import os
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from cpu_expert_cases import DTYPES, check, make, make_pages, make_work, raising, run

from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts import BACKENDS, default_threads, make_cpu_experts
from oled_jax.offload.cpu_experts import numba as numba_backend
from oled_jax.offload.cpu_experts.registry import physical_cores
from oled_jax.offload.cpu_experts.xla import BUCKETS, _expert


class TestXla:
    def test_aligned_pages_are_aliased(self) -> None:
        pages = make_pages(DTYPES[0])
        with make("xla", pages) as experts:
            assert experts.notes == ()
            gate_up, down = experts._aliases[1][3]
            assert gate_up.unsafe_buffer_pointer() == pages[1][0][3].ctypes.data
            assert down.unsafe_buffer_pointer() == pages[1][1][3].ctypes.data

    def test_unaligned_pages_are_noted(self) -> None:
        with make("xla", make_pages(DTYPES[0], D=37, F=13)) as experts:
            assert "not 64-byte aligned" in experts.notes[0]

    def test_nothing_compiles_after_construction(self) -> None:
        pages = make_pages(DTYPES[0], D=96)
        with make("xla", pages) as experts:
            compiled = _expert._cache_size()
            for N in (1, 3, 33, 150):
                run(experts, make_work(pages, N=N, H=6))
            assert _expert._cache_size() == compiled

    def test_a_program_holds_no_copy_of_its_page(self) -> None:
        D, F = 2048, 512
        gate_up, down = np.zeros((2 * F, D), ml_dtypes.bfloat16), np.zeros((D, F), ml_dtypes.bfloat16)
        for rows in BUCKETS[:3]:
            program = _expert.lower(gate_up, down, np.zeros((rows, D), ml_dtypes.bfloat16)).compile()
            assert program.memory_analysis().temp_size_in_bytes < 0.1 * (gate_up.nbytes + down.nbytes)


class TestRegistry:
    def test_auto_says_which_and_why(self) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make_cpu_experts("auto", pages, threads=2) as experts:
            assert experts.description.startswith(f"CPU experts: {experts.name}, 2 threads")
            assert "(the fastest of those measured" in experts.description
            assert all(name in experts.description for name in BACKENDS)
            check(pages, work, run(experts, work))

    def test_auto_passes_over_what_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(numba_backend, "_load_kernel", raising(UsageError("numba cannot be imported")))
        with make_cpu_experts("auto", make_pages(DTYPES[2]), threads=1) as experts:
            assert experts.name != "numba"
            assert "numba is not usable here (numba cannot be imported)" in experts.description

    def test_a_missing_numba_says_what_to_install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "oled_jax.offload.cpu_experts.numba_kernel", None)
        with pytest.raises(UsageError, match=r"oled_jax\[numba\]"):
            make_cpu_experts("numba", make_pages(DTYPES[2]), threads=1)

    @pytest.mark.parametrize(
        ("name", "threads", "match"), [("fast", 1, "'fast' is unknown"), ("numpy", 0, "at least 1")]
    )
    def test_a_users_mistake(self, name: str, threads: int, match: str) -> None:
        with pytest.raises(UsageError, match=match):
            make_cpu_experts(name, make_pages(DTYPES[2]), threads=threads)

    def test_pages_that_no_store_has(self) -> None:
        (gate_up, down), other = make_pages(DTYPES[2])
        for pages in (
            [],
            [(gate_up[:, 1:], down)],
            [(gate_up.astype(np.float64), down.astype(np.float64))],
            [(np.asfortranarray(gate_up), down)],
            [other, (gate_up[:3].copy(), down[:3].copy())],
        ):
            with pytest.raises(ValueError, match="MoE layer"):
                make_cpu_experts("numpy", pages, threads=1)

    def test_default_threads_leave_cores_free(self, tmp_path: Path) -> None:
        for cpu in range(16):  # eight cores, two threads each
            folder = tmp_path / f"cpu{cpu}" / "topology"
            folder.mkdir(parents=True)
            (folder / "thread_siblings_list").write_text(f"{cpu % 8},{cpu % 8 + 8}\n")
        assert physical_cores(set(range(16)), tmp_path) == 8
        assert physical_cores({0, 1, 8}, tmp_path) == 2
        assert physical_cores({0, 1, 99}, tmp_path) == 3
        assert 1 <= default_threads() <= max(1, len(os.sched_getaffinity(0)) - 2)
