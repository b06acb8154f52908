"""Which layers get adapters when the user names none, and what is said about it."""

import copy
import warnings

import pytest
import torch
from conftest import make_lora, make_model
from peft import AdaLoraConfig, IA3Config, LoftQConfig, LoHaConfig, LoraConfig, LoraGAConfig, get_peft_model
from peft.tuners.lora.config import CordaConfig
from torch import nn

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOTrainer
from rlhf_kit.adapters import add_adapters, describe_training


def adapted_layers(model):
    return sorted({name.rsplit(".", 1)[-1] for name in model.base_model.targeted_module_names})


def test_the_users_config_stays_as_it_was():
    # kills: choices written into an object that the user may use for another model
    config = LoraConfig(task_type="CAUSAL_LM")
    before = copy.deepcopy(config)
    add_adapters(make_model("gpt2"), config)
    assert config == before
    assert adapted_layers(add_adapters(make_model("llama"), config)) == ["q_proj", "v_proj"]


def test_what_the_user_names_is_taken():
    # kills: our choice in place of the user's
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["o_proj"])
    assert adapted_layers(add_adapters(make_model("llama"), config)) == ["o_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    names = adapted_layers(add_adapters(make_model("llama"), config))
    assert names == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_unknown_architecture_gets_all_linear_layers_but_the_head():
    # kills: PEFT's refusal passed on; the LM head adapted
    model = make_model("llama")
    model.config.model_type = "brand_new"
    for layer in model.model.layers:
        for old, new in (("q_proj", "wq"), ("v_proj", "wv")):
            setattr(layer.self_attn, new, getattr(layer.self_attn, old))
            delattr(layer.self_attn, old)
    names = adapted_layers(add_adapters(model, LoraConfig(task_type="CAUSAL_LM")))
    assert names == ["down_proj", "gate_proj", "k_proj", "o_proj", "up_proj", "wq", "wv"]


@pytest.mark.parametrize("targets", [None, "all-linear", ["attn.c_attn"], r".*c_attn"])
@pytest.mark.parametrize(("family", "transposed"), [("gpt2", True), ("llama", False)])
def test_orientation_of_weights_is_chosen_without_a_warning(family, transposed, targets):
    # kills: PEFT's warning about fan_in_fan_out for every GPT-2 user
    if family == "llama" and targets not in (None, "all-linear"):
        targets = ["self_attn.q_proj"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = add_adapters(make_model(family), LoraConfig(task_type="CAUSAL_LM", target_modules=targets))
    assert model.peft_config["default"].fan_in_fan_out is transposed


OTHER_KINDS = [LoHaConfig(target_modules=["q_proj"]), IA3Config(target_modules=["k_proj"], feedforward_modules=[])]


@pytest.mark.parametrize("config", OTHER_KINDS)
def test_other_kinds_of_adapters_are_described(config):
    # kills: the description of LoRA only
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=config)
    assert f"{config.peft_type.value}" in describe_training(model)
    assert f"on {next(iter(config.target_modules))} (2 layers)." in describe_training(model)


def test_description_counts_what_is_trained():
    # kills: the value head, the reference or frozen weights counted as trained
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
    trained = sum(p.numel() for n, p in model.named_parameters() if "lora_" in n)
    total = sum(p.numel() for p in make_model("llama").parameters()) + trained
    text = describe_training(model)
    amount = f"{trained:,} of {total:,} parameters ({trained / total:.2%})"
    assert text.startswith(f"Training {amount} and the linear value head")
    assert text.endswith("LORA r=4 on q_proj, v_proj (4 layers).")
    whole = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), value_head="mlp")
    assert describe_training(whole) == (
        f"Training {total - trained:,} of {total - trained:,} parameters (100.00%) and the mlp value head."
    )


def test_packed_weights_count_as_what_they_stand_for():
    # kills: a 4-bit model reported at half its size
    bnb = pytest.importorskip("bitsandbytes")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"), peft_config=make_lora("llama"))
    count = describe_training(model).split(" of ")[1].split(" ")[0]
    layer = model.causal_lm.model.layers[0].mlp
    packed = bnb.nn.Linear4bit(32, 64, bias=False, quant_type="nf4")
    packed.weight = bnb.nn.Params4bit(layer.up_proj.weight.data, requires_grad=False, quant_type="nf4")
    packed.to("cpu")
    packed(torch.ones(1, 32))
    assert isinstance(layer.up_proj, nn.Linear)
    layer.up_proj = packed.to("cpu")
    if getattr(packed.weight, "quant_state", None) is None:
        packed.weight = packed.weight._quantize("cpu")
    assert describe_training(model).split(" of ")[1].split(" ")[0] == count


def test_a_base_that_an_earlier_run_left_its_adapters_in_is_refused(tokenizer, config_factory):
    # kills: two runs in one notebook on one loaded model, the second with the first one's adapter still active
    base = make_model("llama")
    get_peft_model(base, make_lora("llama"))
    for build in (
        lambda: AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora("llama")),
        lambda: AutoModelForCausalLMWithValueHead(base),
    ):
        with pytest.raises(ValueError, match=r"already holds adapter layers, e.g. model.layers.0.self_attn.q_proj"):
            build()


