"""Scripts in processes of their own, forked from one that has the libraries imported: ten seconds sooner than anew.

What a script does to its process (generators, handlers, singletons, working folder) ends with it, as in a new one.
What it imports is not tested here: some tests start a new Python for that.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["rlhf_kit.trainer", "trl", "matplotlib.figure"])


def run_fresh(script, *arguments, timeout=300, **options):
    """Run a script to its end, as `subprocess.run` with captured output does."""
    (done,) = run_together([{}], script, *arguments, timeout=timeout, **options)
    return done


def run_together(environments, script, *arguments, cwd=None, env=None, timeout=300):
    """The same with several processes at once, one for each dictionary of additional variables.

    Args:
        environments: what each process has in its environment beyond `env`.
        script: a Python file.
        arguments: anything with a `str`.
        cwd: folder to run in; None = this one.
        env: additional variables of all processes.
        timeout: seconds for all of them together.

    Returns:
        A `subprocess.CompletedProcess` per process.
    """
    command = [str(script), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [[Path(folder, f"{name}-{i}") for name in ("out", "err")] for i in range(len(environments))]
        processes = [
            FORKS.Process(
                target=_run, args=(command, cwd or os.getcwd(), {**os.environ, **(env or {}), **own}, *paths)
            )
            for own, paths in zip(environments, outputs, strict=True)
        ]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + timeout
            for process in processes:
                process.join(max(0, end - time.monotonic()))
                if process.exitcode is None:
                    raise subprocess.TimeoutExpired(command, timeout)
        finally:
            for process in filter(FORKS.Process.is_alive, processes):
                process.kill()
        return [
            subprocess.CompletedProcess(command, process.exitcode, *(path.read_text() for path in paths))
            for process, paths in zip(processes, outputs, strict=True)
        ]


def _run(command, cwd, env, *outputs):
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}.items():
        signal.signal(number, handler)
    sys.argv = command
    sys.path[:0] = [str(Path(command[0]).parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    import torch

    torch.set_num_threads(1)  # the variable of that name was read long ago
    runpy.run_path(command[0], run_name="__main__")
