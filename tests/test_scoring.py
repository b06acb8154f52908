"""Scoring passes against a plain slow reference: one unpadded row at a time, all positions, the whole vocabulary."""

import contextlib
import copy
import dataclasses

import pytest
import torch
from conftest import FAMILIES, make_lora, make_model
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    GPTNeoConfig,
    OpenAIGPTConfig,
    RwkvConfig,
)

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_kit.data import pad_left, pad_right
from rlhf_kit.rollout import Rollout, concat_rollouts, record_policies, trimmed_inputs
from rlhf_kit.scoring import lm_head_input, position_ids, without_dropout

PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20], [30, 0, 32, 33]]  # ragged, one of a single token, one with EOS
COMPLETIONS = [[40, 41, 0], [50, 51, 52, 53, 54], [60]]
DROPOUT = {
    "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "opt": {"dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.1},
    "gpt_neox": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "llama": {"attention_dropout": 0.1},
    "qwen3": {"attention_dropout": 0.1},
    "gemma3": {"attention_dropout": 0.1},
}
all_families = pytest.mark.parametrize("family", list(FAMILIES))


def randomise(model, seed=1):
    """Adapters and value head that do something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "v_head" in name:
                parameter.normal_(std=0.3)
    return model


def make_policy(family="gpt2", *, value_head="linear", lora=None, **overrides):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model(family, **overrides), peft_config=make_lora(family, **(lora or {})), value_head=value_head
    )
    return randomise(model)


def left_padded(pad_id=7):
    """(input_ids (B, P + T), attention_mask (B, P + T), T) with a pad id that is no EOS and does occur in prompts."""
    prompts, prompt_mask = pad_left(PROMPTS, pad_id)
    completions, completion_mask = pad_right(COMPLETIONS, pad_id)
    return torch.cat([prompts, completions], 1), torch.cat([prompt_mask, completion_mask], 1).long(), 5


def log_softmax_of(logits, ids, temperature=1.0):
    return torch.log_softmax(logits.double() / temperature, -1).gather(-1, ids[..., None])[..., 0].float()


@torch.no_grad()
def slow_row(causal_lm, v_head, prompt, completion, temperature=1.0):
    """Log-probs, values and log-distributions of one completion: no padding, no positions, no hooks."""
    ids = torch.tensor([prompt + completion])
    output = causal_lm(input_ids=ids, output_hidden_states=True)
    before = slice(len(prompt) - 1, ids.shape[1] - 1)
    logits, hidden = output.logits[0, before], output.hidden_states[-1][0, before]
    # hidden_states[-1] is after the final norm in the six families, or this would not be the logits
    assert_close(causal_lm.get_output_embeddings()(hidden), logits, rtol=1e-4, atol=1e-4)
    x = hidden
    for layer in v_head.layers:
        x = layer(x) if not isinstance(layer, torch.nn.ReLU) else x.clamp(min=0)
    distributions = torch.log_softmax(logits.double() / temperature, -1).float()
    return log_softmax_of(logits, torch.tensor(completion), temperature), x[:, 0], distributions


def slow_policy(model, i, temperature=1.0):
    return slow_row(model.causal_lm, model.v_head, PROMPTS[i], COMPLETIONS[i], temperature)


def rows_of(layout):
    """Where the completion of each row stands: (input_ids, attention_mask, completion_length, first entry by row)."""
    if layout == "left":
        ids, mask, length = left_padded()
        return [(ids, mask, length, [0, 0, 0])]
    if layout == "right":
        ids, mask = pad_right([p + c for p, c in zip(PROMPTS, COMPLETIONS, strict=True)], 7)
        return [(ids, mask.long(), ids.shape[1] - 1, [len(p) - 1 for p in PROMPTS])]
    if layout == "hole":  # prompts right-padded on their own: padding stands between prompt and completion
        prompts, prompt_mask = pad_right(PROMPTS, 7)
        completions, completion_mask = pad_right(COMPLETIONS, 7)
        ids = torch.cat([prompts, completions], 1)
        mask = torch.cat([prompt_mask, completion_mask], 1).long()
        return [(ids, mask, ids.shape[1] - 1, [prompts.shape[1] - 1] * 3)]
    return [
        (torch.tensor([p + c]), torch.ones(1, len(p + c), dtype=torch.long), len(c), [0])
        for p, c in zip(PROMPTS, COMPLETIONS, strict=True)
    ]


@torch.no_grad()
def scored(model, layout):
    """For each row (log-probs, values, reference log-probs), each of the completion's length."""
    rows = []
    for ids, mask, length, starts in rows_of(layout):
        logits, values = model.score(ids, mask, completion_length=length)
        reference = model.score_reference(ids, mask, completion_length=length)
        assert logits.shape == reference.shape == (*values.shape, 300)
        assert values.shape == (len(ids), length)
        for i, start in enumerate(starts):
            completion = COMPLETIONS[len(rows)]
            chosen = torch.tensor(completion)
            entries = slice(start, start + len(completion))
            rows.append(
                (
                    log_softmax_of(logits[i, entries], chosen),
                    values[i, entries],
                    log_softmax_of(reference[i, entries], chosen),
                )
            )
    return rows


