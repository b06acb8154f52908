"""Plain script that test_resume.py starts: a run that is killed again and again, in a process that may be forked.

    python run_kills.py FOLDER [--kills N] [--iterations N]

Without iterations it ends five after the last kill. Prints, as JSON, the iteration of the newest checkpoint after each
kill and at the end.
"""

import argparse
import json
import os
import random
import signal
import threading
import time
from pathlib import Path

import torch
from run_resumable import make
from tqdm import tqdm

from rlhf_kit.checkpoint import list_checkpoints, verify

SETTINGS = {"save_every": 1, "eval_every": None, "lr_scheduler_type": "constant"}


def train(folder, iterations):
    """In a child process: go on from the newest checkpoint, or start."""
    code = 1
    try:
        found = bool(list_checkpoints(folder))
        if not found and folder.exists():
            os.rename(folder, folder.with_name(f"lost-{time.time()}"))  # killed before the first checkpoint
        make(folder, iterations, **SETTINGS).train(resume_from_checkpoint=found or None)
        code = 0
    finally:
        os._exit(code)


def main(folder, kills, iterations):
    torch.set_num_threads(1)
    tqdm.set_lock(threading.RLock())  # its own is shared with forks, and a killed one may hold it for ever
    draw, moments, latest = random.Random(0), [], -1
    for kill in range(kills + 1):
        child = os.fork()
        if child == 0:
            train(folder, 400 if kill < kills else iterations or latest + 5)
        if kill < kills:
            time.sleep(draw.uniform(0.3, 1.5))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if kill < kills else 0)
        found = list_checkpoints(folder)
        for path in found:
            verify(path)
        latest = int(found[-1].name.split("-")[1]) if found else -1
        moments.append(latest)
    print(json.dumps(moments))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--iterations", type=int)
    main(**vars(parser.parse_args()))
