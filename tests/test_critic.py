"""A critic of its own: another adapter on the same base."""

import copy

import pytest
import torch
from conftest import FAMILIES, TEXTS, make_lora, make_model, make_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from torch.testing import assert_close

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, estimate_memory
from rlhf_kit.roles import CRITIC, adapter_parameters
from rlhf_kit.scoring import completion_outputs

IDS = torch.tensor([[9, 8, 7, 6, 5, 4, 3], [0, 0, 3, 4, 5, 6, 7]])
MASK = torch.tensor([[1] * 7, [0, 0, 1, 1, 1, 1, 1]])
DATA = [{"prompt": text[:10]} for text in TEXTS]


def make_pair(family="llama", **lora):
    """A model with a critic of its own, all of its adapters and its head away from zero."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model(family), peft_config=make_lora(family, **lora), critic="adapter"
    )
    torch.manual_seed(1)
    for name, p in model.trainable_parameters():
        if "lora_B" in name or "v_head" in name:
            torch.nn.init.normal_(p, std=0.3)
    return model


def gradients(model):
    return {name: p.grad.clone() for name, p in model.trainable_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_values_are_those_of_the_critics_adapter_alone(family):
    # kills: the policy's adapter added to the critic's, a shift by one, hidden states of the wrong columns
    model = make_pair(family)
    logits, values = model.score(IDS, MASK, completion_length=3)
    alone = copy.deepcopy(model.pretrained_model)
    alone.delete_adapter("default")
    alone.set_adapter(CRITIC)
    with torch.no_grad():
        _, hidden = completion_outputs(alone, alone.get_base_model(), IDS, MASK, 3)
        assert_close(values, model.v_head(hidden), atol=1e-5, rtol=1e-5)
        alone = copy.deepcopy(model.pretrained_model)
        alone.delete_adapter(CRITIC)
        expected, _ = completion_outputs(alone, alone.get_base_model(), IDS, MASK, 3)
    assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_modules_that_the_policy_trains_whole_are_not_copied_for_the_critic():
    # kills: a second LM head, which the critic never reads
    model = make_pair(modules_to_save=["lm_head"])
    names = [name for name, _ in model.named_parameters() if f".{CRITIC}" in name]
    assert names
    assert not any("lm_head" in name for name in names)


def test_each_loss_reaches_its_own_adapter_only():
    # kills: a shared trunk, flags of requires_grad left as the last pass set them
    model = make_pair()
    for which, mine, other in ((0, ".default.", ".critic."), (1, ".critic.", ".default.")):
        model.zero_grad(set_to_none=True)
        model.score(IDS, MASK, completion_length=3)[which].square().sum().backward()
        names = [name for name, grad in gradients(model).items() if "lora" in name and grad.any()]
        assert names
        assert all(mine in name and other not in name for name in names)
    assert {name.split(".")[-2] for name, _ in model.trainable_parameters() if "lora" in name} == {"default", "critic"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_no_gradient(family):
    # kills: layers of the critic recomputed with the policy's adapter
    model = make_pair(family)
    found = []
    for checkpointing in (False, True):
        model.zero_grad(set_to_none=True)
        logits, values = model.score(IDS, MASK, completion_length=3, gradient_checkpointing=checkpointing)
        (logits.square().mean() + values.square().sum()).backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        assert_close(found[1][name], grad, atol=1e-6, rtol=1e-5)


def test_an_adapter_is_all_that_it_costs():
    # kills: a copy of the base
    shared = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
    own = make_pair()
    count = [sum(p.numel() for p in model.parameters()) for model in (shared, own)]
    adapter = sum(p.numel() for p in adapter_parameters(own.pretrained_model, CRITIC))
    assert count[1] - count[0] == adapter == sum(p.numel() for n, p in shared.trainable_parameters() if "lora" in n)


def test_trl_style_forward_gives_the_same_values():
    # kills: forward left with the shared critic
    model = make_pair()
    _, _, values = model(IDS, attention_mask=MASK)
    assert_close(values[:, 3:6], model.score(IDS, MASK, completion_length=3)[1], atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="the cache belongs to the policy"):
        model(IDS[:, :1], cache=object())


def test_saved_and_loaded(tmp_path):
    # kills: the critic's adapter not saved, not loaded, or saved in the policy's place
    base = tmp_path / "base"
    make_model("llama").save_pretrained(base)
    torch.manual_seed(5)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(base), peft_config=make_lora("llama"), critic="adapter", value_head="mlp"
    )
    for _, p in model.trainable_parameters():
        torch.nn.init.normal_(p, std=0.2)
    model.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "saved")
    assert (again.critic, again.v_head.kind) == ("adapter", "mlp")
    for mine, theirs in zip(model.score(IDS, MASK, completion_length=3), again.score(IDS, MASK, completion_length=3),
                            strict=True):  # fmt: skip
        assert torch.equal(mine, theirs)
    assert [n for n, _ in again.trainable_parameters()] == [n for n, _ in model.trainable_parameters()]
    plain = PeftModel.from_pretrained(make_model("llama"), tmp_path / "saved")
    assert list(plain.peft_config) == ["default"]


def test_a_saved_critic_of_another_kind_is_refused(tmp_path):
    # kills: a critic that starts afresh, or loses its adapter, without a word
    base = tmp_path / "base"
    make_model("llama").save_pretrained(base)
    for kind, other in (("adapter", "shared"), ("shared", "adapter")):
        AutoModelForCausalLMWithValueHead.from_pretrained(
            str(base), peft_config=make_lora("llama"), critic=kind
        ).save_pretrained(tmp_path / kind)
        with pytest.raises(ValueError, match=f"a critic of kind '{kind}', but critic='{other}' was asked for"):
            AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / kind, critic=other)


def test_what_cannot_have_a_critic_of_its_own():
    # kills: a setting ignored, a policy that is its own critic
    with pytest.raises(ValueError, match="critic='adapter' needs a policy with adapters"):
        AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), critic="adapter")
    with pytest.raises(ValueError, match="critic must be 'shared' or 'adapter', got 'own'"):
        AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), critic="own")
    for name in ("critic", "reference"):
        named = get_peft_model(make_model("llama"), make_lora("llama"), adapter_name=name)
        with pytest.raises(ValueError, match=f"the active adapter is called '{name}'"):
            AutoModelForCausalLMWithValueHead(named)


def test_trained_by_the_trainer_with_its_own_rate(config_factory):
    # kills: the critic's adapter in the policy's group, or in none
    def moved(**rates):
        torch.manual_seed(0)
        folder = config_factory().output_dir + "-".join(map(str, rates.values()))
        args = config_factory(critic="adapter", num_iterations=2, value_clip_range=None, output_dir=folder, **rates)
        trainer = PPOTrainer(
            make_model("llama"), lambda completions: [float(len(c)) for c in completions], args, DATA,
            processing_class=make_tokenizer(), peft_config=make_lora("llama"),
        )  # fmt: skip
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        now = dict(trainer.model.named_parameters())
        names = [name for name, p in before.items() if not torch.equal(p, now[name])]
        return {
            kind: any(kind in name for name in names) for kind in (".default.", ".critic.", "v_head", "base_layer")
        }

    both = {".default.": True, ".critic.": True, "v_head": True, "base_layer": False}
    assert moved(learning_rate=1e-2) == both
    assert moved(learning_rate=1e-2, value_learning_rate=0.0) == {**both, ".critic.": False, "v_head": False}
    assert moved(learning_rate=0.0, value_learning_rate=1e-2) == {**both, ".default.": False}


def test_the_model_must_be_what_the_config_says(config_factory):
    # kills: args.critic ignored for a model that is loaded
    with pytest.raises(ValueError, match=r"the model has a 'adapter' critic.*PPOConfig\(critic='adapter'\)"):
        PPOTrainer(make_pair(), None, config_factory(), processing_class=make_tokenizer())


def test_resumed_exactly(config_factory, one_thread):
    # kills: weights or moments of the critic's adapter left out of a checkpoint
    def trainer(iterations, folder):
        args = config_factory(critic="adapter", num_iterations=iterations, save_every=1, output_dir=folder,
                              learning_rate=1e-2)  # fmt: skip
        return PPOTrainer(
            make_model("llama"), lambda completions: [float(len(c)) for c in completions], args, DATA,
            processing_class=make_tokenizer(), peft_config=make_lora("llama"),
        )  # fmt: skip

    folder = config_factory().output_dir
    whole = trainer(2, folder + "-whole")
    whole.train()
    trainer(1, folder).train()
    parts = trainer(2, folder)
    parts.train(resume_from_checkpoint=True)
    for (name, p), (_, q) in zip(whole.model.named_parameters(), parts.model.named_parameters(), strict=True):
        assert torch.equal(p, q), name


def test_critic_of_its_own_with_an_sft_adapter(config_factory):
    # kills: reference, critic and policy confused where there are three adapters
    torch.manual_seed(2)
    sft = get_peft_model(make_model("llama"), make_lora("llama"))
    for name, p in sft.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.2)
    trainer = PPOTrainer(
        sft, lambda completions: [float(len(c)) for c in completions],
        config_factory(critic="adapter", learning_rate=1e-2), DATA, processing_class=make_tokenizer(),
    )  # fmt: skip
    first = []
    trainer._journal.iteration = lambda rollout, metrics, last: first.append(metrics)
    trainer.train()
    assert first[0]["ref_kl"] == pytest.approx(0.0, abs=1e-7)
    assert first[-1]["ref_kl"] > 1e-6
    assert set(trainer.model.pretrained_model.peft_config) == {"default", "reference", "critic"}


def test_memory_estimate_counts_it(tmp_path):
    # kills: critic left out of the estimate
    make_model("llama").save_pretrained(tmp_path)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    small = {"rollout_batch_size": 4, "mini_batch_size": 2, "micro_batch_size": 2, "max_completion_length": 4}
    estimates = {
        critic: estimate_memory(str(tmp_path), PPOConfig(critic=critic, **small), lora, prompt_length=4)
        for critic in ("shared", "adapter")
    }
    adapter = sum(p.numel() * 4 for p in adapter_parameters(make_pair().pretrained_model, CRITIC))
    assert estimates["adapter"].trained - estimates["shared"].trained == adapter
    assert estimates["adapter"].optimizer - estimates["shared"].optimizer == 3 * adapter
    assert estimates["adapter"].update > estimates["shared"].update
