"""Every CPU expert backend: results against a float64 reference, zero copy, order, counters, no deadlock."""

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from cpu_expert_cases import DTYPES, check, make, make_pages, make_work, run

from oled_jax.offload.cpu_experts import BACKENDS, numba_kernel

STRESS = Path(__file__).with_name("cpu_expert_stress.py")


@pytest.fixture(scope="module")
def stress() -> str:
    """What the stress program says of each backend, until it ends or hangs."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        result = subprocess.run(
            [sys.executable, str(STRESS), *BACKENDS], capture_output=True, text=True, timeout=300, check=False,
            env=environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return bytes(late.stdout or b"").decode()
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", BACKENDS)
class TestEveryBackend:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("threads", [1, 3])
    def test_matches_the_float64_reference(self, name: str, dtype: np.dtype, threads: int) -> None:
        pages = make_pages(dtype)
        with make(name, pages, threads) as experts:
            for N in (1, 2, 3, 5, 8, 16, 31, 33):
                for H in (0, 1, 4, 6):
                    work = make_work(pages, N=N, H=H, layer=N % 2, seed=N + 100 * H)
                    check(pages, work, run(experts, work))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_odd_sizes_that_no_alignment_helps(self, name: str, dtype: np.dtype) -> None:
        pages = make_pages(dtype, L=1, E=5, D=37, F=13)
        with make(name, pages) as experts:
            for N in (1, 7):
                work = make_work(pages, N=N, H=5, seed=N)
                check(pages, work, run(experts, work))

    def test_a_page_cut_into_slices(self, name: str) -> None:
        """One wide expert and four workers: slices of the width are summed, odd widths included."""
        pages = make_pages(DTYPES[0], L=1, E=2, D=64, F=548)
        with make(name, pages, threads=4) as experts:
            for H in (1, 2):
                work = make_work(pages, N=6, H=H, K=2)
                check(pages, work, run(experts, work))

    def test_more_rows_than_any_decoding_block(self, name: str) -> None:
        pages = make_pages(DTYPES[0], L=1, E=2)
        with make(name, pages) as experts:
            work = make_work(pages, N=150, H=1, K=2)
            check(pages, work, run(experts, work))

    def test_masked_and_unrouted_tokens_add_nothing(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=6, H=6)
        with make(name, pages) as experts:
            masked = dataclasses.replace(work, token_mask=np.zeros(6, bool))
            assert not run(experts, masked).any()
            unrouted = dataclasses.replace(work, experts=np.array([5]), expert_ids=np.full((6, 3), [0, 1, 2]))
            assert not run(experts, unrouted).any()
            assert experts.stats.pages == 0

    def test_what_masked_tokens_hold_does_not_matter(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=6, H=6)
        work.token_mask[:] = [True, False] * 3
        with make(name, pages) as experts:
            expected = run(experts, work)
            work.hidden[1::2] = np.nan
            work.gates[1::2] = np.nan
            np.testing.assert_array_equal(run(experts, work), expected)

    def test_equal_work_gives_equal_bits(self, name: str) -> None:
        pages = make_pages(DTYPES[0])
        work = make_work(pages, N=16, H=6)
        with make(name, pages, threads=3) as experts:
            first = run(experts, work)
            for _ in range(20):
                np.testing.assert_array_equal(run(experts, work), first)

    def test_reads_the_bytes_of_the_store(self, name: str) -> None:
        """No second copy: what is written to the store after construction is what is computed with."""
        pages = make_pages(DTYPES[0])
        work = make_work(pages, N=4, H=6)
        with make(name, pages) as experts:
            for layer in (0, 1):
                for array, fresh in zip(pages[layer], make_pages(DTYPES[0], L=1, seed=9)[0], strict=True):
                    array[:] = fresh
                moved = dataclasses.replace(work, layer=layer)
                check(pages, moved, run(experts, moved))

    def test_layers_in_flight_together(self, name: str) -> None:
        pages = make_pages(DTYPES[2], L=4)
        works = [make_work(pages, N=5, H=3, layer=layer, seed=layer) for layer in range(4)]
        with make(name, pages) as experts:
            for work in works:
                experts.submit(work)
            for work in reversed(works):
                check(pages, work, experts.collect(work.layer))

    def test_counts_pages_and_time(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        chosen = {int(e) for t, ids in enumerate(work.expert_ids) if work.token_mask[t] for e in ids}
        with make(name, pages) as experts:
            run(experts, work)
            run(experts, work)
            assert experts.stats.pages == 2 * len(chosen)
            assert experts.stats.busy_us > 0
            assert experts.stats.span_us > 0

    def test_waits_without_using_the_processor(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make(name, pages) as experts:
            run(experts, work)
            before = time.process_time()
            time.sleep(0.5)
            assert time.process_time() - before < 0.25  # one spinning thread would make it 0.5

    def test_close_ends_the_threads(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        before = set(threading.enumerate())  # engines of other tests may not have been collected yet
        experts = make(name, pages)
        experts.submit(work)
        experts.close()
        experts.close()
        assert not [t for t in set(threading.enumerate()) - before if t.name.startswith(f"cpu-experts-{name}-")]
        with pytest.raises(RuntimeError, match="closed"):
            experts.submit(work)
        with pytest.raises(RuntimeError, match="closed"):
            experts.collect(0)

    def test_work_that_does_not_fit_is_refused(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make(name, pages) as experts, pytest.raises(ValueError, match="does not fit"):
            experts.submit(dataclasses.replace(work, hidden=work.hidden[:, 1:]))

    @pytest.mark.slow
    def test_no_deadlock_under_a_program_on_the_same_cores(self, name: str, stress: str) -> None:
        make(name, make_pages(DTYPES[2])).close()  # skips what is not installed
        assert f"finished 1000 {name} {1000 * 2 * 4}\n" in stress  # pages: 2 layers, 4 experts each


def test_the_numba_kernel_does_without_a_place_to_keep_it(monkeypatch):
    def njit(cache=False, **_):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    monkeypatch.setattr(numba_kernel, "njit", njit)
    assert numba_kernel._compiled(abs) is abs
