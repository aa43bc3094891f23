"""Every CPU expert backend when something breaks: the caller gets that error, and the next request works."""

import dataclasses

import numpy as np
import pytest
from cpu_expert_cases import DTYPES, check, make, make_pages, make_work, raising, run

from oled_jax.offload.cpu_experts import BACKENDS
from oled_jax.offload.cpu_experts.workers import ThreadedCpuExperts

PYTHON_THREADS = [name for name, backend in BACKENDS.items() if issubclass(backend, ThreadedCpuExperts)]


@pytest.mark.parametrize("name", PYTHON_THREADS)
class TestFaultsOfWorkers:
    def test_an_error_reaches_the_caller_as_itself(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make(name, pages) as experts:
            error = KeyError("broken on purpose")
            with monkeypatch.context() as patch:
                patch.setattr(experts, "_compute", raising(error))
                experts.submit(work)
                with pytest.raises(KeyError) as caught:
                    experts.collect(0)
            assert caught.value is error
            check(pages, work, run(experts, work))

    @pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the death is the point
    @pytest.mark.parametrize("threads", [1, 2])
    def test_a_dead_worker_is_noticed_and_replaced(
        self, name: str, threads: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make(name, pages, threads) as experts:
            with monkeypatch.context() as patch:
                patch.setattr(experts, "_compute", raising(SystemExit()))  # ends a thread, silently
                experts.submit(work)
                with pytest.raises(RuntimeError, match=r"thread cpu-experts-\w+-\d died in layer 0, expert \d"):
                    experts.collect(0)
            check(pages, work, run(experts, work))


@pytest.mark.parametrize("name", BACKENDS)
class TestFaults:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_broken_weights_are_named(self, name: str, dtype: np.dtype, value: float) -> None:
        pages = make_pages(dtype)
        work = dataclasses.replace(make_work(pages, N=4, H=6), layer=1, expert_ids=np.full((4, 3), [1, 2, 3]))
        work.token_mask[:] = True
        with make(name, pages) as experts:
            good = pages[1][1][2].copy()
            pages[1][1][2, 0, 0] = value
            with pytest.raises(RuntimeError, match=r"layer 1, expert 2: .*: its weights hold NaN or infinity"):
                run(experts, work)
            pages[1][1][2] = good
            check(pages, work, run(experts, work))

    def test_broken_hidden_states_are_told_apart(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = dataclasses.replace(make_work(pages, N=4, H=6), token_mask=np.ones(4, bool))
        work.hidden[2, 3] = np.nan
        with (
            make(name, pages) as experts,
            pytest.raises(RuntimeError, match="the hidden states or gates hold NaN"),
        ):
            run(experts, work)

    def test_reset_drops_what_was_not_collected(self, name: str) -> None:
        pages = make_pages(DTYPES[2])
        work = make_work(pages, N=8, H=6)
        with make(name, pages) as experts:
            experts.submit(work)
            experts.submit(work)
            experts.reset()
            with pytest.raises(RuntimeError, match="nothing was submitted for layer 0"):
                experts.collect(0)
            check(pages, work, run(experts, work))
