"""Reward models: on the policy's base and of their own, against transformers' and TRL's own classes."""

import json
import shutil
from contextlib import nullcontext

import pytest
import torch
from conftest import FAMILIES, TEXTS, make_lora, make_model, make_tokenizer
from datasets import Dataset
from peft import AutoPeftModelForSequenceClassification, LoraConfig, PeftModel, get_peft_model
from tokenizers.processors import TemplateProcessing
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOTrainer
from rlhf_kit.reward_models import RewardAdapter, RewardModel, load_reward_model

PROMPT_IDS = [[5, 6, 7, 8], [9], [11, 12]]
COMPLETION_IDS = [[20, 21], [22, 23, 24, 0], [25]]


@pytest.fixture
def tokenizer():
    return make_tokenizer()


def save_base(folder, family="llama"):
    make_model(family).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def save_reward_adapter(base, folder, *, num_labels=1, seed=3, **lora):
    """A LoRA sequence classifier with random weights, as PEFT saves it."""
    torch.manual_seed(seed)
    network = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    family = network.config.model_type.replace("_text", "")
    adapted = get_peft_model(network, make_lora(family, **{"task_type": "SEQ_CLS", **lora}))
    for name, p in adapted.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(p, std=0.3)
    adapted.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def policy_on(base, family="llama"):
    return AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora(family))


def adapter_on(model, folder, batch_size=2):
    return RewardAdapter(model, folder, batch_size=batch_size, autocast=nullcontext)


# On the policy's base


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_adapter_scores_equal_those_of_the_sequence_classifier(family, tmp_path):
    # kills: the policy's adapter active, hidden states before the last norm, the pad token read, a shift by one,
    # positions not counted from the first real token
    base = save_base(tmp_path / "base", family)
    folder = save_reward_adapter(base, tmp_path / "reward")
    model = policy_on(base, family)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.3)
    scores = adapter_on(model, folder)(PROMPT_IDS, COMPLETION_IDS)
    own = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    own.config.pad_token_id = 0
    with torch.no_grad():
        expected = [
            float(own(input_ids=torch.tensor([p + c])).logits) for p, c in zip(PROMPT_IDS, COMPLETION_IDS, strict=True)
        ]
    assert_close(torch.tensor(scores), torch.tensor(expected), atol=1e-5, rtol=1e-5)
    assert torch.tensor(expected).std() > 0.1


def test_policy_reference_and_what_is_trained_are_as_before(tmp_path):
    # kills: the reward adapter left active, made trainable, or switched on in the reference
    base = save_base(tmp_path / "base")
    model = policy_on(base)
    model.create_reference()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    mask = torch.ones_like(ids)
    before = model.score(ids, mask, completion_length=2)[0], model.score_reference(ids, mask, completion_length=2)
    trained = [name for name, _ in model.trainable_parameters()]
    reward = adapter_on(model, save_reward_adapter(base, tmp_path / "reward"))
    reward(PROMPT_IDS, COMPLETION_IDS)
    after = model.score(ids, mask, completion_length=2)[0], model.score_reference(ids, mask, completion_length=2)
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert [name for name, _ in model.trainable_parameters()] == trained
    assert model.pretrained_model.active_adapter == "default"


def test_no_second_base(tmp_path):
    # kills: a copy of the base loaded for the reward
    base = save_base(tmp_path / "base")
    model = policy_on(base)
    before = sum(p.numel() for p in model.parameters())
    adapter_on(model, save_reward_adapter(base, tmp_path / "reward"))
    added = sum(p.numel() for p in model.parameters()) - before
    assert added == sum(p.numel() for name, p in model.named_parameters() if ".reward." in f"{name}.")
    assert 0 < added < before / 10


def test_batch_size_and_neighbours_do_not_change_a_score(tmp_path):
    # kills: padding read, rows mixed up between batches
    base = save_base(tmp_path / "base")
    reward = adapter_on(policy_on(base), save_reward_adapter(base, tmp_path / "reward"))
    together = reward(PROMPT_IDS, COMPLETION_IDS)
    reward._batch_size = 1
    assert_close(reward(PROMPT_IDS, COMPLETION_IDS), together, atol=1e-5, rtol=1e-5)


def test_a_model_in_train_mode_scores_without_dropout(tmp_path):
    # kills: a reward that is noise when the user, or a callback, has called model.train()
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward", lora_dropout=0.5)
    model = policy_on(base)
    reward = adapter_on(model, folder)
    quiet = reward(PROMPT_IDS, COMPLETION_IDS)
    model.train()
    assert reward(PROMPT_IDS, COMPLETION_IDS) == quiet
    assert model.training


