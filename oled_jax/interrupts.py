"""Ctrl-C, held back while something runs that it would leave half done."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C takes effect when this is over.

    Only the main thread is interrupted; elsewhere, and where nobody listens to Ctrl-C, nothing is done.
    """
    ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
    if ignored or threading.current_thread() is not threading.main_thread():
        yield
        return
    held = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: held.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held.is_set():
            signal.raise_signal(signal.SIGINT)
