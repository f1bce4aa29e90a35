"""Ctrl-C and SIGTERM as a wish to stop, which leaves the time to write a checkpoint."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager

from mxfp4.training.execution import distributed


@contextmanager
def stop_on_signal():
    """Gives an event that Ctrl-C and SIGTERM set; a second one acts as usual, but under torchrun, which passes one
    signal on more than once. Only the main thread has signals."""
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def handle(number, frame):
        event.set()
        if not distributed.launched():
            signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
