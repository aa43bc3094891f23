"""What is particular to the native CPU expert backend: levels, addresses, threads, forks; and its C++ tests."""

import dataclasses
import multiprocessing
import os
import shutil
import subprocess
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
from cpu_expert_cases import DTYPES, check, make_pages, make_work, run

from oled_jax import native
from oled_jax.errors import UsageError
from oled_jax.offload.cpu_experts import CpuExperts, CpuWork, make_cpu_experts
from oled_jax.offload.cpu_experts.cores import one_cpu_per_core
from oled_jax.offload.cpu_experts.native import NativeExperts

CXX_TESTS = Path(__file__).parents[2] / "csrc" / "tests"
LEVELS = native.extension.cpu_isa_levels() if native.extension else []
built = pytest.mark.skipif(native.extension is None, reason=native.UNAVAILABLE)


def shifted(array: np.ndarray, offset: int) -> np.ndarray:
    """A copy at an address that is `offset` bytes past a multiple of 64."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    copy = np.ndarray(array.shape, array.dtype, buffer=raw.data, offset=start)
    copy[:] = array
    return copy


def thread_names() -> list[str]:
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


@built
class TestNative:
    @pytest.mark.parametrize("isa", LEVELS)
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_level_on_random_shapes(self, isa: str, dtype: np.dtype) -> None:
        rng = np.random.default_rng(0)
        for seed in range(8):
            D, F = (int(size) for size in rng.integers(1, 150, 2))
            pages = make_pages(dtype, L=1, D=D, F=F, seed=seed)
            with NativeExperts(pages, threads=2, isa=isa) as experts:
                assert isa in experts.description
                for N in (0, 1, 2, 3, 4, 5, int(rng.integers(6, 65))):
                    work = make_work(pages, N=N, H=int(rng.integers(1, 7)), seed=seed) if N else empty(pages)
                    check(pages, work, run(experts, work))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_pages_at_any_address(self, dtype: np.dtype) -> None:
        pages = make_pages(dtype, L=1)
        moved = [tuple(shifted(array, 1 + index) for index, array in enumerate(layer)) for layer in pages]
        assert moved[0][0].ctypes.data % 2 == 1
        work = make_work(pages, N=5, H=6)
        with NativeExperts(pages, threads=2) as aligned, NativeExperts(moved, threads=2) as unaligned:
            expected = run(aligned, work)
            np.testing.assert_array_equal(run(unaligned, work), expected)
            work = dataclasses.replace(work, hidden=shifted(work.hidden, 3))
            np.testing.assert_array_equal(run(aligned, work), expected)

    def test_the_number_of_threads_changes_nothing(self) -> None:
        pages = make_pages(DTYPES[0], L=1, D=700, F=90)  # several chunks of each kind
        work = make_work(pages, N=9, H=6)
        with NativeExperts(pages, threads=1) as one:
            expected = run(one, work)
        for threads in (2, 3, 7):
            with NativeExperts(pages, threads=threads, pin=True) as several:
                np.testing.assert_array_equal(run(several, work), expected)

    def test_arrays_of_any_layout(self) -> None:
        pages = make_pages(DTYPES[2], L=1)
        work = make_work(pages, N=6, H=4)
        wide = np.concatenate([work.expert_ids, work.gates.view(np.int32)], axis=1)
        other = dataclasses.replace(
            work,
            hidden=np.asfortranarray(work.hidden),
            expert_ids=wide[:, :3],
            gates=np.asfortranarray(work.gates.astype(np.float64)),
            experts=work.experts.astype(np.int16),
        )
        for array in (other.hidden, other.gates):
            array.flags.writeable = False
        with NativeExperts(pages, threads=2) as experts:
            np.testing.assert_array_equal(run(experts, other), run(experts, work))

    def test_a_second_submit_drops_the_first(self) -> None:
        pages = make_pages(DTYPES[2], L=1)
        work, other = make_work(pages, N=8, H=6), make_work(pages, N=8, H=6, seed=1)
        with NativeExperts(pages, threads=2) as experts:
            for _ in range(50):
                experts.submit(other)
                experts.submit(work)
                check(pages, work, experts.collect(0))
            with pytest.raises(RuntimeError, match="nothing was submitted for layer 0"):
                experts.collect(0)

    def test_two_engines_and_what_remains_of_them(self) -> None:
        before = thread_names().count("cpu-experts-0")
        pages, other = make_pages(DTYPES[0]), make_pages(DTYPES[2], D=48)
        work, second = make_work(pages, N=8, H=6), make_work(other, N=3, H=2)
        with NativeExperts(pages, threads=2) as one, NativeExperts(other, threads=1) as two:
            one.submit(work)
            two.submit(second)
            check(pages, work, one.collect(0))
            check(other, second, two.collect(0))
            assert thread_names().count("cpu-experts-0") == before + 2
            one.submit(work)  # dropped when it closes
        assert thread_names().count("cpu-experts-0") == before
        make_cpu_experts("native", pages, threads=1)  # not closed: nothing refers to it any more
        assert thread_names().count("cpu-experts-0") == before

    def test_an_expert_without_pages_is_refused(self) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with NativeExperts(pages, threads=2) as experts:
            experts.submit(work)
            with pytest.raises(IndexError, match="expert 6 is not one of 6"):
                experts.submit(dataclasses.replace(work, experts=np.array([0, 6])))
            check(pages, work, experts.collect(0))  # what was in flight stays

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:os.fork:RuntimeWarning")
    def test_a_forked_child_is_told(self) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        context = multiprocessing.get_context("fork")
        with NativeExperts(pages, threads=2) as experts:
            expected = run(experts, work)
            experts.submit(work)
            receive, send = context.Pipe(duplex=False)
            child = context.Process(target=use_in_child, args=(experts, pages, work, send))
            child.start()
            child.join(60)
            assert child.exitcode == 0
            messages, result = receive.recv()
            assert len(messages) == 3
            assert all("forked" in message for message in messages)
            np.testing.assert_array_equal(result, expected)
            np.testing.assert_array_equal(experts.collect(0), expected)

    def test_a_level_of_another_machine(self) -> None:
        with pytest.raises(UsageError, match="'neon' is not a level of this machine; choose portable"):
            NativeExperts(make_pages(DTYPES[2]), threads=1, isa="neon")

    def test_pinned_threads_stay_on_their_cores(self) -> None:
        with NativeExperts(make_pages(DTYPES[2]), threads=1, pin=True):
            affinity = [
                os.sched_getaffinity(int(task.name))
                for task in Path("/proc/self/task").iterdir()
                if (task / "comm").read_text() == "cpu-experts-0\n"
            ]
        assert {one_cpu_per_core(os.sched_getaffinity(0))[0]} in affinity


def test_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(native, "UNAVAILABLE", "no module named oled_jax._native")
    with pytest.raises(UsageError, match=r"not built \(no module named oled_jax._native\).*choose numba, xla or numpy"):
        NativeExperts(make_pages(DTYPES[2]), threads=1)


def empty(pages: list) -> CpuWork:
    """A share without tokens."""
    work = make_work(pages, N=1, H=2)
    none = {name: getattr(work, name)[:0] for name in ("hidden", "expert_ids", "gates", "token_mask")}
    return dataclasses.replace(work, **none)


def use_in_child(experts: CpuExperts, pages: list, work: CpuWork, send: Connection) -> None:
    messages = []
    for call in (lambda: experts.submit(work), lambda: experts.collect(0), experts.reset):
        try:
            call()
        except RuntimeError as error:
            messages.append(str(error))
    experts.close()
    with NativeExperts(pages, threads=2) as own:
        send.send((messages, run(own, work)))


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The C++ tests, built; skips where that takes something that is not here."""
    for tool in ("cmake", "c++"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    build = tmp_path_factory.mktemp("sanitized")
    for sanitizer in ("address", "thread"):
        probe = ["c++", f"-fsanitize={sanitizer}", "-xc++", "-", "-o", str(build / "probe")]
        if subprocess.run(probe, input=b"int main() {}", capture_output=True, check=False).returncode:
            pytest.skip(f"the compiler has no {sanitizer} sanitizer")
    for command in (["-S", str(CXX_TESTS), "-B", str(build)], ["--build", str(build), "--parallel", "2"]):
        done = subprocess.run(["cmake", *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return build


@pytest.mark.slow
@pytest.mark.parametrize("program", ["kernel_test", "engine_test"])
def test_under_sanitizers(sanitized: Path, program: str) -> None:
    done = subprocess.run([sanitized / program], capture_output=True, text=True, timeout=250, check=False)
    assert (done.returncode, done.stdout) == (0, "passed\n"), done.stderr[:4000]
