"""Model folders and their cards, and the probes that keep a wrong model from being trained or written."""

import json

import pytest
import torch
from conftest import TEXTS, make_lora, make_model, make_tokenizer
from peft import AutoPeftModelForCausalLM, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOTrainer

IDS = torch.arange(1, 13)[None]


@pytest.fixture
def base(tmp_path, tokenizer):
    make_model("llama").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def make_trainer(args, base, **parts):
    return PPOTrainer(
        base,
        lambda completions: [float(len(text)) for text in completions],
        args,
        [{"prompt": text[:9]} for text in TEXTS],
        **{"peft_config": make_lora("llama"), **parts},
    )


def logits(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_folder_of_a_run_is_all_that_peft_needs(base, config_factory, tmp_path):
    # kills: tokenizer or card left out, the base not named, another adapter than the one that was trained
    trainer = make_trainer(config_factory(learning_rate=1e-2), base)
    trainer.train()
    folder = tmp_path / "run"
    assert torch.equal(
        logits(AutoPeftModelForCausalLM.from_pretrained(folder)), logits(trainer.model.pretrained_model)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer(TEXTS[0]).input_ids == trainer.processing_class(TEXTS[0]).input_ids
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == base


def test_a_merged_model_does_not_go_where_its_adapter_is(base, config_factory, tmp_path):
    # kills: transformers applying the adapter once more to the merged weights
    trainer = make_trainer(config_factory(learning_rate=1e-2), base)
    trainer.train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    for merge in (trainer.merge_and_save, trainer.model.merge_and_save):
        with pytest.raises(ValueError, match="holds an adapter already: choose another folder"):
            merge(tmp_path / "run")
        with pytest.raises(ValueError, match="holds a model already: choose another folder"):
            merge(base)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()} == before


def test_a_base_that_was_given_more_tokens(base, config_factory, tmp_path):
    # kills: an adapter that can be saved and not loaded, by us where PEFT can
    model = AutoModelForCausalLM.from_pretrained(base)
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<pad>"})
    model.resize_token_embeddings(len(tokenizer))
    trainer = make_trainer(config_factory(learning_rate=1e-2), model, processing_class=tokenizer)
    trainer.train()
    expected = logits(trainer.model.pretrained_model)
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "run")
    assert again.vocab_size == len(tokenizer) == 301
    assert torch.equal(logits(again.pretrained_model), expected)
    quantised = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "run", load_in_8bit=True)
    quantised.merge_and_save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bits", [8, 4])
def test_merging_onto_a_checkpoint_that_is_quantised_itself(bits, base, tmp_path):
    # kills: a merge into int8 weights, which bitsandbytes cannot save or rounds away
    config = BitsAndBytesConfig(load_in_8bit=True) if bits == 8 else BitsAndBytesConfig(load_in_4bit=True)
    quantised = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
    quantised.save_pretrained(tmp_path / "small")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "small"), peft_config=make_lora("llama"))
    torch.manual_seed(0)
    for name, p in model.trainable_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    model.merge_and_save(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    mine = logits(model.pretrained_model).float()
    difference = (logits(merged).float().log_softmax(-1) - mine.log_softmax(-1)).abs().mean()
    assert difference < 0.1


def test_card_tells_base_settings_and_numbers(base, config_factory, tmp_path):
    # kills: PEFT's placeholders, numbers of another iteration, a path of the machine as the hub's base_model
    trainer = make_trainer(config_factory(learning_rate=1e-2, num_iterations=3), base)
    trainer.train()
    card = (tmp_path / "run" / "README.md").read_text()
    head, body = card.split("---\n")[1:3]
    assert "library_name: peft" in head
    assert "base_model" not in head
    assert "# run\n" in body
    assert f"A LoRA adapter of `{base}`, trained by PPO with rlhf_kit in 3 iterations on 24 completions." in body
    log = trainer.state.log_history
    assert f"| Score | {log[0]['score']:.4g} | {log[-1]['score']:.4g} |" in body
    settings = json.loads(card.split("```json\n")[1].split("```")[0])
    assert settings["learning_rate"] == 1e-2
    assert "output_dir" not in settings
    assert "[More Information Needed]" not in card
    code = card.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")


def test_card_of_an_adapter_whose_base_has_no_name(tokenizer, config_factory, tmp_path):
    # kills: a command that cannot find the base
    make_trainer(config_factory(num_iterations=1), make_model("llama"), processing_class=tokenizer).train()
    card = (tmp_path / "run" / "README.md").read_text()
    assert 'PeftModel.from_pretrained(base, "run")' in card
    assert "AutoPeftModel" not in card


def test_an_adapter_folder_without_a_tokenizer_uses_that_of_its_base(base, config_factory, tmp_path):
    # kills: adapters as PEFT itself saves them refused
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), make_lora("llama")).save_pretrained(tmp_path / "sft")
    trainer = make_trainer(config_factory(num_iterations=1), str(tmp_path / "sft"), peft_config=None)
    assert trainer.processing_class.name_or_path == base
    (tmp_path / "base" / "tokenizer.json").unlink()
    (tmp_path / "base" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer was found at '.*sft' or '.*base'"):
        make_trainer(config_factory(num_iterations=1), str(tmp_path / "sft"), peft_config=None)


def test_merged_folder_is_an_ordinary_model(base, config_factory, tmp_path):
    # kills: adapters left out or left in, the live model changed, no tokenizer beside it
    trainer = make_trainer(config_factory(learning_rate=1e-2), base)
    trainer.train()
    before = logits(trainer.model.pretrained_model)
    trainer.merge_and_save(tmp_path / "merged")
    assert torch.equal(logits(trainer.model.pretrained_model), before)
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    torch.testing.assert_close(logits(merged), before, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), before, atol=1e-3)
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").eos_token_id == 0
    card = (tmp_path / "merged" / "README.md").read_text()
    assert "library_name: transformers" in card
    assert "AutoPeftModel" not in card