# Right, whatever the padding


@pytest.mark.parametrize("layout", ["left", "right", "single"])
@pytest.mark.parametrize("value_head", ["linear", "mlp"])
@all_families
def test_log_probs_values_and_reference_equal_the_slow_row(family, value_head, layout):
    # kills: position_ids dropped (gpt2, opt), not clamped, counted from the mask's left edge; entries shifted by one;
    # kills: the mask not passed; hidden state of another layer or before the norm; reference with adapters on
    model = make_policy(family, value_head=value_head)
    base = make_model(family)  # the same weights, never touched by PEFT
    for i, (logprobs, values, reference) in enumerate(scored(model, layout)):
        slow_logprobs, slow_values, _ = slow_policy(model, i)
        slow_reference, _, _ = slow_row(base, model.v_head, PROMPTS[i], COMPLETIONS[i])
        assert_close(logprobs, slow_logprobs, rtol=0, atol=1e-4)
        assert_close(values, slow_values, rtol=0, atol=1e-4)
        assert_close(reference, slow_reference, rtol=0, atol=1e-4)
        assert (slow_logprobs - slow_reference).abs().max() > 1e-2  # the adapters are not idle
        assert slow_values.abs().max() > 1e-2


@all_families
def test_padding_between_prompt_and_completion(family):
    # kills: positions counted over columns instead of real tokens
    model = make_policy(family)
    for i, (logprobs, values, _) in enumerate(scored(model, "hole")):
        slow_logprobs, slow_values, _ = slow_policy(model, i)
        # entry 0 stands on padding here; every later entry stands on a real token
        assert_close(logprobs[1:], slow_logprobs[1:], rtol=0, atol=1e-4)
        assert_close(values[1:], slow_values[1:], rtol=0, atol=1e-4)


@all_families
def test_the_pad_id_never_matters(family):
    # kills: the mask built from ids, padding attended to
    model = make_policy(family)
    real = pad_right(COMPLETIONS, 0)[1]
    results = []
    for pad_id in (0, 7, 299):
        ids, mask, length = left_padded(pad_id)
        logits, values = model.score(ids, mask, completion_length=length)
        results.append((logits[real], values[real]))
    for logits, values in results[1:]:
        assert_close(logits, results[0][0], rtol=0, atol=1e-5)
        assert_close(values, results[0][1], rtol=0, atol=1e-5)


def test_position_ids_by_hand():
    # kills: the clamp dropped, counting from 1
    causal_lm = make_model("gpt2")
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [0, 1, 0, 1, 0]])
    expected = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 2, 2], [0, 0, 0, 1, 1]])
    assert torch.equal(position_ids(causal_lm, mask)["position_ids"], expected)
    assert torch.equal(position_ids(causal_lm, mask.bool())["position_ids"], expected)


