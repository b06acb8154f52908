"""Bases in bfloat16, int8 and 4 bits: what is trained is float32, what is frozen keeps its bytes, ratios are 1."""

import builtins

import pytest
import torch
from conftest import TEXTS, make_lora, make_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOTrainer

BASES = {"bfloat16": {"dtype": "bfloat16"}, "int8": {"load_in_8bit": True}, "4bit": {"load_in_4bit": True}}
# Largest |ratio - 1| before anything has moved. Scoring and updating see rows in other micro-batches.
RATIO_ERROR = {"bfloat16": 0.2, "int8": 1e-4, "4bit": 1e-4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama wide enough for 4-bit blocks, with activations as large as those of real models."""
    path = tmp_path_factory.mktemp("base")
    model = make_model("llama", hidden_size=64, intermediate_size=128)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.input_layernorm.weight[::9] = 4.0
            layer.post_attention_layernorm.weight[::7] = 4.0
    model.save_pretrained(path)
    return str(path)


def make_trainer(folder, args, tokenizer, **changes):
    parts = {"model": folder, "peft_config": make_lora("llama"), **changes}
    return PPOTrainer(
        reward_funcs=lambda completions: [float(len(text)) for text in completions],
        args=args,
        train_dataset=[{"prompt": text[: 4 + 3 * i]} for i, text in enumerate(TEXTS)],
        processing_class=tokenizer,
        **parts,
    )


def frozen_bytes(model):
    """Every parameter and buffer of the base, and what bitsandbytes keeps beside them."""
    tensors = {n: t for n, t in [*model.named_parameters(), *model.named_buffers()] if not t.requires_grad}
    for name, module in model.named_modules():
        state = getattr(module, "state", None)
        for key in ("CB", "SCB"):
            if isinstance(getattr(state, key, None), torch.Tensor):
                tensors[f"{name}.state.{key}"] = getattr(state, key)
        quant_state = getattr(getattr(module, "weight", None), "quant_state", None)
        if quant_state is not None:
            tensors[f"{name}.absmax"] = quant_state.absmax
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("base", BASES)
def test_adapters_and_head_learn_in_float32_and_the_base_keeps_its_bytes(base, folder, tokenizer, config_factory):
    # kills: adapters or head in the precision of the base, a base that is written to, ratios that are not 1
    trainer = make_trainer(folder, config_factory(num_iterations=3, learning_rate=1e-2, **BASES[base]), tokenizer)
    with torch.no_grad():
        trainer.model.score(torch.arange(8)[None], torch.ones(1, 8).long(), completion_length=4)  # states are set up
    before = frozen_bytes(trainer.model)
    trained = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    trainer.train()
    after = frozen_bytes(trainer.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(not torch.equal(p, trained[name]) for name, p in trainer.model.trainable_parameters())
    log = trainer.state.log_history
    assert all(torch.isfinite(torch.tensor(list(line.values()))).all() for line in log)
    assert log[0]["ref_kl"] == 0
    assert max(line["initial_ratio_error"] for line in log) < RATIO_ERROR[base]


def test_base_is_loaded_in_the_precision_asked_for(folder, tokenizer, config_factory):
    # kills: dtype or load_in_* ignored
    dtypes = {}
    for base, settings in BASES.items():
        trainer = make_trainer(folder, config_factory(**settings), tokenizer)
        dtypes[base] = trainer.model.causal_lm.model.layers[0].mlp.up_proj.weight.dtype
    assert dtypes == {"bfloat16": torch.bfloat16, "int8": torch.int8, "4bit": torch.uint8}


@pytest.mark.parametrize("base", ["int8", "4bit"])
def test_a_small_change_of_a_weight_is_a_small_change_of_log_probs(base, folder):
    # kills: activations rounded to int8, as bitsandbytes does by itself: a change of 1e-6 then moves log-probs by 1e-1
    lora = make_lora("llama")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=lora, **BASES[base])
    ids = torch.randint(1, 300, (4, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, _ = model.score(ids, torch.ones_like(ids), completion_length=10)
        for name, p in model.trainable_parameters():
            if "lora_B" in name:
                p.add_(1e-6 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        after, _ = model.score(ids, torch.ones_like(ids), completion_length=10)
    change = (before.log_softmax(-1) - after.log_softmax(-1)).abs().max()
    assert 0 < change < 1e-3


def test_int8_products_equal_those_of_the_weights_scaled_back(folder):
    # kills: wrong scale, bias left out, a gradient through other weights, the weight changed
    bnb = pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, load_in_8bit=True)
    layer = model.causal_lm.model.layers[0].mlp.up_proj
    assert isinstance(layer, bnb.nn.Linear8bitLt)
    layer.bias = torch.nn.Parameter(torch.randn(layer.out_features), requires_grad=False)
    x = torch.randn(2, 3, 64, requires_grad=True)
    out = layer(x)
    weight = layer.weight.data.float() * layer.state.SCB[:, None] / 127
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight, layer.bias))
    gradient = torch.randn_like(out)
    (dx,) = torch.autograd.grad(out, x, gradient)
    torch.testing.assert_close(dx, gradient @ weight)
    assert layer(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("loaded_by", ["us", "the user"])
def test_int8_scores_do_not_depend_on_neighbours(loaded_by, folder):
    # kills: outlier columns picked over the whole batch; a model the user has loaded left as it is
    if loaded_by == "us":
        model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, load_in_8bit=True)
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
        loaded = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
        model = AutoModelForCausalLMWithValueHead.from_pretrained(loaded)
    ids = torch.randint(1, 300, (4, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        together, _ = model.score(ids, torch.ones_like(ids), completion_length=6)
        alone = torch.cat([model.score(row[None], torch.ones_like(row[None]), completion_length=6)[0] for row in ids])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_adapter_of_an_int8_run_loads_on_any_base(folder, tokenizer, config_factory, tmp_path):
    # kills: an adapter that is bound to the precision it was trained with
    trainer = make_trainer(folder, config_factory(learning_rate=1e-2, load_in_8bit=True), tokenizer)
    trainer.train()
    ids = torch.arange(1, 13)[None]
    mask = torch.ones_like(ids)
    with torch.no_grad():
        expected, values = trainer.model.score(ids, mask, completion_length=6)
        for settings, tolerance in (({"load_in_8bit": True}, 1e-5), ({}, 0.5)):
            loaded = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "run"), **settings)
            logits, loaded_values = loaded.score(ids, mask, completion_length=6)
            torch.testing.assert_close(logits, expected, atol=tolerance, rtol=0.05)
            torch.testing.assert_close(loaded_values, values, atol=tolerance, rtol=0.05)


def test_merging_an_int8_run_goes_into_the_full_precision_base(folder, tokenizer, config_factory, tmp_path):
    # kills: an adapter rounded away by int8 weights; quantised weights written as a model
    trainer = make_trainer(folder, config_factory(learning_rate=1e-2, load_in_8bit=True), tokenizer)
    trainer.train()
    trainer.merge_and_save(tmp_path / "merged")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert merged.dtype == torch.float32
    assert not getattr(merged, "is_quantized", False)
    plain = AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "run"))
    ids = torch.arange(1, 13)[None]
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, plain.pretrained_model(ids).logits, atol=1e-5, rtol=1e-5)


# Gradient checkpointing


@pytest.mark.parametrize("base", ["float32", *BASES])
def test_layers_are_recomputed_in_the_loss_pass_only(base, folder, tokenizer, config_factory, monkeypatch):
    # kills: checkpointing while generating (which turns the cache off) or scoring; not on in the loss pass
    args = config_factory(num_iterations=1, gradient_checkpointing=True, **BASES.get(base, {}))
    trainer = make_trainer(folder, args, tokenizer)
    layer = next(m for m in trainer.model.modules() if isinstance(m, GradientCheckpointingLayer))
    calls = {}
    phase = ["start"]
    original = type(layer).forward

    def counting(self, *args, **kwargs):
        if self is layer:
            calls[phase[0]] = calls.get(phase[0], 0) + 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(layer), "forward", counting)
    real_phase = trainer._journal.phase
    monkeypatch.setattr(trainer._journal, "phase", lambda name: (phase.__setitem__(0, name), real_phase(name))[1])
    trainer.train()
    steps = args.ppo_epochs * 2 * 2  # mini-batches of two micro-batches
    assert calls["update"] == 2 * steps
    assert calls["score"] == 2 * 4  # four micro-batches, policy and reference
    assert calls["generate"] <= args.max_completion_length


@pytest.mark.parametrize("base", BASES)
def test_recomputing_changes_no_gradient(base, folder):
    # kills: gradients that do not pass through recomputed quantised layers
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder, peft_config=make_lora("llama"), **BASES[base])
    torch.manual_seed(0)
    with torch.no_grad():
        for name, p in model.trainable_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    ids = torch.randint(1, 300, (2, 12), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        model.zero_grad()
        logits, _ = model.score(ids, torch.ones_like(ids), completion_length=6, gradient_checkpointing=checkpointing)
        logits.float().log_softmax(-1)[..., 0].sum().backward()
        gradients.append({n: p.grad.clone() for n, p in model.trainable_parameters() if "lora" in n})
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradients[1][name], gradient)


# fp16


def test_frozen_float16_base_with_float32_adapters(folder, tokenizer, config_factory):
    # kills: a refusal of what works: only what is trained needs the resolution of float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    trainer = make_trainer(folder, config_factory(), tokenizer, model=model)
    trainer.train()
    assert {p.dtype for _, p in trainer.model.trainable_parameters()} == {torch.float32}
    assert all(torch.isfinite(torch.tensor(list(line.values()))).all() for line in trainer.state.log_history)


def test_float16_weights_are_not_trained(folder, tokenizer, config_factory):
    # kills: updates smaller than the resolution lost in silence
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"float16.*Load with dtype='float32'.*LoRA"):
        make_trainer(folder, config_factory(), tokenizer, model=model, peft_config=None)


@pytest.mark.parametrize("flag", ["load_in_8bit", "load_in_4bit"])
def test_missing_bitsandbytes_is_said(flag, folder, tokenizer, config_factory, monkeypatch):
    # kills: a traceback from inside transformers
    real = builtins.__import__

    def blocked(name, *args, **kwargs):
        if name.split(".")[0] == "bitsandbytes":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None if name == "bitsandbytes" else object())
    monkeypatch.setattr(builtins, "__import__", blocked)
    with pytest.raises(ImportError, match=rf"{flag} needs bitsandbytes: pip install"):
        make_trainer(folder, config_factory(**{flag: True}), tokenizer)