def test_whole_models_are_written_as_they_are(base, config_factory, tmp_path):
    # kills: merging that needs adapters
    trainer = make_trainer(config_factory(learning_rate=1e-3), base, peft_config=None)
    trainer.train()
    trainer.merge_and_save(tmp_path / "merged")
    for folder in ("run", "merged"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(logits(loaded), logits(trainer.model.pretrained_model))


def test_merging_into_shared_weights_is_refused(tmp_path):
    # kills: an adapter of the LM head merged into the embedding too, written as if it were the policy
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model("llama", tie_word_embeddings=True),
        peft_config=make_lora("llama", target_modules=["lm_head"]),
    )
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    with pytest.raises(ValueError, match=r"merging changes the policy's log-probs by .*tie_word_embeddings=False"):
        model.merge_and_save(tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_reloaded_adapter_learns_and_its_reference_stays(base, config_factory, tmp_path):
    # kills: an adapter that comes back frozen, so that training it changes nothing; a reference that moves along
    make_trainer(config_factory(learning_rate=1e-2), base).train()
    start = logits(AutoPeftModelForCausalLM.from_pretrained(tmp_path / "run"))
    args = config_factory(output_dir=str(tmp_path / "second"), learning_rate=1e-2)
    trainer = make_trainer(args, str(tmp_path / "run"), peft_config=None)
    trainer.train()
    assert trainer.state.log_history[0]["ref_kl"] == 0
    assert trainer.state.log_history[-1]["ref_kl"] > 0
    assert not torch.allclose(logits(trainer.model.pretrained_model), start, atol=1e-4)
    with trainer.model.reference() as reference:
        assert torch.equal(logits(reference), start)
    saved = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "second")
    assert torch.equal(logits(saved), logits(trainer.model.pretrained_model))


# Probes


def test_a_reference_that_is_not_the_start_is_said_with_its_distance():
    # kills: a KL penalty that pulls from the first step without a word
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
    with pytest.warns(UserWarning, match=r"the policy starts \d.* nats per token away from its reference"):
        model.create_reference(make_model("llama", seed=1))


def test_a_model_whose_cache_is_wrong_is_refused(monkeypatch):
    # kills: training on probabilities that the samples did not come from
    base = make_model("llama")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora("llama"))
    forward = base.forward

    def forgetful(*args, **kwargs):
        """Every step with a cache forgets where it is."""
        if kwargs["input_ids"].shape[1] == 1:
            kwargs["position_ids"] = torch.zeros_like(kwargs["input_ids"])
        return forward(*args, **kwargs)

    monkeypatch.setattr(base, "forward", forgetful)
    with pytest.raises(ValueError, match="samples from other probabilities than a plain forward pass"):
        model.create_reference()