def test_a_model_without_position_ids():
    # kills: position_ids passed to a model that does not take them (Bloom: distances from the mask)
    torch.manual_seed(0)
    bare = AutoModelForCausalLM.from_config(BloomConfig(vocab_size=300, hidden_size=32, n_head=4, n_layer=2)).eval()
    model = randomise(AutoModelForCausalLMWithValueHead(bare))
    model.create_reference()
    assert position_ids(bare, torch.ones(1, 3)) == {}
    for i, (logprobs, values, reference) in enumerate(scored(model, "left")):
        slow_logprobs, slow_values, _ = slow_policy(model, i)
        assert_close(logprobs, slow_logprobs, rtol=0, atol=1e-4)
        assert_close(values, slow_values, rtol=0, atol=1e-4)
        assert_close(reference, slow_logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("config_class", [BartConfig, RwkvConfig])
def test_models_that_left_padding_breaks_are_refused(config_class):
    # kills: the probe dropped: Bart's decoder has learned positions but takes no position_ids, RWKV ignores the mask,
    # so both would be scored wrongly in silence
    sizes = {
        BartConfig: {
            "d_model": 32,
            "decoder_layers": 2,
            "decoder_attention_heads": 4,
            "decoder_ffn_dim": 64,
            "is_encoder_decoder": False,
            "is_decoder": True,
        },
        RwkvConfig: {"hidden_size": 32, "num_hidden_layers": 2},
    }
    torch.manual_seed(0)
    bare = AutoModelForCausalLM.from_config(config_class(vocab_size=300, **sizes[config_class])).eval()
    model = AutoModelForCausalLMWithValueHead(bare)
    with pytest.raises(ValueError, match="other log-probabilities when a prompt is padded on the left"):
        model.create_reference()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@all_families
def test_models_that_left_padding_does_not_break_are_accepted(family, dtype):
    # kills: a probe that refuses every model, or that leaves modes or gradients changed
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model(family, scale=20.0).to(dtype), peft_config=make_lora(family, lora_dropout=0.5)
    )
    model.train()
    model.create_reference()
    assert all(modes(model).values())
    assert not any(p.grad is not None for p in model.parameters())


# The LM head sees completion positions only


def watch_lm_head(model):
    """Shapes of what the LM head is fed, as they come."""
    shapes = []
    model.causal_lm.get_output_embeddings().register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    return shapes


@pytest.mark.parametrize("checkpointing", [False, True])
@all_families
def test_the_lm_head_is_fed_completion_positions_only(family, checkpointing):
    # kills: logits_to_keep not passed (the head then sees B * (P + T) rows), passed as T + 1 last positions
    model = make_policy(family)
    shapes = watch_lm_head(model)
    ids, mask, length = left_padded()
    logits, values = model.score(ids, mask, completion_length=length, gradient_checkpointing=checkpointing)
    (logits.sum() + values.sum()).backward()
    model.score_reference(ids, mask, completion_length=length)
    assert shapes == [(3, length, 32)] * 2  # and the backward pass does not run it again


def test_the_lm_head_is_fed_completion_positions_only_by_a_copied_reference():
    # kills: another path for the frozen copy
    model = AutoModelForCausalLMWithValueHead(make_model("gpt2"))
    model.create_reference()
    shapes = []
    model.ref_model.get_output_embeddings().register_forward_hook(lambda _, args, __: shapes.append(args[0].shape))
    ids, mask, length = left_padded()
    model.score_reference(ids, mask, completion_length=length)
    assert shapes == [(3, length, 32)]


def test_a_model_that_cannot_keep_some_logits(monkeypatch):
    # kills: the fallback's slice shifted or not applied to hidden states
    model = make_policy("llama")
    ids, mask, length = left_padded()
    expected = model.score(ids, mask, completion_length=length)
    forward = model.causal_lm.forward

    def old_style(input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        assert "logits_to_keep" not in kwargs
        return forward(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache
        )

    monkeypatch.setattr(model.causal_lm, "forward", old_style)
    for got, wanted in zip(model.score(ids, mask, completion_length=length), expected, strict=True):
        assert got.shape == wanted.shape
        assert_close(got, wanted, rtol=0, atol=1e-5)


def test_hooks_are_removed():
    # kills: a hook left on the LM head by each pass, also by one that raised
    model = make_policy("llama")
    ids, mask, length = left_padded()
    model.score(ids, mask, completion_length=length)
    model.score_reference(ids, mask, completion_length=length)
    model(ids, mask)
    with pytest.raises(ZeroDivisionError), lm_head_input(model.causal_lm):
        raise ZeroDivisionError
    assert not model.causal_lm.get_output_embeddings()._forward_pre_hooks


def test_no_gradient_through_the_reference():
    # kills: no_grad dropped from score_reference
    model = AutoModelForCausalLMWithValueHead(make_model("gpt2"))
    model.create_reference(make_model("gpt2", seed=5))
    model.ref_model.requires_grad_(True)
    ids, mask, length = left_padded()
    assert not model.score_reference(ids, mask, completion_length=length).requires_grad
    assert not make_policy("gpt2").score_reference(ids, mask, completion_length=length).requires_grad


# Dropout


def modes(model):
    return {name: module.training for name, module in model.named_modules()}


def dropout_policy(family):
    model = make_policy(family, lora={"lora_dropout": 0.1}, **DROPOUT[family])
    model.train()
    model.causal_lm.get_output_embeddings().eval()  # one module in another mode than the rest
    return model


@all_families
def test_no_dropout_in_scoring_even_in_train_mode(family):
    # kills: eval() dropped, the old modes not given back, one mode given to every module
    model = dropout_policy(family)
    ids, mask, length = left_padded()
    before = modes(model)
    assert sum(before.values()) not in (0, len(before))
    policies = [model.score(ids, mask, completion_length=length) for _ in range(2)]
    references = [model.score_reference(ids, mask, completion_length=length) for _ in range(2)]
    assert modes(model) == before
    assert torch.equal(policies[0][0], policies[1][0])
    assert torch.equal(policies[0][1], policies[1][1])
    assert torch.equal(*references)
    # the same as in eval mode, and dropout is real: without score's care the logits do change
    assert not torch.equal(model(ids, mask)[0], model(ids, mask)[0])
    model.eval()
    assert torch.equal(model.score(ids, mask, completion_length=length)[0], policies[0][0])


def test_no_dropout_in_a_copied_reference():
    # kills: without_dropout on the policy instead of on the reference
    model = AutoModelForCausalLMWithValueHead(make_model("gpt2", **DROPOUT["gpt2"]))
    model.create_reference()
    model.train()
    model.ref_model.train()
    ids, mask, length = left_padded()
    logits = [model.score_reference(ids, mask, completion_length=length) for _ in range(2)]
    assert torch.equal(*logits)
    assert model.ref_model.training


def test_sampling_mode():
    # kills: dropout or gradients left on while sampling, modes or gradients not given back
    model = dropout_policy("gpt2")
    before = modes(model)

    def look_and_fail():
        assert not any(modes(model).values())
        assert not torch.is_grad_enabled()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), model.sampling_mode():
        look_and_fail()
    assert modes(model) == before
    assert torch.is_grad_enabled()