@pytest.mark.parametrize("loading", [{"load_in_8bit": True}, {"load_in_4bit": True}, {"dtype": torch.bfloat16}])
def test_on_a_base_in_low_precision(loading, tmp_path):
    # kills: an adapter that cannot be put on a quantised layer, a score head that meets half-precision states
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward")
    exact = adapter_on(policy_on(base), folder)(PROMPT_IDS, COMPLETION_IDS)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=make_lora("llama"), **loading)
    scores = adapter_on(model, folder)(PROMPT_IDS, COMPLETION_IDS)
    assert_close(torch.tensor(scores), torch.tensor(exact), atol=0.3 * float(torch.tensor(exact).std()), rtol=0)


def test_merging_the_policy_leaves_the_reward_out(tmp_path):
    # kills: the reward adapter merged into the model that is shipped
    base = save_base(tmp_path / "base")
    model = policy_on(base)
    adapter_on(model, save_reward_adapter(base, tmp_path / "reward"))
    model.merge_and_save(tmp_path / "merged")
    merged = make_model("llama", seed=1)
    merged.load_state_dict(type(merged).from_pretrained(tmp_path / "merged").state_dict())
    ids = torch.tensor([PROMPT_IDS[0] + COMPLETION_IDS[0]])
    with torch.no_grad():
        assert_close(merged(ids).logits, make_model("llama")(ids).logits, atol=1e-5, rtol=1e-5)


def test_layers_the_policy_does_not_adapt(tmp_path):
    # kills: reward weights dropped where the policy has no adapter
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward", target_modules="all-linear", r=2)
    scores = adapter_on(policy_on(base), folder)(PROMPT_IDS, COMPLETION_IDS)
    own = AutoPeftModelForSequenceClassification.from_pretrained(folder, num_labels=1).eval()
    with torch.no_grad():
        expected = own(input_ids=torch.tensor([PROMPT_IDS[0] + COMPLETION_IDS[0]])).logits.item()
    assert scores[0] == pytest.approx(expected, abs=1e-5)


def test_two_reward_adapters(tmp_path):
    # kills: the second overwriting the first
    base = save_base(tmp_path / "base")
    model = policy_on(base)
    folders = [save_reward_adapter(base, tmp_path / f"r{seed}", seed=seed) for seed in (1, 2)]
    first = adapter_on(model, folders[0])
    alone = first(PROMPT_IDS, COMPLETION_IDS)
    second = adapter_on(model, folders[1])
    assert [first.adapter, second.adapter] == ["reward", "reward_1"]
    assert first(PROMPT_IDS, COMPLETION_IDS) == alone
    assert second(PROMPT_IDS, COMPLETION_IDS) != alone


@pytest.mark.parametrize("num_labels", [2, 3])
def test_a_classifier_is_no_reward_adapter(num_labels, tmp_path):
    # kills: the first class taken for the reward
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward", num_labels=num_labels)
    with pytest.raises(ValueError, match=rf"one score head for one label, found \[\({num_labels}, 32\)\]"):
        adapter_on(policy_on(base), folder)


def test_an_adapter_without_score_head(tmp_path):
    # kills: a KeyError, or a random head
    base = save_base(tmp_path / "base")
    get_peft_model(make_model("llama"), make_lora("llama")).save_pretrained(tmp_path / "sft")
    with pytest.raises(ValueError, match="one score head for one label, found none"):
        adapter_on(policy_on(base), str(tmp_path / "sft"))


def test_an_adapter_that_does_not_fit(tmp_path):
    # kills: weights dropped in silence; the model must be left as it was
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward")
    config = json.loads((tmp_path / "reward/adapter_config.json").read_text())
    config["target_modules"] = ["q_proj"]
    (tmp_path / "reward/adapter_config.json").write_text(json.dumps(config))
    model = policy_on(base)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(ValueError, match=r"cannot be put on this policy.*do not fit the model in 4 tensors"):
        adapter_on(model, folder)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.pretrained_model.active_adapter == "default"


# Which of the two


def load(source, model, tokenizer):
    return load_reward_model(
        source, model, stop_token_ids=[0], batch_size=2, device=torch.device("cpu"), autocast=nullcontext
    )


def test_the_same_base_is_shared_another_is_loaded(tmp_path, tokenizer):
    # kills: every adapter put on the policy, or none
    base, other = save_base(tmp_path / "base"), save_base(tmp_path / "other", "qwen3")
    model = policy_on(base)
    assert isinstance(load(save_reward_adapter(base, tmp_path / "r1"), model, tokenizer), RewardAdapter)
    assert isinstance(load(save_reward_adapter(other, tmp_path / "r2"), model, tokenizer), RewardModel)
    whole = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    assert isinstance(load(str(tmp_path / "r1"), whole, tokenizer), RewardModel)


