"""One process, two, and two with a sharded base give the same training; failures end all of them."""

import os
import socket
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from conftest import make_lora, make_model, make_tokenizer
from fresh import run_together
from run_resumable import make
from safetensors.torch import load_file
from test_reward_models import save_base, save_reward_adapter

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_kit.checkpoint import list_checkpoints, verify
from rlhf_kit.processes import failing_together, make_accelerator, passes, shard_base

SCRIPT = Path(__file__).parent / "run_processes.py"
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
CPU = {"ACCELERATE_USE_CPU": "true"}
FSDP = {**CPU, "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
# `accelerate launch --cpu --num_processes 2` would start one process.
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]


def start(folder, mode, launcher):
    return subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(folder), mode],
        env={**ENV, **CPU}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def run(folder, mode, processes=1, env=CPU):
    """What each process saved. Each has in its environment what torchrun would put there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    places = [{**world, "RANK": str(i), "LOCAL_RANK": str(i)} if processes > 1 else {} for i in range(processes)]
    folder.mkdir(parents=True, exist_ok=True)
    for done in run_together(places, SCRIPT, folder, mode, env=env):
        assert done.returncode == 0, done.stderr[-3000:]
    saved = [torch.load(folder / f"rank-{rank}.pt", weights_only=True) for rank in range(processes)]
    assert [part["world"] for part in saved] == [processes] * processes
    return saved


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return run(tmp_path_factory.mktemp("one"), "train")[0]


@pytest.fixture(scope="module")
def replicated(tmp_path_factory):
    return run(tmp_path_factory.mktemp("replicated"), "train", 2)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sharded"), "train", 2, FSDP)


@pytest.fixture(params=["replicated", "sharded"])
def two(request):
    return request.getfixturevalue(request.param), request.param == "sharded"


def largest_difference(one, two):
    assert one.keys() == two.keys()
    assert one
    return max(float((one[name] - two[name]).abs().max()) for name in one)


@pytest.mark.slow
def test_two_processes_train_like_one(one, two):
    # kills: loss divided by the local token count, gradients averaged, whitening, scaling, statistics or the adaptive
    # coefficient per process; a frozen weight that changed
    for rank in two[0]:
        assert largest_difference(one["gradients"], rank["gradients"]) < 1e-6
        assert largest_difference(one["weights"], rank["weights"]) < 5e-6  # Adam divides by small numbers
        assert largest_difference(one["base"], rank["base"]) == 0
        for a, b in zip(one["metrics"], rank["metrics"], strict=True):
            assert a.keys() == b.keys()
            for name, value in a.items():
                assert b[name] == pytest.approx(value, abs=1e-6, rel=1e-5), name
        assert rank["moments"] == pytest.approx(one["moments"], abs=1e-6)
        assert rank["kl_coef"] == pytest.approx(one["kl_coef"], abs=1e-9)
    assert largest_difference(two[0][0]["final"], two[0][1]["final"]) == 0


@pytest.mark.slow
def test_sharding_halves_the_base_and_nothing_else(one, two):
    # kills: FSDP silently ignored, as Accelerate does on CPUs; trained weights sharded too
    ranks, sharded = two
    total = one["local"]
    if sharded:
        assert all(rank["sharded"] == len(one["base"]) for rank in ranks)
        assert sum(rank["local"] for rank in ranks) == total
        assert max(rank["local"] for rank in ranks) < 0.6 * total
    else:
        assert [(rank["sharded"], rank["local"]) for rank in ranks] == [(0, total)] * 2


@pytest.mark.slow
def test_sharding_changes_no_number(replicated, sharded):
    # kills: a base that is gathered in another precision or order; other samples
    assert largest_difference(replicated[0]["final"], sharded[0]["final"]) == 0
    assert replicated[0]["seen"] == sharded[0]["seen"]


def four_adapters(folder):
    folder.mkdir()
    base = save_base(folder / "base")
    torch.manual_seed(4)
    sft = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora("llama"))
    for name, p in sft.trainable_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    sft.save_pretrained(folder / "sft")
    (folder / "sft/value_head.safetensors").unlink()
    make_tokenizer().save_pretrained(folder / "sft")
    save_reward_adapter(base, folder / "reward", target_modules="all-linear")
    return folder


@pytest.mark.slow
def test_four_adapters_on_one_base_in_one_process_in_two_and_sharded(tmp_path):
    # kills: a role that is sharded, broadcast or summed differently from the policy; a reward pass that one process
    # makes and the other does not; what functions log lost in all processes but one
    one = run(four_adapters(tmp_path / "one"), "roles")[0]
    two = run(four_adapters(tmp_path / "two"), "roles", 2)
    sharded = run(four_adapters(tmp_path / "sharded"), "roles", 2, FSDP)
    assert all(weight.any() for name, weight in one["weights"].items() if ".critic." in name and "lora_B" in name)
    assert any(".critic." in name for name in one["weights"])
    for rank in [*two, *sharded]:
        assert largest_difference(one["gradients"], rank["gradients"]) < 1e-6
        assert largest_difference(one["weights"], rank["weights"]) < 5e-6
        torch.testing.assert_close(rank["scores"], one["scores"], atol=1e-6, rtol=1e-5)
        for a, b in zip(one["metrics"], rank["metrics"], strict=True):
            assert b == pytest.approx(a, abs=1e-6, rel=1e-5)
        assert rank["last"]["logged/rank"] == 0.5
    for rank in sharded:
        assert largest_difference(two[0]["final"], rank["final"]) == 0
        assert rank["last"] == two[0]["last"]


@pytest.mark.slow
def test_processes_sample_differently_and_rewards_see_their_own_rows(two):
    # kills: the same random numbers in each process; all rows handed to every process
    first, second = (rank["seen"] for rank in two[0])
    assert [len(call["prompts"]) for call in first] == [3, 2, 3, 2]  # 6 training prompts, 3 evaluation prompts
    assert [len(call["prompts"]) for call in second] == [3, 1, 3, 1]
    for a, b in zip(first, second, strict=True):
        assert not any(ids in b["completion_ids"] for ids in a["completion_ids"])
    assert sorted(first[0]["prompts"]) == sorted(second[0]["prompts"])  # three prompts, each twice


@pytest.mark.slow
def test_uneven_shares_and_ragged_completions_do_not_hang(tmp_path):
    # kills: processes that make different numbers of passes, steps of generation or collectives; idle passes that
    # leave something in a gradient
    replicated, sharded = (run(tmp_path / str(len(env)), "uneven", 2, env) for env in (CPU, FSDP))
    for ranks in (replicated, sharded):
        assert [rank["iteration"] for rank in ranks] == [4, 4]
        assert [len(rank["seen"][0]["prompts"]) for rank in ranks] == [2, 1]  # evaluation before training
        assert [len(rank["seen"][1]["prompts"]) for rank in ranks] == [3, 2]
        lengths = [len(ids) for rank in ranks for call in rank["seen"] for ids in call["completion_ids"]]
        assert len(set(lengths)) > 3
    assert largest_difference(replicated[0]["final"], sharded[0]["final"]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("env", [CPU, FSDP], ids=["replicated", "sharded"])
def test_two_processes_resume_exactly(env, tmp_path):
    # kills: random generators of the first process only; a checkpoint that needs the sharded base
    run(tmp_path, "resume", 2, env)
    straight, broken = (
        load_file(tmp_path / name / "run" / "checkpoint-4" / "training_state.safetensors")
        for name in ("straight", "broken")
    )
    assert largest_difference(straight, broken) == 0


@pytest.mark.slow
def test_exception_in_one_process_is_raised_in_all(tmp_path):
    # kills: the others left waiting for the one that failed
    first, last = run(tmp_path, "fail", 2)
    assert last["error"] == "ZeroDivisionError: the reward server is gone"
    assert "raised by reward function" in last["notes"][0]
    assert first["error"].startswith("RuntimeError: process 1 failed:\nTraceback")
    assert "ZeroDivisionError: the reward server is gone" in first["error"]
    assert max(first["seconds"], last["seconds"]) < 60


@pytest.mark.slow
def test_a_process_that_dies_ends_all_within_a_minute_with_its_traceback(tmp_path):
    # kills: a handler of SIGTERM that keeps the launcher from ending the others
    begin = time.monotonic()
    done = start(tmp_path, "die", TORCHRUN)
    assert time.monotonic() - begin < 60
    assert done.returncode != 0
    assert "MemoryError: out of memory" in done.stderr


@pytest.mark.slow
def test_terminated_launcher_ends_both_after_the_same_iteration_with_a_checkpoint(tmp_path):
    # kills: processes that stop after different iterations and wait for each other; no checkpoint
    command = [sys.executable, *TORCHRUN, str(SCRIPT), str(tmp_path), "long"]
    with subprocess.Popen(
        command, env={**ENV, **CPU}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as launcher:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (tmp_path / "run" / "log.jsonl").exists():
            time.sleep(0.2)
        launcher.terminate()
        assert launcher.wait(60) != 0  # torchrun's own answer to SIGTERM
    (found,) = list_checkpoints(tmp_path / "run")
    verify(found)
    ranks = [torch.load(tmp_path / f"rank-{rank}.pt", weights_only=True)["iteration"] for rank in (0, 1)]
    assert ranks == [int(found.name.split("-")[1])] * 2


@pytest.mark.slow
def test_fewer_processes_than_asked_for_are_said(tmp_path):
    # kills: accelerate's silent single process
    options = "--cpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", *options.split()]
    done = start(tmp_path, "fail", launcher)
    assert done.returncode == 0, done.stderr[-3000:]
    assert torch.load(tmp_path / "rank-0.pt", weights_only=True)["world"] == 1
    assert "one process runs, but the launcher seems to have been asked for several" in done.stderr


# Launches that cannot work


@pytest.fixture
def launch(monkeypatch):
    """Fresh state of accelerate, environment variables as a launcher would set them."""

    def set_up(**variables):
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield set_up
    monkeypatch.undo()
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "DeepSpeed is not supported.*FSDP2"),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true"}, "FSDP version 1 .*--fsdp_version 2"),
        ({"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", "FSDP_VERSION": "2"}, "there is one process"),
        ({"ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_USE_CPU": "true"}, "mixed_precision='fp16'.*bf16"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "gradient_accumulation_steps=4.*micro_batch_size"),
    ],
    ids=["deepspeed", "fsdp1", "alone", "fp16", "accumulation"],
)
def test_launches_that_cannot_work_are_refused(variables, match, launch, tmp_path):
    # kills: a setting of the launcher silently ignored
    launch(**variables)
    with pytest.raises(ValueError, match=match):
        make_accelerator(PPOConfig(output_dir=str(tmp_path)))


def test_single_process_warns_only_if_more_were_asked_for(launch, tmp_path):
    # kills: a warning for everyone, or for nobody
    launch(ACCELERATE_USE_CPU="true")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_accelerator(PPOConfig(output_dir=str(tmp_path)))
    launch(ACCELERATE_USE_CPU="true", MASTER_ADDR="127.0.0.1")
    with pytest.warns(UserWarning, match="asked for several"):
        make_accelerator(PPOConfig(output_dir=str(tmp_path)))


def test_what_cannot_be_sharded_is_refused(tmp_path):
    # kills: full fine-tuning or int8 sharded into wrong numbers
    whole = AutoModelForCausalLMWithValueHead(make_model("llama"))
    with pytest.raises(ValueError, match="pass peft_config"):
        shard_base(whole, Accelerator(cpu=True))
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
    model.causal_lm.is_quantized = True
    with pytest.raises(ValueError, match="load_in_8bit"):
        shard_base(model, Accelerator(cpu=True))
    model.is_sharded = True
    with pytest.raises(ValueError, match="merge there"):
        model.merge_and_save(tmp_path)


# Small parts


def test_passes_cover_every_row_once():
    # kills: the last short slice lost, rows twice
    model = AutoModelForCausalLMWithValueHead(make_model("llama"))
    for count in range(9):
        for size in range(1, 5):
            parts = list(passes(model, count, size))
            assert [i for rows, idle in parts for i in range(count)[rows] if not idle] == list(range(count))
            assert not any(idle for _, idle in parts)
            assert all(rows.stop - rows.start == size for (rows, _), _ in pairwise(parts))


def test_idle_passes_fill_up_to_the_process_with_most(monkeypatch):
    # kills: idle passes over no row, or counted as own
    model = AutoModelForCausalLMWithValueHead(make_model("llama"))
    model.is_sharded = True
    monkeypatch.setattr("rlhf_kit.processes._most", lambda count: 3)
    assert list(passes(model, 2, 2)) == [(slice(0, 2), False), (slice(0, 1), True), (slice(0, 1), True)]
    assert list(passes(model, 0, 2)) == [(slice(0, 1), True)] * 3


def test_failing_together_raises_the_own_error_in_one_process():
    # kills: an exception swallowed, its type lost
    with pytest.raises(ZeroDivisionError), failing_together(Accelerator(cpu=True)):
        raise ZeroDivisionError
    with failing_together(Accelerator(cpu=True)):
        pass


def test_another_number_of_processes_is_said_when_resuming(tmp_path):
    # kills: a resume that silently samples other completions
    make(tmp_path, 2).train()
    trainer = make(tmp_path, 3, lr_scheduler_type="cosine")
    trainer._checkpoints._identity["number of processes"] = 2
    with pytest.warns(UserWarning, match="number of processes: 1 in the checkpoint, 2 now"):
        trainer.train(resume_from_checkpoint=True)