def test_modes_come_back_after_an_error():
    # kills: try/finally dropped in without_dropout
    model = dropout_policy("gpt2")
    before = modes(model)
    with pytest.raises(ZeroDivisionError), without_dropout(model):
        raise ZeroDivisionError
    with pytest.raises(IndexError):  # an id outside the vocabulary
        model.score(torch.full((1, 4), 999), torch.ones(1, 4), completion_length=2)
    assert modes(model) == before


# Gradients


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("value_head", ["linear", "mlp"])
def test_values_teach_the_adapters(value_head, checkpointing):
    # kills: the hidden state detached on its way to the head
    model = make_policy("llama", value_head=value_head)
    ids, mask, length = left_padded()
    score = model.score(ids, mask, completion_length=length, gradient_checkpointing=checkpointing)
    for values in (score[1], model(ids, mask)[2]):
        model.zero_grad()
        values.sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for _, p in model.trainable_parameters())


# Gradient checkpointing


def gradients(model, checkpointing):
    ids, mask, length = left_padded()
    model.zero_grad()
    logits, values = model.score(ids, mask, completion_length=length, gradient_checkpointing=checkpointing)
    real = pad_right(COMPLETIONS, 0)[1]
    chosen = pad_right(COMPLETIONS, 0)[0]
    loss = torch.log_softmax(logits, -1).gather(-1, chosen[..., None])[..., 0][real].sum() + (values[real] ** 2).sum()
    before = modes(model)
    loss.backward()  # long after the contexts were left
    assert modes(model) == before
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert {name for name, _ in model.trainable_parameters()} == set(found)
    assert all(grad.abs().sum() > 0 for grad in found.values())
    return found


@pytest.mark.parametrize("training", [False, True])
@all_families
def test_checkpointed_gradients_equal_plain_ones(family, training):
    # kills: without_dropout dropped from the recomputation, the wrong layer's forward bound (late binding)
    model = make_policy(family, lora={"lora_dropout": 0.1}, value_head="mlp", **DROPOUT[family])
    expected = gradients(model, False)
    model.train(training)
    found = gradients(model, True)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


def test_a_reference_pass_between_forward_and_backward():
    # kills: adapters off, or without gradient, in the recomputation
    model = make_policy("llama")
    expected = gradients(model, False)
    score = model.score

    def score_then_reference(ids, mask, **kwargs):
        outputs = score(ids, mask, **kwargs)
        model.score_reference(ids, mask, completion_length=kwargs["completion_length"])
        return outputs

    model.score = score_then_reference
    for checkpointing in (False, True):
        for name, gradient in gradients(model, checkpointing).items():
            assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


