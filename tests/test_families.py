"""Any causal LM: tiny models of many architectures train, replay their samples, save, load and merge."""

import pytest
import torch
from conftest import TEXTS
from families import MAIN, MORE, REFUSED
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOTrainer
from rlhf_kit.scoring import checkpointable_layers

ALL = [*MAIN, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def make_family(name):
    """A small random model whose every layer has a say in a distribution far from uniform."""
    sizes = {**MAIN, **MORE, **REFUSED}[name][0]
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, vocab_size=300, **IDS)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in parameter_name:
                parameter.mul_(5)
    return model


def lora():
    return LoraConfig(task_type="CAUSAL_LM", r=4)


def make_trainer(name, args, tokenizer):
    return PPOTrainer(
        make_family(name),
        lambda completions: [float(len(text)) for text in completions],
        args,
        [{"prompt": text[: 4 + 3 * i]} for i, text in enumerate(TEXTS)],
        processing_class=tokenizer,
        peft_config=lora(),
    )


def randomised(name):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_family(name), peft_config=lora())
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.1)
    return model


@pytest.mark.parametrize("name", ALL)
def test_three_iterations(name, tokenizer, config_factory, capsys, one_thread):
    # kills: a family whose base moves, whose adapters do not, whose ratio is not 1 or whose start is not the reference
    trainer = make_trainer(name, config_factory(num_iterations=3, learning_rate=1e-2), tokenizer)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    trainer.train()
    log = trainer.state.log_history
    assert [line["iteration"] for line in log] == [1, 2, 3]
    assert all(torch.isfinite(torch.tensor(list(line.values()))).all() for line in log)
    assert log[0]["initial_ratio_error"] < 1e-5
    assert log[0]["ref_kl"] == 0
    assert log[-1]["ref_kl"] > 0
    for n, p in trainer.model.named_parameters():
        assert torch.equal(p, before[n]) != ("lora_" in n or "v_head" in n), n
    targets = {**MAIN, **MORE}[name][1]
    assert sorted(trainer.model.pretrained_model.peft_config["default"].target_modules) == sorted(targets)
    assert f"LORA r=4 on {', '.join(sorted(targets))} (" in capsys.readouterr().out


@pytest.mark.parametrize("name", ALL)
def test_samples_replay_and_padding_changes_nothing(name, one_thread):
    # kills: a cache, position or mask that makes the sampled distribution another than the scored one
    model = randomised(name)
    ids = torch.randint(1, 300, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with torch.no_grad():
        made = model.causal_lm.generate(
            ids, attention_mask=mask, max_new_tokens=5, min_new_tokens=5, do_sample=True, top_k=0, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        full = torch.cat([mask, torch.ones_like(mask[:, :5])], dim=1)
        scored, _ = model.score(made.sequences, full, completion_length=5)
        alone = model.causal_lm(made.sequences[:1, 3:]).logits[:, 4:-1]
    scored = scored.log_softmax(-1)
    torch.testing.assert_close(scored, torch.stack(made.logits, 1).log_softmax(-1), atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(scored[:1], alone.log_softmax(-1), atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_saved_loaded_and_merged(name, tmp_path, one_thread):
    # kills: an adapter folder or a merged model that is another model, tensors missing or left over
    model = randomised(name)
    ids = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.pretrained_model(ids).logits
        model.save_pretrained(tmp_path / "adapter")
        loaded = PeftModel.from_pretrained(make_family(name), tmp_path / "adapter").eval()
        assert torch.equal(loaded(ids).logits, expected)
        model.merge_and_save(tmp_path / "merged")
        merged, info = AutoModelForCausalLM.from_pretrained(
            tmp_path / "merged", output_loading_info=True, attn_implementation="eager"
        )
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        torch.testing.assert_close(merged.eval()(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(model.pretrained_model(ids).logits, expected)


@pytest.mark.parametrize("name", ALL)
def test_gradient_checkpointing_gives_the_same_gradient(name, one_thread):
    # kills: layers recomputed with other inputs or a cache
    model = randomised(name)
    try:
        checkpointable_layers(model.causal_lm)
    except ValueError as error:
        assert "turn it off" in str(error)  # noqa: PT017
        return
    ids = torch.randint(1, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        logits, _ = model.score(ids, torch.ones_like(ids), completion_length=4, gradient_checkpointing=checkpointing)
        logits.log_softmax(-1).square().mean().backward()
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for n, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][n], gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_before_training(name, tokenizer, config_factory, tmp_path):
    # kills: a model trained on wrong log-probs
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        make_trainer(name, config_factory(), tokenizer)
    assert not (tmp_path / "run").exists()