def test_an_adapter_by_itself_scores_like_on_the_shared_base(tmp_path, tokenizer):
    # kills: another text, another end, another position than the ids have
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward")
    texts = ["The quick brown", "She sells"]
    prompt_ids = [tokenizer(text)["input_ids"] for text in texts]
    completions = [" fox jumps.", " sea shells"]
    completion_ids = [tokenizer(completions[0])["input_ids"] + [0], tokenizer(completions[1])["input_ids"]]
    shared = load(folder, policy_on(base), tokenizer)(prompt_ids, completion_ids)
    alone = load(folder, AutoModelForCausalLMWithValueHead.from_pretrained(base), tokenizer)
    assert_close(alone(texts, completions, completion_ids), shared, atol=1e-5, rtol=1e-5)


# Of its own


def save_classifier(folder, num_labels=1, pad_token=None):
    base = save_base(folder.parent / f"{folder.name}-base")
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(base, num_labels=num_labels)
    network.config.pad_token_id = None
    network.save_pretrained(folder)
    tokenizer = make_tokenizer()
    if pad_token is None:
        tokenizer.pad_token = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_model_of_its_own_reads_text_and_end_token(tmp_path, tokenizer):
    # kills: the completion alone, left padding, no end token after a completion that ended, one after a cut one
    folder = save_classifier(tmp_path / "rm")
    reward = load(folder, policy_on(save_base(tmp_path / "base")), tokenizer)
    reward._tokenizer.pad_token = "<eos>"
    network = reward._model
    network.config.pad_token_id = 299  # so that the end token is read
    seen = []
    hook = network.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    reward(["The quick", "She"], [" brown fox", " sells"], [[1, 2, 0], [3]])
    hook.remove()
    long = tokenizer("The quick brown fox<eos>")["input_ids"]
    short = tokenizer("She sells")["input_ids"]
    assert seen[0]["input_ids"][0].tolist() == long
    assert seen[0]["input_ids"][1, : len(short)].tolist() == short
    assert seen[0]["attention_mask"].sum(-1).tolist() == [len(long), len(short)]


def test_batches_of_a_model_of_its_own(tmp_path, tokenizer):
    # kills: padding read as the last token, rows of the last batch lost
    reward = load(save_classifier(tmp_path / "rm"), policy_on(save_base(tmp_path / "base")), tokenizer)
    prompts, completions = [*TEXTS, "a", "b"], [" x", " yy z", " dog", " sun", ""]
    ids = [[1]] * 5
    one_by_one = [reward(*sample)[0] for sample in zip([[p] for p in prompts], [[c] for c in completions],
                                                       [[i] for i in ids], strict=True)]  # fmt: skip
    assert_close(reward(prompts, completions, ids), one_by_one, atol=1e-5, rtol=1e-5)


def test_chats_are_rendered_by_the_reward_models_own_template(tmp_path, tokenizer):
    # kills: the policy's template, str() of messages, special tokens twice
    folder = save_classifier(tmp_path / "rm")
    reward = load(folder, policy_on(save_base(tmp_path / "base")), tokenizer)
    reward._tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text = reward._text([{"role": "user", "content": "Hi"}], [{"role": "assistant", "content": "Yo"}], True)
    assert text == "[user]Hi[assistant]Yo"


def test_a_template_that_writes_the_first_token_is_not_given_another(tmp_path, tokenizer):
    # kills: two BOS tokens before a chat, none before a text
    reward = load(save_classifier(tmp_path / "rm"), policy_on(save_base(tmp_path / "base")), tokenizer)
    begins = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    reward._tokenizer.backend_tokenizer.post_processor = begins
    reward._tokenizer.chat_template = "<eos>{% for m in messages %}{{ m.content }}{% endfor %}"
    seen = []
    reward._model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    reward([[{"role": "user", "content": "The quick"}]], [[{"role": "assistant", "content": " brown"}]], [[1]])
    reward(["The quick"], [" brown"], [[1]])
    assert seen[0]["input_ids"].tolist() == seen[1]["input_ids"].tolist()
    assert seen[0]["input_ids"][0].tolist().count(0) == 1


def test_sequence_classifier_object(tmp_path, tokenizer):
    # kills: an object taken for a function
    base = save_base(tmp_path / "base")
    network = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1)
    reward = load(network, policy_on(base), tokenizer)
    assert isinstance(reward, RewardModel)
    assert len(reward(["a", "b"], ["c", "d"], [[1], [2]])) == 2
    assert not any(p.requires_grad for p in network.parameters())


