"""Ctrl-C while Orbax writes."""

import asyncio
import os
import signal
import threading

import numpy as np
import pytest

from oled_jax.convert.arrays import chunk_file, save_arrays
from oled_jax.interrupts import interrupts_held


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["interrupted", "ignored"])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_arrives_when_the_section_is_over(handler):
    passed = []

    def section():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            passed.append("inside")
        passed.append("after")

    if handler is signal.SIG_IGN:
        section()
    else:
        with pytest.raises(KeyboardInterrupt):
            section()
    assert passed == (["inside", "after"] if handler is signal.SIG_IGN else ["inside"])
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_a_second_interrupt_arrives_at_once(handler):
    passed = []

    def section():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            passed.append("once")
            os.kill(os.getpid(), signal.SIGINT)
            passed.append("twice")

    with pytest.raises(KeyboardInterrupt):
        section()
    assert passed == ["once"]
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_an_error_inside_is_not_lost(handler):
    def fail():
        raise OSError("the disk is full")

    def fail_interrupted():
        with interrupts_held():
            os.kill(os.getpid(), signal.SIGINT)
            fail()

    with pytest.raises(OSError, match="disk is full"), interrupts_held():
        fail()
    assert signal.getsignal(signal.SIGINT) is handler
    with pytest.raises(KeyboardInterrupt) as interrupt:
        fail_interrupted()
    assert isinstance(interrupt.value.__context__, OSError)


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_other_threads_are_left_alone(handler):
    seen = []

    def work():
        with interrupts_held():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [handler]


@pytest.mark.parametrize("handler", [signal.default_int_handler], indirect=True)
def test_orbax_finishes_what_it_was_handed(handler, tmp_path, monkeypatch):
    made = []
    make = asyncio.new_event_loop

    def interrupted():
        if not made:
            os.kill(os.getpid(), signal.SIGINT)
        made.append(make())
        return made[-1]

    monkeypatch.setattr(asyncio, "new_event_loop", interrupted)
    array = np.arange(6, dtype=np.float32)
    with pytest.raises(KeyboardInterrupt):
        save_arrays(tmp_path / "layer", {("up",): array})
    assert made
    assert (tmp_path / "layer" / chunk_file(("up",), 1)).read_bytes() == array.tobytes()
    assert signal.getsignal(signal.SIGINT) is handler