def test_ia3_keeps_the_layers_that_peft_chooses_for_it(tmp_path):
    # kills: our targets with PEFT's feed-forward layers, which cannot be loaded again
    make_model("llama").save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(tmp_path / "base"), peft_config=IA3Config(task_type="CAUSAL_LM")
    )
    model.save_pretrained(tmp_path / "ia3")
    assert AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "ia3").is_peft_model


def test_weights_outside_the_adapters_are_not_trained_with_them(tokenizer, config_factory):
    # kills: a base that moves under the reference and is not saved
    model = get_peft_model(make_model("llama"), make_lora("llama"))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"1 trainable parameters belong to no adapter, e.g. .*norm.weight"):
        PPOTrainer(model, None, config_factory(), processing_class=tokenizer)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: "org/model", TypeError, "ref_model must be a loaded causal LM, got str"),
        (lambda: AutoModelForCausalLMWithValueHead(make_model("llama")), TypeError, "got AutoModelForCausalLMWith"),
        (lambda: make_model("llama", vocab_size=320), ValueError, "knows 320 tokens and the policy 300"),
    ],
)
def test_what_is_no_reference_model(make, error, match, tokenizer, config_factory):
    # kills: an AttributeError, or a mismatch deep in the first rollout
    with pytest.raises(error, match=match):
        PPOTrainer(make_model("llama"), None, config_factory(), processing_class=tokenizer, ref_model=make())


@pytest.mark.parametrize("lora", [{}, {"modules_to_save": ["lm_head"]}])
def test_a_refused_trainer_leaves_the_model_as_it_was(lora, tokenizer, config_factory):
    # kills: a corrected second try that is refused because the first one left its adapters
    base = make_model("llama")
    before = {name: (p.detach().clone(), p.requires_grad) for name, p in base.named_parameters()}
    rows = [{"prompt": "Hello"}]
    for broken in ({"train_dataset": [{"text": "Hello"}]}, {"reward_funcs": 3.0}, {"callbacks": None}):
        parts = {"train_dataset": rows, "reward_funcs": lambda completions: [0.0] * len(completions), **broken}
        if "callbacks" in broken:  # the corrected call
            PPOTrainer(base, args=config_factory(), processing_class=tokenizer,
                       peft_config=make_lora("llama", **lora), **parts)  # fmt: skip
            continue
        with pytest.raises((ValueError, TypeError)):
            PPOTrainer(base, args=config_factory(), processing_class=tokenizer,
                       peft_config=make_lora("llama", **lora), **parts)  # fmt: skip
        now = {name: (p, p.requires_grad) for name, p in base.named_parameters()}
        assert now.keys() == before.keys()
        assert all(torch.equal(now[n][0], p) and now[n][1] == flag for n, (p, flag) in before.items())


ANOTHER_BASE = {"loftq": {"loftq_config": LoftQConfig()}, "corda": {"corda_config": CordaConfig()},
                "lora_ga": {"lora_ga_config": LoraGAConfig()}, "pissa_niter_4": {}}  # fmt: skip


@pytest.mark.parametrize("start", ANOTHER_BASE)
def test_starts_that_change_the_base_for_good_are_refused(start):
    # kills: a saved adapter that is loaded onto another base than it was trained on
    model = make_model("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(ValueError, match=f"'{start}', which changes the base"):
        add_adapters(model, LoraConfig(init_lora_weights=start, **ANOTHER_BASE[start]))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        (LoraConfig(target_modules=["nope"]), ValueError, r"target_modules names \['nope'\], but .* 'q_proj'"),
        (LoraConfig(target_modules="nope.*"), ValueError, r"target_modules names nope\.\*, but"),
        (LoraConfig(task_type="SEQ_CLS"), ValueError, "task_type='SEQ_CLS', but the policy is a causal LM"),
        (AdaLoraConfig(total_step=10), ValueError, "ADALORA, whose ranks change"),
        ({"r": 4}, TypeError, "peft_config must be a PeftConfig such as LoraConfig"),
    ],
)
def test_adapters_that_cannot_be_trained_or_loaded_again_are_refused(config, error, match):
    # kills: an adapter folder that AutoPeftModelForCausalLM cannot load; settings of AdaLoRA that do nothing
    model = make_model("llama")
    with pytest.raises(error, match=match):
        add_adapters(model, config)


def test_a_task_is_filled_in_and_dropout_that_does_nothing_is_said():
    # kills: a saved adapter without its task; a setting without effect in silence
    with pytest.warns(UserWarning, match=r"lora_dropout=0\.1 has no effect"):
        model = add_adapters(make_model("llama"), LoraConfig(lora_dropout=0.1))
    assert model.peft_config["default"].task_type == "CAUSAL_LM"