def test_checkpointing_together_with_transformers_own_switch():
    # kills: relying on the model's own switch, which acts in train mode only
    model = make_policy("llama", **DROPOUT["llama"])
    expected = gradients(model, False)
    model.causal_lm.gradient_checkpointing_enable()
    model.train()
    found = gradients(model, True)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("checkpointing", "runs"), [(False, 1), (True, 2)])
def test_layers_run_again_in_the_backward_pass(checkpointing, runs):
    # kills: the setting ignored
    model = make_policy("llama")
    calls = []
    for layer in model.causal_lm.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients(model, checkpointing)
    assert len(calls) == runs * 2  # 2 layers


def test_checkpointing_keeps_fewer_activations():
    # kills: layers wrapped without checkpoint
    def saved_bytes(checkpointing):
        model = make_policy("llama", num_hidden_layers=6)
        ids, mask, length = left_padded()
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        sizes = {}

        def pack(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = model.score(ids, mask, completion_length=length, gradient_checkpointing=checkpointing)
        assert out[0].requires_grad
        return sum(sizes.values())

    assert saved_bytes(True) < saved_bytes(False) / 2


def test_layers_get_their_forward_back():
    # kills: forward left wrapped, the instance's own forward (a hook of accelerate) deleted, no try/finally
    model = make_policy("llama")
    layers = list(model.causal_lm.model.layers)
    ids, mask, length = left_padded()

    def hooked(*args, **kwargs):
        return type(layers[1]).forward(layers[1], *args, **kwargs)

    layers[1].forward = hooked
    model.score(ids, mask, completion_length=length, gradient_checkpointing=True)
    assert "forward" not in layers[0].__dict__
    assert layers[1].__dict__["forward"] is hooked
    with pytest.raises(IndexError):
        model.score(torch.full((1, 4), 999), torch.ones(1, 4), completion_length=2, gradient_checkpointing=True)
    assert "forward" not in layers[0].__dict__
    assert layers[1].__dict__["forward"] is hooked


def test_a_model_without_checkpointable_layers_is_refused():
    # kills: the setting ignored in silence
    config = OpenAIGPTConfig(vocab_size=300, n_embd=32, n_head=4, n_layer=2, n_positions=64)
    model = AutoModelForCausalLMWithValueHead(AutoModelForCausalLM.from_config(config).eval())
    ids, mask, length = left_padded()
    with pytest.raises(ValueError, match="OpenAIGPTLMHeadModel has no layers that support gradient checkpointing"):
        model.score(ids, mask, completion_length=length, gradient_checkpointing=True)
    model.score(ids, mask, completion_length=length)


def test_local_attention_layers():
    # kills: nothing by itself: sliding windows shorter than the padding must not change what is scored
    torch.manual_seed(0)
    config = GPTNeoConfig(
        vocab_size=300,
        hidden_size=32,
        num_heads=4,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
        window_size=3,
    )
    model = randomise(AutoModelForCausalLMWithValueHead(AutoModelForCausalLM.from_config(config).eval()))
    model.create_reference()
    for i, (logprobs, values, _) in enumerate(scored(model, "left")):
        slow_logprobs, slow_values, _ = slow_policy(model, i)
        assert_close(logprobs, slow_logprobs, rtol=0, atol=1e-4)
        assert_close(values, slow_values, rtol=0, atol=1e-4)


# Precision


@all_families
def test_bfloat16_base_with_float32_head_and_adapters(family):
    # kills: the cast at the head dropped, gradients or log-probs that are not finite
    base = make_model(family).to(torch.bfloat16)
    model = randomise(
        AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora(family), value_head="mlp")
    )
    assert {p.dtype for _, p in model.trainable_parameters()} == {torch.float32}
    ids, mask, length = left_padded()
    logits, values = model.score(ids, mask, completion_length=length)
    assert logits.dtype == torch.bfloat16  # the base does compute in it
    assert values.dtype == torch.float32
    assert all(grad.isfinite().all() for grad in gradients(model, False).values())
    slow_values = torch.stack([slow_row_bf16(model, i) for i in range(3)])
    assert_close(values[:, 0], slow_values, rtol=0.05, atol=0.1)


@torch.no_grad()
def slow_row_bf16(model, i):
    ids = torch.tensor([PROMPTS[i]])
    hidden = model.causal_lm(input_ids=ids, output_hidden_states=True).hidden_states[-1][0, -1]
    return model.v_head.layers(hidden.float())[0]


