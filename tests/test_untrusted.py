"""Files from others: no pickle is run, no code of a repository unless asked for, no path leaves a checkpoint."""

import ast
import builtins
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from conftest import make_lora, make_model, make_tokenizer
from run_resumable import make

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

PACKAGE = Path(__file__).parents[1] / "rlhf_kit"


class Bomb:
    """Unpickling this makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "exploded"


@pytest.fixture
def base(tmp_path):
    make_model("llama").save_pretrained(tmp_path / "base")
    make_tokenizer().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder, **kwargs):
    return AutoModelForCausalLMWithValueHead.from_pretrained(str(folder), **kwargs)


def test_the_bomb_works(tmp_path, marker):
    # kills: a test that nothing could fail
    torch.save(Bomb(marker), tmp_path / "file")
    torch.load(tmp_path / "file", weights_only=False)
    assert marker.exists()


def test_pickled_weights_of_a_model_are_not_run(base, marker):
    # kills: torch.load without weights_only
    (base / "model.safetensors").unlink()
    torch.save(Bomb(marker), base / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights|unsupported|pickle"):
        load(base)
    assert not marker.exists()


def test_pickled_weights_of_an_adapter_are_not_run(base, tmp_path, marker):
    # kills: the same on the way through PEFT
    load(base, peft_config=make_lora("llama")).save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(Bomb(marker), tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights|unsupported|pickle"):
        load(tmp_path / "adapter")
    assert not marker.exists()


def test_pickles_beside_a_checkpoint_are_not_run(tmp_path, marker):
    # kills: a pickle picked up in place of a safetensors file
    make(tmp_path / "run", 2).train()
    folder = tmp_path / "run" / "checkpoint-2"
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "pytorch_model.bin",
                 "adapter_model.bin", "value_head.bin", "training_state.bin"):  # fmt: skip
        torch.save(Bomb(marker), folder / name)
    make(tmp_path / "run", 2).train(resume_from_checkpoint=True)
    assert not marker.exists()


def calls(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func)


def test_nothing_in_the_package_can_run_what_it_reads():
    # kills: torch.load, pickle, eval or exec anywhere in the package
    found = {(path.name, call) for path in PACKAGE.rglob("*.py") for call in calls(path)}
    banned = {"torch.load", "pickle.load", "pickle.loads", "eval", "exec", "yaml.load", "np.load", "joblib.load"}
    assert not {(name, call) for name, call in found if call in banned}
    imported = {line for path in PACKAGE.rglob("*.py") for line in path.read_text().splitlines() if "import" in line}
    assert not [line for line in imported if "pickle" in line or "shelve" in line or "marshal" in line]


# Code of a repository

CODE = """
import os
os.mkdir({marker!r})
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def with_code(base, marker):
    (base / "own.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((base / "config.json").read_text())
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (base / "config.json").write_text(json.dumps(config | {"model_type": "own", "auto_map": auto_map}))
    return base


@pytest.fixture(autouse=True)
def nobody_answers(monkeypatch):
    """transformers may ask on the terminal whether to run code, and would take this yes."""
    asked = []
    monkeypatch.setattr(builtins, "input", lambda *args: asked.append(args) or "y")
    yield
    assert not asked


def assert_refused(action, marker):
    with pytest.raises(ValueError, match="trust_remote_code"):
        action()
    assert not marker.exists()


def test_code_of_a_model_is_not_run_unless_asked_for(with_code, marker):
    # kills: trust_remote_code on, or left to a question on the terminal
    assert_refused(lambda: load(with_code), marker)
    assert isinstance(load(with_code, trust_remote_code=True), AutoModelForCausalLMWithValueHead)
    assert marker.exists()


def test_code_of_the_base_of_an_adapter_is_not_run(with_code, tmp_path, marker):
    # kills: an adapter that brings code in by the name of its base
    load(with_code, trust_remote_code=True, peft_config=make_lora("llama")).save_pretrained(tmp_path / "adapter")
    shutil.rmtree(marker)
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]
    assert_refused(lambda: load(tmp_path / "adapter"), marker)


def test_code_of_a_tokenizer_is_not_run(base, tmp_path, marker):
    # kills: the tokenizer's way in
    (base / "own.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nclass OwnTokenizer:\n    pass\n")
    path = base / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}
    config["tokenizer_class"] = "OwnTokenizer"
    path.write_text(json.dumps(config))
    args = PPOConfig(output_dir=str(tmp_path / "run"))
    try:
        PPOTrainer(str(base), None, args, peft_config=make_lora("llama"))
    except ValueError as error:
        assert "tokenizer" in str(error)  # noqa: PT017
    assert not marker.exists()
