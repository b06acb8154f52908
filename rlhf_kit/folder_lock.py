"""One folder, one writer: two processes that were given the same `output_dir` do not mix their logs and checkpoints.

The lock is a POSIX record lock on a hidden file. Such a lock belongs to the process: it goes with it however it ends,
a forked worker that lives on does not keep it, and a second trainer in the same process may use the same folder.
Where there is none (Windows, some network file systems) nothing is locked.
"""

import errno
import os
from pathlib import Path
from typing import TextIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"
_held: dict[Path, TextIO] = {}


def claim(folder: Path) -> None:
    """Make this process the only one that writes into the folder, which is made if missing; again does nothing.

    Raises:
        ValueError: another process has claimed it.
    """
    path = folder.resolve() / LOCK_FILE
    if fcntl is None or path in _held:
        return
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        file = path.open("a+")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read() or "unknown"
            file.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system without locks
            raise ValueError(
                f"output_dir {str(folder)!r} is being written by another process (number {holder}): let that end, or "
                "choose another output_dir. Nothing was changed."
            ) from None
        if _is_at(path, file):
            break
        file.close()  # its last holder removed it between opening and locking
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    _held[path] = file


def release(folder: Path) -> None:
    """Let others write into the folder; nothing if this process had not claimed it."""
    path = folder.resolve() / LOCK_FILE
    file = _held.pop(path, None)
    if file is not None:
        path.unlink(missing_ok=True)
        file.close()


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