def test_values_are_float32_under_autocast():
    # kills: autocast reaching the head from a scoring pass
    model = make_policy("llama", value_head="mlp")
    ids, mask, length = left_padded()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, values = model.score(ids, mask, completion_length=length)
        full_values = model(ids, mask)[2]
    assert logits.dtype == torch.bfloat16
    assert values.dtype == full_values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


# Rollouts: inputs, records, joining


def test_trimmed_inputs_by_hand():
    # kills: columns cut on the wrong side, real tokens cut, T left at its old width, a bool mask
    prompt_ids = torch.tensor([[9, 9, 9, 1, 2], [9, 9, 3, 4, 5]])
    prompt_mask = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 1, 1, 1]]).bool()
    completion_ids = torch.tensor([[6, 9, 9, 9], [7, 8, 9, 9]])
    completion_mask = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]).bool()
    ids, mask, width = trimmed_inputs(prompt_ids, prompt_mask, completion_ids, completion_mask)
    assert ids.tolist() == [[9, 1, 2, 6, 9], [3, 4, 5, 7, 8]]
    assert mask.tolist() == [[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert mask.dtype == torch.int64
    assert width == 2


def test_trimmed_inputs_with_nothing_to_trim():
    # kills: an off-by-one at full width
    prompt_ids, completion_ids = torch.tensor([[1, 2], [9, 3]]), torch.tensor([[4, 9], [5, 6]])
    masks = torch.tensor([[1, 1], [0, 1]]).bool(), torch.tensor([[1, 0], [1, 1]]).bool()
    ids, mask, width = trimmed_inputs(prompt_ids, masks[0], completion_ids, masks[1])
    assert ids.tolist() == [[1, 2, 4, 9], [9, 3, 5, 6]]
    assert mask.tolist() == [[1, 1, 1, 0], [0, 1, 1, 1]]
    assert width == 2


def config(**overrides):
    return PPOConfig(**{"micro_batch_size": 8, "temperature": 0.7, "kl_estimator": "k1", **overrides})


def recorded(model, *, pad_token_id=0, autocast=contextlib.nullcontext, **overrides):
    return record_policies(
        model, PROMPTS, COMPLETIONS, config(**overrides), pad_token_id=pad_token_id, autocast=autocast
    )


FLOAT_FIELDS = ["old_logprobs", "old_values", "ref_logprobs", "kl", "ref_kl", "entropy"]


def kl_by_hand(estimator, logprobs, reference, distribution, ref_distribution):
    log_ratio = logprobs - reference
    return {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": torch.exp(-log_ratio) - 1 + log_ratio,
        "full": (distribution.exp() * (distribution - ref_distribution)).sum(-1),
    }[estimator]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
@pytest.mark.parametrize("micro_batch_size", [1, 2, 8])
def test_records_equal_the_slow_rows(estimator, micro_batch_size):
    # kills: temperature missing in any of the records, rows of micro-batches mixed up, policy and reference swapped,
    # kills: padding not zeroed, one KL for the other
    model, base = make_policy("opt"), make_model("opt")
    tokens = recorded(model, kl_estimator=estimator, micro_batch_size=micro_batch_size)
    expected_ids, expected_mask = pad_right(COMPLETIONS, 0)
    assert torch.equal(tokens["completion_ids"], expected_ids)
    assert torch.equal(tokens["completion_mask"], expected_mask)
    assert torch.equal(tokens["prompt_ids"], pad_left(PROMPTS, 0)[0])
    assert torch.equal(tokens["prompt_mask"], pad_left(PROMPTS, 0)[1])
    for name in FLOAT_FIELDS:
        assert tokens[name].shape == (3, 5)
        assert tokens[name].dtype == torch.float32
        assert not tokens[name].requires_grad
        assert tokens[name][~expected_mask].eq(0).all()
    for i, completion in enumerate(COMPLETIONS):
        logprobs, values, distribution = slow_policy(model, i, temperature=0.7)
        reference, _, ref_distribution = slow_row(base, model.v_head, PROMPTS[i], completion, temperature=0.7)
        expected = {
            "old_logprobs": logprobs,
            "old_values": values,
            "ref_logprobs": reference,
            "kl": kl_by_hand(estimator, logprobs, reference, distribution, ref_distribution),
            "ref_kl": kl_by_hand("full", logprobs, reference, distribution, ref_distribution),
            "entropy": -(distribution.exp() * distribution).sum(-1),
        }
        for name, value in expected.items():
            assert_close(tokens[name][i, : len(completion)], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: n + m)
        assert expected["ref_kl"].min() > 0


@all_families
def test_micro_batches_do_not_change_records(family):
    # kills: rows written to the wrong place, widths of a micro-batch leaking
    model = make_policy(family)
    one, eight = recorded(model, micro_batch_size=1), recorded(model, micro_batch_size=8)
    assert one.keys() == eight.keys()
    for name in one:
        assert_close(one[name], eight[name], rtol=1e-5, atol=1e-5)


def test_records_do_not_depend_on_the_pad_id():
    # kills: masks from comparing ids with the pad id
    model = make_policy("gpt2")
    first, second = recorded(model), recorded(model, pad_token_id=40)
    for name in [*FLOAT_FIELDS, "prompt_mask", "completion_mask"]:
        assert_close(first[name].float(), second[name].float(), rtol=0, atol=1e-5)


def test_garbage_in_padding_cannot_reach_a_record():
    # kills: multiplication by the mask for `where`
    model = make_policy("llama")
    score = model.score
    mask = pad_right(COMPLETIONS, 0)[1]

    def with_garbage(*args, **kwargs):
        logits, values = score(*args, **kwargs)
        return torch.where(mask[..., None], logits, torch.nan), torch.where(mask, values, torch.inf)

    expected = recorded(model)
    model.score = with_garbage
    for name, tensor in recorded(model).items():
        assert torch.equal(tensor, expected[name])


def test_records_use_the_autocast_they_are_given():
    # kills: autocast ignored for the policy or the reference
    model = make_policy("llama")
    shapes = []
    model.causal_lm.get_output_embeddings().register_forward_hook(lambda _, __, out: shapes.append(out.dtype))
    tokens = recorded(model, autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    assert shapes == [torch.bfloat16] * 2
    assert all(tokens[name].dtype == torch.float32 for name in FLOAT_FIELDS)


def rollout_of(prompts, completions, offset=0.0):
    """A rollout whose every float is different, so that a misplaced one shows; padding holds 0."""
    prompt_ids, prompt_mask = pad_left(prompts, 0)
    completion_ids, completion_mask = pad_right(completions, 0)
    count = len(prompts)

    def numbers(k):
        values = offset + k + torch.arange(completion_mask.numel()).view(completion_mask.shape) / 100
        return torch.where(completion_mask, values, 0)

    return Rollout(
        prompts=[f"p{offset}-{i}" for i in range(count)],
        completions=[f"c{offset}-{i}" for i in range(count)],
        prompt_ids=prompt_ids,
        prompt_mask=prompt_mask,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        ended=torch.arange(count) % 2 == 0,
        scores=offset + torch.arange(count).float(),
        token_rewards=numbers(0),
        logged_columns={"note": [f"n{offset}-{i}" for i in range(count)]},
        logged_metrics={"m": torch.full((count,), float(offset))},
        rewards_by_function={
            "a": offset + torch.arange(count).float() + 0.1,
            "b": offset + torch.full((count,), torch.nan),
        },
        **{name: numbers(k + 1) for k, name in enumerate(FLOAT_FIELDS)},
    )


def test_rollout_head():
    # kills: fields left at full length, dicts or lists not cut
    rollout = rollout_of(PROMPTS, COMPLETIONS)
    first = rollout.head(2)
    assert (len(rollout), len(first)) == (3, 2)
    assert first.prompts == rollout.prompts[:2]
    assert first.completions == rollout.completions[:2]
    assert list(first.rewards_by_function) == ["a", "b"]
    assert torch.equal(first.rewards_by_function["a"], rollout.rewards_by_function["a"][:2])
    for name in ["prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "ended", "scores", *FLOAT_FIELDS]:
        assert torch.equal(getattr(first, name), getattr(rollout, name)[:2])
    assert len(rollout.head(10)) == 3


def test_rollout_to():
    # kills: a tensor left behind, those in the dict in particular
    rollout = rollout_of(PROMPTS, COMPLETIONS)
    moved = rollout.to("meta")
    assert moved.prompts == rollout.prompts
    assert moved.completions == rollout.completions
    tensors = {n: v for n, v in vars(moved).items() if isinstance(v, torch.Tensor)}
    assert len(tensors) == len(vars(moved)) - 5  # prompts, completions and three dicts
    tensors |= moved.rewards_by_function | moved.logged_metrics
    assert moved.logged_columns == rollout.logged_columns
    assert all(tensor.device.type == "meta" for tensor in tensors.values())
    assert rollout.scores.device.type == "cpu"


@pytest.mark.parametrize("rows", [slice(1, 3), torch.tensor([2, 0])])
def test_rollout_tokens(rows):
    # kills: another set of names than trimmed_inputs takes, rows mixed up
    rollout = rollout_of(PROMPTS, COMPLETIONS)
    tokens = rollout.tokens(rows)
    trimmed_inputs(**tokens)
    for name, tensor in tokens.items():
        assert torch.equal(tensor, getattr(rollout, name)[rows])


def test_concat_rollouts_of_different_widths():
    # kills: prompts padded on the right, completions on the left, masks padded with True, order of parts
    parts = [
        rollout_of([[5, 6, 7]], [[8]], offset=10.0),
        rollout_of([[1], [2]], [[3, 4, 0], [9, 9]], offset=20.0),
        rollout_of([[4, 4]], [[2, 0]], offset=30.0),
    ]
    joined = concat_rollouts(parts)
    assert joined.prompts == ["p10.0-0", "p20.0-0", "p20.0-1", "p30.0-0"]
    assert joined.completions == ["c10.0-0", "c20.0-0", "c20.0-1", "c30.0-0"]
    assert joined.prompt_ids.tolist() == [[5, 6, 7], [0, 0, 1], [0, 0, 2], [0, 4, 4]]
    assert joined.prompt_mask.int().tolist() == [[1, 1, 1], [0, 0, 1], [0, 0, 1], [0, 1, 1]]
    assert joined.completion_ids.tolist() == [[8, 0, 0], [3, 4, 0], [9, 9, 0], [2, 0, 0]]
    assert joined.completion_mask.int().tolist() == [[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 0]]
    assert joined.prompt_mask.dtype == joined.completion_mask.dtype == torch.bool
    assert joined.scores.tolist() == [10.0, 20.0, 21.0, 30.0]
    assert joined.ended.tolist() == [True, True, False, True]
    assert_close(joined.rewards_by_function["a"], torch.tensor([10.1, 20.1, 21.1, 30.1]))
    assert joined.rewards_by_function["b"].isnan().all()
    for k, name in enumerate(FLOAT_FIELDS):
        tensor = getattr(joined, name)
        assert tensor.shape == (4, 3)
        assert tensor[~joined.completion_mask].eq(0).all()
        assert_close(tensor[0, 0], torch.tensor(10.0 + k + 1))
        assert_close(tensor[2, :2], torch.tensor([20.0 + k + 1 + 0.03, 20.0 + k + 1 + 0.04]))
        assert_close(tensor[3, :2], torch.tensor([30.0 + k + 1, 30.0 + k + 1 + 0.01]))


def test_concat_when_one_process_logged_less():
    # kills: a KeyError, or values of one process put to rows of another
    first, second = rollout_of([[1], [2]], [[3], [4]]), rollout_of([[5]], [[6]], offset=7.0)
    second = dataclasses.replace(second, logged_columns={"other": ["o"]}, logged_metrics={})
    joined = concat_rollouts([first, second])
    assert joined.logged_columns == {"note": ["n0.0-0", "n0.0-1", None], "other": [None, None, "o"]}
    assert_close(joined.logged_metrics["m"], torch.tensor([0.0, 0.0, torch.nan]), equal_nan=True)
    assert joined.head(2).logged_columns == {"note": ["n0.0-0", "n0.0-1"], "other": [None, None]}


def test_concat_of_one_rollout_and_of_its_rows():
    # kills: a width lost or gained on the way
    rollout = rollout_of(PROMPTS, COMPLETIONS)
    assert concat_rollouts([rollout]) is rollout
    twice = concat_rollouts([rollout, copy.deepcopy(rollout)])
    assert len(twice) == 6
    assert torch.equal(twice.head(3).old_logprobs, rollout.old_logprobs)
    assert torch.equal(twice.prompt_ids[3:], rollout.prompt_ids)


def test_checkpoint_of_torch_is_the_one_that_is_used(monkeypatch):
    # kills: the reentrant checkpoint, through which frozen inputs get no gradient to the adapters
    model = make_policy("llama")
    seen = []

    def watched(function, *args, use_reentrant, **kwargs):
        seen.append(use_reentrant)
        return checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)

    monkeypatch.setattr("rlhf_kit.scoring.checkpoint", watched)
    gradients(model, True)
    assert seen == [False, False]
