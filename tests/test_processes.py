"""One process and two give the same training."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "run_two_processes.py"


def run(folder, processes):
    folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    launcher = [sys.executable]
    if processes > 1:
        # `accelerate launch --cpu --num_processes 2` would start one process without saying so.
        launcher += ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--master_port=29533"]
    done = subprocess.run(
        [*launcher, SCRIPT, folder], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "out.pt", weights_only=True)


@pytest.mark.slow
def test_two_processes_train_like_one(tmp_path):
    # kills: loss divided by the local token count, gradients averaged, whitening or scaling per process
    one, two = run(tmp_path / "one", 1), run(tmp_path / "two", 2)
    assert (one["world"], two["world"]) == (1, 2)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, atol=1e-5, rtol=1e-5)
    assert one["metrics"].keys() == two["metrics"].keys()
    for name, value in one["metrics"].items():
        torch.testing.assert_close(two["metrics"][name], value, atol=1e-5, rtol=1e-4, msg=name)
