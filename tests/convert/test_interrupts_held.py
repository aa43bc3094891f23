"""Ctrl-C while Orbax writes."""

import signal
import threading

import pytest

from oled_jax.convert.arrays import interrupts_held


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["interrupted", "ignored"])
def handler(request):
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_arrives_when_the_section_is_over(handler):
    passed = []

    def section():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
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
def test_an_error_inside_is_not_lost(handler):
    def fail():
        raise OSError("the disk is full")

    def fail_interrupted():
        with interrupts_held():
            signal.raise_signal(signal.SIGINT)
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
