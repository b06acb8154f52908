"""The KL dial: a line of models from the reference to the policy."""

import json
import statistics
from pathlib import Path

import pytest
import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from peft import get_peft_model
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from rlhf_kit import (
    AutoModelForCausalLMWithValueHead,
    PPOTrainer,
    dial_table,
    dialed,
    plot_dial,
    sweep_dial,
    with_reference,
)

IDS = torch.tensor([[9, 8, 7, 6, 5, 4, 3]])
MASK = torch.ones_like(IDS)


def randomise(model, std=0.2, seed=0):
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        if "lora_B" in name and p.requires_grad:
            torch.nn.init.normal_(p, std=std)
    return model


def from_base(family="llama", **lora):
    """Trained from fresh adapters: the reference is the base."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model(family), peft_config=make_lora(family, **lora)
    )
    model.create_reference()
    return randomise(model)


def from_sft():
    """Trained from an adapter: the reference is that adapter, frozen."""
    sft = randomise(get_peft_model(make_model("llama"), make_lora("llama", r=3)), seed=5)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(sft)
    model.create_reference()
    return randomise(model, seed=6)


def logits(model):
    with torch.no_grad():
        return model.score(IDS, MASK, completion_length=4)[0]


def reference_logits(model):
    return model.score_reference(IDS, MASK, completion_length=4)


def deltas(model, adapter):
    return {
        name: layer.get_delta_weight(adapter).detach()
        for name, layer in model.pretrained_model.named_modules()
        if hasattr(layer, "get_delta_weight")
    }


@pytest.mark.parametrize(
    "make",
    [from_base, from_sft, lambda: from_base("gpt2"), lambda: from_base(use_rslora=True),
     lambda: from_base(init_lora_weights="pissa")],
)  # fmt: skip
def test_the_ends_are_reference_and_policy(make):
    # kills: scale and 1 - scale mixed up, the reference's own adapter forgotten, LoRA's scaling left out or doubled, a
    # base that is changed because the adapter in between starts as PiSSA does
    model = make()
    policy, reference = logits(model), reference_logits(model)
    assert (policy - reference).abs().max() > 0.1
    with dialed(model, 0.0):
        assert_close(logits(model), reference, atol=1e-5, rtol=1e-5)
        assert_close(reference_logits(model), reference, atol=0, rtol=0)
    with dialed(model, 1.0):
        assert_close(logits(model), policy, atol=1e-4, rtol=1e-4)
        assert_close(reference_logits(model), reference, atol=0, rtol=0)
    assert torch.equal(logits(model), policy)


@pytest.mark.parametrize("make", [from_base, from_sft])
def test_in_between_the_weights_are_on_the_line(make):
    # kills: sqrt or square of the scale
    model = make()
    policy = deltas(model, "default")
    reference = deltas(model, "reference") if make is from_sft else {name: 0 * d for name, d in policy.items()}
    with dialed(model, 0.3):
        for name, delta in deltas(model, "dial").items():
            assert_close(delta, 0.3 * policy[name] + 0.7 * reference[name], atol=1e-6, rtol=1e-5)


def test_nothing_is_left_behind():
    # kills: the dial's adapter kept, the policy frozen, another adapter active, also after an error
    model = from_sft()
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    with pytest.raises(KeyError), dialed(model, 0.5):
        raise KeyError
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    assert model.pretrained_model.active_adapter == "default"
    assert set(model.pretrained_model.peft_config) == {"default", "reference"}


def test_the_policy_is_active_again_beside_other_adapters():
    # kills: the first adapter that the model happens to hold left active in the policy's place
    network = get_peft_model(make_model("llama"), make_lora("llama"), adapter_name="another")
    network.add_adapter("mine", make_lora("llama"))
    network.set_adapter("mine")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(network)
    model.create_reference()
    with dialed(model, 0.5):
        pass
    assert network.active_adapter == "mine"
    assert {name.split(".")[-2] for name, p in network.named_parameters() if p.requires_grad} == {"mine"}


@pytest.mark.parametrize("scale", [-0.1, 1.1, float("nan")])
def test_beyond_the_ends(scale):
    # kills: extrapolation taken for interpolation
    with pytest.raises(ValueError, match=r"scale must be between 0 .* and 1"), dialed(from_base(), scale):
        pass


@pytest.mark.parametrize(("scales", "message"), [([], "scales is empty"), ([0.5, 2], "got 2"), ([0.5, -1], "got -1")])
def test_a_sweep_that_would_fail_does_not_begin(scales, message, config_factory):
    # kills: minutes of sampling before the error
    def never(completions):
        pytest.fail("the sweep began")

    prompts = [{"prompt": TEXTS[0]}]
    trainer = PPOTrainer(from_base(), never, config_factory(), None, prompts, processing_class=make_tokenizer())
    with pytest.raises(ValueError, match=message):
        sweep_dial(trainer, scales)


def test_adapters_that_are_no_sum():
    # kills: a dial that silently leaves out a part of what was trained
    whole = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"))
    with pytest.raises(ValueError, match="the dial needs adapters"), dialed(whole, 0.5):
        pass
    for setting in ({"use_dora": True}, {"modules_to_save": ["lm_head"]}):
        model, named = from_base(**setting), next(iter(setting))
        with pytest.raises(ValueError, match=f"plain LoRA, but adapter 'default' has {named}"), dialed(model, 0.5):
            pass


def reward(completions):
    return [float(text.count("a")) + 0.01 * len(text.encode()) for text in completions]


def make_trainer(tmp_path, config_factory, model=None, **settings):
    base = tmp_path / "base"
    if not base.exists():
        make_model("llama").save_pretrained(base)
        make_tokenizer().save_pretrained(base)
    data = [{"prompt": text[:10]} for text in TEXTS]
    args = config_factory(num_iterations=2, learning_rate=5e-2, kl_coef=0.0, **settings)
    lora = make_lora("llama") if model is None else None
    return PPOTrainer(model or str(base), reward, args, data,
                      data, peft_config=lora)  # fmt: skip


def test_sweep_and_export(tmp_path, config_factory):
    # kills: another scale exported than was swept, the sweep written to the run's log, samples that differ at the ends
    trainer = make_trainer(tmp_path, config_factory)
    trainer.train()
    log = Path(trainer.args.output_dir, "log.jsonl").read_text()
    points = sweep_dial(trainer, [0.0, 0.5, 1.0])
    assert Path(trainer.args.output_dir, "log.jsonl").read_text() == log
    assert points[0].ref_kl == pytest.approx(0.0, abs=1e-6)
    assert 0 < points[1].ref_kl < points[2].ref_kl
    last = json.loads(log.splitlines()[-1])
    assert points[2].score == pytest.approx(last["eval_score"])
    assert points[2].ref_kl == pytest.approx(last["eval_ref_kl"], rel=1e-3)
    lines = dial_table(points).splitlines()
    assert len(lines) == 5
    assert lines[-1].startswith(f"| 1.00 | {points[2].score:.3f} +- ")
    scores = reward(points[2].completions)
    assert statistics.stdev(scores) > 0
    assert points[2].score_error == pytest.approx(statistics.stdev(scores) / len(scores) ** 0.5)
    plot_dial(points, tmp_path / "dial.png")
    assert (tmp_path / "dial.png").read_bytes().startswith(b"\x89PNG")
    with dialed(trainer.model, 0.5):
        expected = logits(trainer.model)
        trainer.merge_and_save(tmp_path / "half")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    with torch.no_grad():
        assert_close(merged(IDS).logits[:, -5:-1], expected, atol=1e-5, rtol=1e-5)


def test_a_saved_run_gets_its_reference_back(tmp_path, config_factory):
    # kills: the trained adapter taken for its own reference, so that every scale gives the policy
    trainer = make_trainer(tmp_path, config_factory)
    trainer.train()
    folder = trainer.args.output_dir
    policy, reference = logits(trainer.model), reference_logits(trainer.model)
    again = with_reference(folder)
    assert_close(logits(again), policy, atol=1e-6, rtol=1e-6)
    assert torch.equal(reference_logits(again), reference)
    assert [n for n, p in again.named_parameters() if p.requires_grad] == [
        n for n, p in trainer.model.named_parameters() if p.requires_grad
    ]
    with dialed(again, 0.0):
        assert_close(logits(again), reference, atol=1e-5, rtol=1e-5)
    other = make_trainer(tmp_path, config_factory, again, output_dir=str(tmp_path / "other"))
    assert sweep_dial(other, [0.0])[0].ref_kl == pytest.approx(0.0, abs=1e-6)
    from_other = with_reference(folder, folder)
    assert_close(reference_logits(from_other), policy, atol=1e-6, rtol=1e-6)
