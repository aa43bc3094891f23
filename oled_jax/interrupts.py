"""Ctrl-C, held back while something runs that it would leave half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect when this is over; pressed again, at once.

    Only the main thread is interrupted; elsewhere, and where nobody listens to Ctrl-C, nothing is done.
    """
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = threading.Event()

    def hold(number: int, frame: FrameType | None) -> None:
        if held.is_set() and callable(before):
            held.clear()
            before(number, frame)
        else:
            held.set()

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held.is_set():
            signal.raise_signal(signal.SIGINT)
