"""Ctrl-C, SIGTERM and a lost terminal as a request: finish what is being done, save, and end."""

import os
import signal
import time
from contextlib import suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any

IMPATIENT = 1.0  # seconds after which another Ctrl-C means it; launchers send the first one twice
REQUESTS = ("SIGINT", "SIGTERM", "SIGHUP")


class StopSignals:
    """Inside the `with` block, signals that would end the process are noted instead.

    A second Ctrl-C, at least a second later, raises `KeyboardInterrupt` at once. A signal that the process was told to
    ignore (SIGHUP under nohup) stays ignored. Outside the main thread, where Python takes no signals, nothing is
    changed.

    `accelerate launch` with one process ends itself at a signal, without passing it on or waiting: that its process is
    gone counts as a request too.

    Attributes:
        received: name of the first signal, None so far.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._time = 0.0
        self._before: dict[signal.Signals, Any] = {}
        self._launcher = os.getppid() if _launcher_deserts() else None
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]

    def __enter__(self) -> "StopSignals":
        if current_thread() is main_thread():
            numbers = [signal.Signals[name] for name in REQUESTS if hasattr(signal, name)]
            heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def requested(self) -> bool:
        """Whether the training should end after this iteration."""
        return self.received is not None or self._launcher not in (None, os.getppid())

    def _note(self, number: int, frame: FrameType | None) -> None:
        if signal.Signals(number).name == "SIGHUP":
            self._leave_lost_terminals()
        if self.received is None:
            self.received, self._time = signal.Signals(number).name, time.monotonic()
            alone = f" The launcher does not wait for that; this is process {os.getpid()}." if self._launcher else ""
            with suppress(OSError, RuntimeError):  # a lost terminal; a signal in the middle of another print
                print(f"{self.received}: finishing this iteration, then saving a checkpoint.{alone}", flush=True)
        elif number == signal.SIGINT and time.monotonic() - self._time > IMPATIENT:
            raise KeyboardInterrupt

    def _leave_lost_terminals(self) -> None:
        """Where a terminal has hung up, writing to it is an error: write nowhere instead."""
        for descriptor in self._terminals:
            if not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


def _launcher_deserts() -> bool:
    """Whether `accelerate launch` started this one process; for several it becomes torchrun, which waits."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ and "LOCAL_RANK" not in os.environ