def test_more_labels_than_one_are_refused(tmp_path, tokenizer):
    # kills: logits[:, 0] of a classifier
    with pytest.raises(ValueError, match=r"'rm' has 2 labels.*wrap it in a function"):
        load(save_classifier(tmp_path / "rm", num_labels=2), policy_on(save_base(tmp_path / "base")), tokenizer)


def test_a_causal_lm_is_no_reward_model(tmp_path, tokenizer):
    # kills: a score head with random weights
    base = save_base(tmp_path / "base")
    with pytest.raises(ValueError, match=r"no trained reward model: it lacks the weights \['score.weight'\]"):
        load(base, policy_on(base), tokenizer)


def test_too_long_for_the_reward_model(tmp_path, tokenizer):
    # kills: an index error deep inside, or a text cut in silence
    reward = load(save_classifier(tmp_path / "rm"), policy_on(save_base(tmp_path / "base")), tokenizer)
    with pytest.raises(ValueError, match=r"completion 1 with its prompt has 129 tokens.*takes at most 128"):
        reward(["a", "b" * 100], ["c", "d" * 29], [[1], [2]])
    assert len(reward(["a", "b" * 100], ["c", "d" * 28], [[1], [2]])) == 2


# In the trainer


def chosen_and_rejected():
    return Dataset.from_list([{"prompt": t[:10], "chosen": " good.", "rejected": " bad bad"} for t in TEXTS] * 8)


def test_what_trl_trains_is_the_reward_on_one_base(tmp_path, tokenizer, config_factory):
    # kills: an adapter of RewardTrainer that cannot be loaded, scores that do not tell chosen from rejected
    base = save_base(tmp_path / "base")
    settings = RewardConfig(
        output_dir=str(tmp_path / "rm"), per_device_train_batch_size=8, max_steps=30, learning_rate=1e-2,
        report_to=[], use_cpu=True, logging_steps=30, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = RewardTrainer(
        base,
        settings,
        train_dataset=chosen_and_rejected(),
        peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
    trainer.save_model()
    ppo = PPOTrainer(
        base,
        [str(tmp_path / "rm"), lambda completions: [float(len(c)) for c in completions]],
        config_factory(reward_weights=[1.0, 0.01]),
        [{"prompt": text[:10]} for text in TEXTS],
        peft_config=make_lora("llama"),
    )
    reward = ppo.reward_funcs._funcs[0]
    assert isinstance(reward, RewardAdapter)
    prompt = tokenizer(TEXTS[0][:10])["input_ids"]
    good, bad = reward([prompt] * 2, [tokenizer(text)["input_ids"] for text in (" good.", " bad bad")])
    assert good > bad + 1
    metrics = ppo.train()
    assert {"reward/rm", "reward/rm_std", "reward/lambda", "reward/lambda_std"} <= set(metrics)
    assert metrics["score"] == pytest.approx(metrics["reward/rm"] + 0.01 * metrics["reward/lambda"], abs=1e-5)
    saved = PeftModel.from_pretrained(make_model("llama"), ppo.args.output_dir)
    assert list(saved.peft_config) == ["default"]


def test_reward_weights_do_not_move(tmp_path, config_factory):
    # kills: the reward adapter or its head among what is trained
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward")
    trainer = PPOTrainer(
        base, folder, config_factory(), [{"prompt": t[:10]} for t in TEXTS], peft_config=make_lora("llama")
    )
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if not p.requires_grad}
    assert any(".reward." in name for name in frozen)
    before = trainer.reward_funcs.fingerprints()
    trainer.train()
    now = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, now[name]) for name, p in frozen.items())
    assert trainer.reward_funcs.fingerprints() == before


def test_another_reward_model_is_another_run(tmp_path, config_factory):
    # kills: weights of reward models left out of a run's identity
    base = save_base(tmp_path / "base")
    folder = save_reward_adapter(base, tmp_path / "reward")
    data = [{"prompt": t[:10]} for t in TEXTS]

    def trainer(iterations):
        args = config_factory(num_iterations=iterations, save_every=1)
        return PPOTrainer(base, folder, args, data, peft_config=make_lora("llama"))

    trainer(1).train()
    trainer(2).train(resume_from_checkpoint=True)
    shutil.rmtree(folder)
    save_reward_adapter(base, tmp_path / "reward", seed=9)
    with pytest.raises(ValueError, match="reward models: not those of the checkpoint"):
        trainer(3).train(resume_from_checkpoint=True)
