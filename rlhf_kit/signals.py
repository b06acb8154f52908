"""Ctrl-C and SIGTERM as a request: finish what is being done, save, and end."""

import signal
import time
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

IMPATIENT = 1.0  # seconds after which another Ctrl-C means it; launchers send the first one twice


class StopSignals:
    """Inside the `with` block, SIGINT and SIGTERM are noted instead of ending the process.

    A second Ctrl-C, at least a second later, raises `KeyboardInterrupt` at once. Outside the main thread, where Python
    takes no signals, nothing is changed.

    Attributes:
        received: name of the first signal, None so far.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._time = 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "StopSignals":
        if current_thread() is main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received, self._time = signal.Signals(number).name, time.monotonic()
            print(f"{self.received}: finishing this iteration, then saving a checkpoint.", flush=True)
        elif number == signal.SIGINT and time.monotonic() - self._time > IMPATIENT:
            raise KeyboardInterrupt
