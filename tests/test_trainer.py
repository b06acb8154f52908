"""The trainer as a whole: what must hold on every run, whatever the model."""

import copy
import gc
import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import LORA_TARGETS, TEXTS, make_lora, make_model
from peft import get_peft_model
from torch.testing import assert_close

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from rlhf_kit.callbacks import LOG_FILE

PROMPTS = [{"prompt": text[:n]} for text in TEXTS for n in (4, 9, 17)]  # 9 prompts, ragged


def count_vowels(completions, **kwargs):
    return [float(sum(c in "aeiou" for c in text)) for text in completions]


def make_trainer(args, tokenizer, *, family="llama", reward=count_vowels, dataset=PROMPTS, lora=True, **kwargs):
    model = kwargs.pop("model", None) or make_model(family, **kwargs.pop("model_overrides", {}))
    peft_config = make_lora(family, **kwargs.pop("lora_overrides", {})) if lora else None
    return PPOTrainer(model, reward, args, dataset, processing_class=tokenizer, peft_config=peft_config, **kwargs)


def tensor_hashes(named_tensors):
    return {name: hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for name, t in named_tensors}


def queries_of(trainer, count=8):
    return [torch.tensor(trainer.processing_class(PROMPTS[i % 9]["prompt"]).input_ids) for i in range(count)]


# Right before anything moved


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_nothing_moves_at_learning_rate_zero(family, tokenizer, config_factory):
    # kills: dropout left on in the loss pass, temperature missing in old or new log-probs, labels shifted by one
    dropout = {"gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}, "llama": {"attention_dropout": 0.1}}
    args = config_factory(learning_rate=0.0, ppo_epochs=4, temperature=0.7, num_iterations=1, micro_batch_size=2)
    trainer = make_trainer(
        args,
        tokenizer,
        family=family,
        model_overrides=dropout[family],
        lora_overrides={"lora_dropout": 0.1},
    )
    trainer.model.train()
    errors = watch_ratio_errors(trainer)
    metrics = trainer.train()
    assert len(errors) == 8  # 4 epochs x 2 mini-batches
    assert max(errors) < 1e-5
    assert metrics["approx_kl"] < 1e-10
    assert metrics["clip_fraction"] == 0
    assert metrics["ref_kl"] == 0
    assert metrics["kl_estimate"] == 0
    assert trainer.model.training  # the mode was given back


def watch_ratio_errors(trainer):
    errors = []
    backward = trainer.updater._backward

    def watched(*args):
        sums, error = backward(*args)
        errors.append(error)
        return sums, error

    trainer.updater._backward = watched
    return errors


def test_ratio_leaves_one_once_the_policy_moved(tokenizer, config_factory):
    # kills: old log-probs recomputed by the policy being updated
    trainer = make_trainer(config_factory(num_iterations=1, learning_rate=1e-2), tokenizer)
    errors = watch_ratio_errors(trainer)
    trainer.train()
    assert errors[0] < 1e-5
    assert errors[-1] > 1e-3


# What trains and what does not


@pytest.mark.parametrize("value_head", ["linear", "mlp"])
def test_twenty_iterations_train_adapters_and_head_and_leave_the_base(value_head, tokenizer, config_factory):
    # kills: base not frozen, value loss missing, adapters without gradient, a leak of rollouts or graphs
    args = config_factory(num_iterations=20, value_head=value_head, learning_rate=1e-2)
    trainer = make_trainer(args, tokenizer)
    named = dict(trainer.model.named_parameters())
    trainable = {name for name, p in named.items() if p.requires_grad}
    assert any("lora_" in name for name in trainable)
    assert all("lora_" in name or name.startswith("v_head.") for name in trainable)
    before = tensor_hashes(named.items())
    live = []

    def count_tensors(completions, **kwargs):
        if trainer.state.iteration in (3, 18):
            gc.collect()
            live.append(sum(o.numel() for o in gc.get_objects() if type(o) is torch.Tensor))
        return count_vowels(completions)

    trainer.reward_funcs._funcs[0] = count_tensors
    trainer.train()
    after = tensor_hashes(named.items())
    changed = {name for name in named if before[name] != after[name]}
    assert changed == trainable
    assert live[1] <= 1.02 * live[0]  # elements held by tensors do not grow


def test_full_fine_tuning_moves_the_policy_and_not_the_reference(tokenizer, config_factory):
    # kills: reference sharing storage with the policy
    trainer = make_trainer(config_factory(num_iterations=3, learning_rate=1e-3), tokenizer, lora=False)
    reference = tensor_hashes(trainer.model.ref_model.named_parameters())
    policy = tensor_hashes(trainer.model.pretrained_model.named_parameters())
    metrics = trainer.train()
    assert tensor_hashes(trainer.model.ref_model.named_parameters()) == reference
    moved = tensor_hashes(trainer.model.pretrained_model.named_parameters())
    assert all(moved[name] != policy[name] for name in policy)
    assert metrics["ref_kl"] > 0


def test_own_reference_model_is_used(tokenizer, config_factory):
    # kills: ref_model ignored
    other = make_model("llama", seed=7)
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer, ref_model=other)
    assert trainer.train()["ref_kl"] > 0.01
    assert not any(p.requires_grad for p in other.parameters())


# Learning


def test_learns_a_toy_reward(tokenizer, config_factory):
    # kills: sign of the policy loss, sign of the advantage, score put on the wrong token
    args = config_factory(
        num_iterations=40,
        rollout_batch_size=32,
        mini_batch_size=16,
        micro_batch_size=32,
        learning_rate=1e-2,
        kl_coef=0.0,
    )

    def share_of_e(completions, **kwargs):
        return [text.count("e") / max(len(text), 1) for text in completions]

    trainer = make_trainer(args, tokenizer, reward=share_of_e)
    trainer.train()
    scores = [log["score"] for log in trainer.state.log_history]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.2


def test_large_kl_coefficient_in_the_loss_keeps_the_starting_model(tokenizer, config_factory):
    # kills: KL loss with the wrong sign or without weight
    args = config_factory(
        num_iterations=15, rollout_batch_size=16, mini_batch_size=16, micro_batch_size=16, ppo_epochs=4,
        kl_placement="loss", kl_estimator="full", kl_coef=1000.0, learning_rate=3e-4,
    )  # fmt: skip
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    assert trainer.evaluate(PROMPTS)["eval_ref_kl"] < 1e-3


def test_without_kl_penalty_the_score_climbs_and_the_text_leaves_the_reference(tokenizer, config_factory):
    # kills: kl_coef ignored
    logs = {}
    for kl_coef in (0.0, 50.0):
        args = config_factory(
            output_dir=config_factory().output_dir + str(kl_coef), num_iterations=30, rollout_batch_size=32,
            mini_batch_size=16, micro_batch_size=32, learning_rate=4e-3, kl_coef=kl_coef,
        )  # fmt: skip
        trainer = make_trainer(args, tokenizer)
        trainer.train()
        logs[kl_coef] = trainer.state.log_history
    assert logs[0.0][-1]["score"] > logs[0.0][0]["score"] + 0.5
    assert logs[0.0][-1]["ref_kl"] > 5 * logs[50.0][-1]["ref_kl"]


# Batches


def make_rollout(trainer):
    queries = queries_of(trainer, trainer.args.rollout_batch_size)
    captured = {}
    trainer.updater, real = (
        (lambda rollout, targets, **kw: captured.update(r=rollout, t=targets) or real(rollout, targets, **kw)),
        trainer.updater,
    )
    trainer.step(queries, trainer.generate(queries), [float(i % 3) for i in range(len(queries))])
    trainer.updater = real
    return captured["r"], captured["t"]


def gradients(trainer, rollout, targets, rows):
    trainer.updater.optimizer.zero_grad()
    tokens = int(rollout.completion_mask[rows].sum())
    trainer.updater._backward(rollout, targets, rows, 0.1, tokens)
    return {name: p.grad.clone() for name, p in trainer.model.trainable_parameters()}


@pytest.mark.parametrize("overrides", [{}, {"kl_placement": "loss", "kl_estimator": "full", "entropy_coef": 0.01}])
def test_micro_batch_size_does_not_change_a_gradient(overrides, tokenizer, config_factory):
    # kills: loss averaged per micro-batch instead of divided by the mini-batch's tokens
    trainer = make_trainer(config_factory(learning_rate=1e-2, **overrides), tokenizer, family="gpt2")
    rollout, targets = make_rollout(trainer)
    rows = torch.tensor([5, 0, 3, 6, 1])
    trainer.args.micro_batch_size = 5
    whole = gradients(trainer, rollout, targets, rows)
    trainer.args.micro_batch_size = 1
    single = gradients(trainer, rollout, targets, rows)
    trainer.args.micro_batch_size = 3
    uneven = gradients(trainer, rollout, targets, rows)
    for name in whole:
        assert_close(single[name], whole[name], atol=1e-5, rtol=1e-4)
        assert_close(uneven[name], whole[name], atol=1e-5, rtol=1e-4)
    assert max(float(g.abs().max()) for g in whole.values()) > 1e-3


def test_gradient_checkpointing_does_not_change_a_gradient(tokenizer, config_factory):
    # kills: checkpointed layers recomputed with dropout, or not connected to the loss
    trainer = make_trainer(config_factory(learning_rate=1e-2), tokenizer, model_overrides={"attention_dropout": 0.2})
    rollout, targets = make_rollout(trainer)
    rows = torch.arange(8)
    plain = gradients(trainer, rollout, targets, rows)
    trainer.model.train()
    trainer.args.gradient_checkpointing = True
    recomputed = gradients(trainer, rollout, targets, rows)
    for name in plain:
        assert_close(recomputed[name], plain[name], atol=1e-6, rtol=1e-5)


def test_seven_prompts_rollout_four_mini_batch_three(tokenizer, config_factory):
    # kills: dropping the last mini-batch, dropping prompts at the end of a pass
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.extend(prompts)
        return count_vowels(completions)

    args = config_factory(rollout_batch_size=4, mini_batch_size=3, num_iterations=7, ppo_epochs=1)
    trainer = make_trainer(args, tokenizer, reward=reward, dataset=PROMPTS[:7])
    trainer.train()
    assert len(seen) == 28
    assert {prompt: seen.count(prompt) for prompt in seen} == {row["prompt"]: 4 for row in PROMPTS[:7]}
    assert trainer.state.global_step == 7 * 2


def test_several_completions_per_prompt_are_neighbours_and_differ(tokenizer, config_factory):
    # kills: prompts not repeated, the same random numbers for each repetition
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(list(zip(prompts, completions, strict=True)))
        return count_vowels(completions)

    trainer = make_trainer(config_factory(num_completions_per_prompt=4, num_iterations=1), tokenizer, reward=reward)
    trainer.train()
    (rows,) = seen
    assert [prompt for prompt, _ in rows[:4]] == [rows[0][0]] * 4
    assert rows[4][0] != rows[0][0]
    assert len({completion for _, completion in rows[:4]}) > 1


# Reproducible


def test_same_seed_gives_the_same_run_to_the_last_bit_and_another_seed_another(tokenizer, config_factory, tmp_path):
    # kills: sampling from the global generator, shuffle without seed
    runs = []
    for i, seed in enumerate((3, 3, 4)):
        torch.manual_seed(i)
        trainer = make_trainer(config_factory(output_dir=str(tmp_path / str(i)), seed=seed), tokenizer)
        trainer.train()
        weights = {name: p.detach().clone() for name, p in trainer.model.trainable_parameters()}
        runs.append(([log["score"] for log in trainer.state.log_history], weights))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
    assert not all(torch.equal(runs[0][1][name], runs[2][1][name]) for name in runs[0][1])


def test_training_leaves_the_global_random_state_alone(tokenizer, config_factory):
    # kills: torch.manual_seed outside fork_rng
    trainer = make_trainer(config_factory(), tokenizer)
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    trainer.train()
    assert_close(torch.rand(3), expected)


# Degenerate input


@pytest.mark.parametrize(
    ("name", "overrides", "reward"),
    [
        ("all scores equal", {}, lambda completions: [1.0] * len(completions)),
        (
            "one-token batch",
            {"rollout_batch_size": 1, "mini_batch_size": 1, "max_completion_length": 1},
            lambda completions: [1.0],
        ),
        ("huge scores", {"kl_coef": 0.0}, lambda completions: [1e8 * len(c) for c in completions]),
        ("equal scores, scaled", {"scale_scores": True, "clip_scores": 1.0}, lambda completions: [2.0] * 8),
        ("whitened rewards", {"whiten_rewards": True, "missing_eos_penalty": 1.0}, count_vowels),
        (
            "no whitening, no clipping",
            {"whiten_advantages": False, "value_clip_range": None, "max_grad_norm": None},
            count_vowels,
        ),
    ],
)  # fmt: skip
def test_degenerate_batches_stay_finite_and_still_train(name, overrides, reward, tokenizer, config_factory):
    # kills: division by a zero variance, silently skipped update
    trainer = make_trainer(config_factory(num_iterations=3, **overrides), tokenizer, reward=reward)
    before = {n: p.detach().clone() for n, p in trainer.model.trainable_parameters()}
    metrics = trainer.train()
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert metrics["skipped_steps"] == 0
    after = dict(trainer.model.trainable_parameters())
    assert any(not torch.equal(before[n], after[n]) for n in before)


def test_end_token_at_once(tokenizer, config_factory):
    # kills: mask from comparing ids with pad (pad is EOS here), empty text breaking the reward
    model = make_model("llama")
    head = torch.nn.Linear(32, 300)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[0] = 1e4
    model.lm_head = head
    texts = []

    def reward(completions, completion_ids, **kwargs):
        texts.extend(completions)
        assert all(ids == [0] for ids in completion_ids)
        return [0.5] * len(completions)

    trainer = make_trainer(config_factory(), tokenizer, model=model, reward=reward)
    metrics = trainer.train()
    assert set(texts) == {""}
    assert metrics["completion_length"] == 1
    assert metrics["eos_rate"] == 1
    assert all(math.isfinite(value) for value in metrics.values())


def test_prompt_that_contains_the_end_token(tokenizer, config_factory):
    # kills: attention mask from comparing ids with pad
    trainer = make_trainer(
        config_factory(num_iterations=1), tokenizer, dataset=[{"prompt": "a<eos>b<eos>"}, PROMPTS[0]]
    )
    rollouts = []
    learn = trainer._learn
    trainer._learn = lambda rollout: rollouts.append(rollout) or learn(rollout)
    trainer.train()
    (rollout,) = rollouts
    with_end = (rollout.prompt_ids == 0) & rollout.prompt_mask
    assert with_end.sum(-1).max() == 2


def test_policy_with_nothing_to_train_is_refused(tokenizer, config_factory):
    # kills: training an adapter that was loaded frozen, a silent no-op
    model = get_peft_model(make_model("llama"), make_lora("llama"))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        make_trainer(config_factory(), tokenizer, model=model, lora=False)


def test_training_starts_at_kl_zero_from_a_trained_adapter(tokenizer, config_factory):
    # kills: reference silently the bare base
    model = get_peft_model(make_model("llama"), make_lora("llama"))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_()
    trainer = make_trainer(config_factory(learning_rate=1e-2), tokenizer, model=model, lora=False)
    reference = {n: p.clone() for n, p in trainer.model.named_parameters() if ".reference." in n}
    trainer.train()
    first, last = trainer.state.log_history[0], trainer.state.log_history[-1]
    assert first["ref_kl"] == 0
    assert last["ref_kl"] > 0
    parameters = dict(trainer.model.named_parameters())
    assert reference
    assert all(torch.equal(parameters[name], p) for name, p in reference.items())
    assert not (Path(trainer.args.output_dir) / "reference").exists()


def test_float16_weights_are_refused(tokenizer, config_factory):
    # kills: check of trainable dtypes dropped
    with pytest.raises(ValueError, match="float16"):
        make_trainer(config_factory(), tokenizer, model=make_model("llama").half(), lora=False)


# Never a non-finite step


def poisoned(trainer, iterations):
    """Make the value head's output NaN in the loss pass of the given iterations."""
    score = trainer.model.score

    def poisoned_score(*args, **kwargs):
        logits, values = score(*args, **kwargs)
        if torch.is_grad_enabled() and trainer.state.iteration in iterations:
            values = values * float("nan")
        return logits, values

    trainer.model.score = poisoned_score


def test_non_finite_losses_never_reach_the_weights(tokenizer, config_factory):
    # kills: optimizer step on a NaN gradient, count not reset by a sound iteration
    trainer = make_trainer(config_factory(num_iterations=6), tokenizer)
    poisoned(trainer, {0, 1, 3, 4})
    trainer.train()
    assert [log["skipped_steps"] for log in trainer.state.log_history] == [4, 4, 0, 4, 4, 0]
    assert all(p.isfinite().all() for _, p in trainer.model.trainable_parameters())


def test_three_non_finite_iterations_in_a_row_end_the_run_with_a_reason(tokenizer, config_factory):
    # kills: endless silent no-op
    trainer = make_trainer(config_factory(num_iterations=6), tokenizer)
    before = {n: p.detach().clone() for n, p in trainer.model.trainable_parameters()}
    poisoned(trainer, range(6))
    with pytest.raises(RuntimeError, match="3 iterations in a row"):
        trainer.train()
    assert trainer.state.iteration == 3
    assert all(torch.equal(before[n], p) for n, p in trainer.model.trainable_parameters())


# Errors of reward functions come before any change


@pytest.mark.parametrize(
    ("reward", "error", "match"),
    [
        (lambda completions: [0.0], ValueError, "returned 1 rewards for 8"),
        (lambda completions: [float("nan")] * 8, ValueError, "completion 0"),
        (lambda completions: [None] * 8, ValueError, "None"),
        (lambda completions: 1 / 0, ZeroDivisionError, "division"),
    ],
)
def test_bad_rewards_stop_the_run_before_any_weight_changes(reward, error, match, tokenizer, config_factory):
    # kills: update before the scores are checked
    trainer = make_trainer(config_factory(), tokenizer, reward=reward)
    before = {n: p.detach().clone() for n, p in trainer.model.trainable_parameters()}
    with pytest.raises(error, match=match):
        trainer.train()
    assert all(torch.equal(before[n], p) for n, p in trainer.model.trainable_parameters())
    assert trainer.state.iteration == 0


# step and generate


def test_step_loop_trains_like_train(tokenizer, config_factory, tmp_path):
    # kills: step skipping the KL penalty, the critic or the reference
    by_train = make_trainer(config_factory(num_iterations=1, output_dir=str(tmp_path / "a")), tokenizer)
    recorded = []
    learn = by_train._learn
    by_train._learn = lambda rollout: recorded.append(rollout) or learn(rollout)
    by_train.train()
    rollout = recorded[0]
    queries = [ids[mask] for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    responses = [ids[mask] for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]

    by_step = make_trainer(
        config_factory(num_iterations=1, output_dir=str(tmp_path / "b")), tokenizer, reward=None, dataset=None
    )
    by_step.step(queries, responses, list(rollout.scores))
    for (name, a), (_, b) in zip(
        by_train.model.trainable_parameters(), by_step.model.trainable_parameters(), strict=True
    ):
        assert torch.equal(a, b), name


def test_step_takes_scores_per_token(tokenizer, config_factory, tmp_path):
    # kills: numbers per token summed onto the last one, or shifted
    def trainer_in(folder, reward, **parts):
        args = config_factory(num_iterations=1, output_dir=str(tmp_path / folder))
        return make_trainer(args, tokenizer, reward=reward, **parts)

    recorded = []
    by_train = trainer_in("a", lambda completion_ids: [[0.1 * i for i in ids] for ids in completion_ids])
    learn = by_train._learn
    by_train._learn = lambda rollout: recorded.append(rollout) or learn(rollout)
    by_train.train()
    rollout = recorded[0]
    queries = [ids[mask] for ids, mask in zip(rollout.prompt_ids, rollout.prompt_mask, strict=True)]
    responses = [ids[mask] for ids, mask in zip(rollout.completion_ids, rollout.completion_mask, strict=True)]
    by_step, by_sum = trainer_in("b", None, dataset=None), trainer_in("c", None, dataset=None)
    by_step.step(queries, responses, [[0.1 * int(i) for i in ids] for ids in responses])
    by_sum.step(queries, responses, list(rollout.scores))
    pairs = list(zip(*(t.model.trainable_parameters() for t in (by_train, by_step, by_sum)), strict=True))
    assert all(torch.equal(a, b) for (_, a), (_, b), _ in pairs)
    assert not all(torch.equal(a, c) for (_, a), _, (_, c) in pairs)


def test_generate_gives_completions_without_prompt_or_padding(tokenizer, config_factory):
    # kills: prompt returned too, padding returned too
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    queries = queries_of(trainer)
    responses = trainer.generate(queries)
    assert len(responses) == 8
    for response in responses:
        ended = (response == 0).nonzero()
        assert len(ended) == 0 or int(ended[0]) == len(response) - 1
        assert 1 <= len(response) <= 6


@pytest.mark.parametrize(
    ("break_it", "match"),
    [
        (lambda q, r, s: (q[:3], r[:3], s[:3]), "share of rollout_batch_size=8 is 8"),
        (lambda q, r, s: (q, r, s[:5]), "5 scores were given for 8"),
        (lambda q, r, s: (q, r, [*s[:7], float("inf")]), r"scores\[7\] is inf"),
        (lambda q, r, s: (q, [*r[:7], torch.tensor([], dtype=torch.long)], s), r"responses\[7\]"),
        (lambda q, r, s: ([x[None] for x in q], r, s), r"queries\[0\]"),
        (lambda q, r, s: (q, [x.float() for x in r], s), r"responses\[0\]"),
        (lambda q, r, s: (q, [r[0] + 1000, *r[1:]], s), r"responses\[0\]"),
        (lambda q, r, s: (q, r, [*s[:2], None, *s[3:]]), r"scores\[2\] is None: a score must be a finite number"),
        (lambda q, r, s: (q, r, ["1.0"] * 8), r"scores\[0\] is '1.0'"),
        (lambda q, r, s: (q, r, "12345678"), "scores must hold one number per response, 8 here, got '12345678'"),
        (lambda q, r, s: (q, r, torch.ones(8, 9)), r"scores\[0\] holds 9 numbers for the \d tokens of responses\[0\]"),
        (lambda q, r, s: (q, r, torch.ones(8, 2, 1)), r"scores\[0\] is tensor"),
        (lambda q, r, s: (q, r, [1e30] * 8), "of at most 1e"),
        (lambda q, r, s: ({"input_ids": q}, r, s), "queries must be a list with the token ids of one text each"),
        (lambda q, r, s: (q, [[1, None]] * 8, s), r"responses\[0\] holds no token ids but \[1, None\]"),
    ],
)
def test_step_refuses_bad_input_before_any_weight_changes(break_it, match, tokenizer, config_factory):
    # kills: each check of step
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    queries = queries_of(trainer)
    good = (queries, trainer.generate(queries), [1.0] * 8)
    before = {n: p.detach().clone() for n, p in trainer.model.trainable_parameters()}
    with pytest.raises(ValueError, match=match):
        trainer.step(*break_it(*good))
    assert all(torch.equal(before[n], p) for n, p in trainer.model.trainable_parameters())


def test_step_beyond_num_iterations_is_refused(tokenizer, config_factory):
    # kills: training on at a learning rate of 0
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer, reward=None, dataset=None)
    queries = queries_of(trainer)
    responses = trainer.generate(queries)
    trainer.step(queries, responses, [1.0] * 8)
    with pytest.raises(ValueError, match="num_iterations=1"):
        trainer.step(queries, responses, [1.0] * 8)


# The update


def test_early_stop_on_approximate_kl(tokenizer, config_factory):
    # kills: max_approx_kl ignored, schedule losing steps
    args = config_factory(
        num_iterations=2, ppo_epochs=20, learning_rate=3e-2, max_approx_kl=1e-4, lr_scheduler_type="linear"
    )
    trainer = make_trainer(args, tokenizer)
    metrics = trainer.train()
    assert metrics["stopped_early"] == 1
    assert 1 <= metrics["optimizer_steps"] < 40
    assert trainer.updater.lr_scheduler.get_last_lr() == [0.0, 0.0]


def test_learning_rates_follow_the_schedule(tokenizer, config_factory):
    # kills: warm-up ignored, value_learning_rate ignored, schedule stepped per epoch
    args = config_factory(
        num_iterations=4, lr_scheduler_type="linear", warmup_iterations=2, learning_rate=1e-3, value_learning_rate=4e-3
    )
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history]  # of the last of 4 steps
    assert_close(rates, [1e-3 * 3 / 8, 1e-3 * 7 / 8, 1e-3 * 5 / 8, 1e-3 * 1 / 8])
    assert_close([log["value_learning_rate"] for log in trainer.state.log_history], [4 * rate for rate in rates])


@pytest.mark.parametrize(("target_kl", "grows"), [(1e-9, True), (1e9, False)])
def test_adaptive_coefficient_follows_the_measured_kl(target_kl, grows, tokenizer, config_factory):
    # kills: controller fed with the wrong sign or not at all
    args = config_factory(num_iterations=4, learning_rate=1e-2, target_kl=target_kl, kl_horizon=80)
    trainer = make_trainer(args, tokenizer)
    trainer.train()
    coefs = [log["kl_coef"] for log in trainer.state.log_history]
    factor = 1.02 if grows else 0.98
    assert coefs[0] == 0.05
    assert_close(coefs[3] / coefs[2], factor)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_kl_placement_decides_where_the_penalty_goes(placement, tokenizer, config_factory):
    # kills: penalty in both places, or in none
    args = config_factory(
        kl_placement=placement, kl_estimator="full", kl_coef=0.3, learning_rate=1e-2, num_iterations=3
    )
    trainer = make_trainer(args, tokenizer)
    metrics = trainer.train()
    penalty = metrics["score"] - metrics["reward_per_completion"]
    if placement == "reward":
        assert_close(penalty, 0.3 * metrics["ref_kl_per_completion"], atol=1e-5, rtol=1e-4)
        assert penalty > 0
        assert "kl_loss" not in metrics
    else:
        assert abs(penalty) < 1e-6
        assert metrics["kl_loss"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "full"])
def test_every_estimator_in_the_reward(estimator, tokenizer, config_factory):
    # kills: kl_estimator ignored in the reward
    from rlhf_kit.functional import estimate_kl

    trainer = make_trainer(config_factory(kl_estimator=estimator, learning_rate=1e-2, num_iterations=2), tokenizer)
    rollouts = []
    learn = trainer._learn
    trainer._learn = lambda rollout: rollouts.append(rollout) or learn(rollout)
    trainer.train()
    last = rollouts[-1]
    expected = last.ref_kl if estimator == "full" else estimate_kl(last.old_logprobs, last.ref_logprobs, estimator)
    assert_close(last.kl, expected)
    assert last.kl.abs().max() > 0


def test_score_shaping_in_its_order(tokenizer, config_factory):
    # kills: penalty after scaling, clip before scaling, raw score logged after shaping
    args = config_factory(
        missing_eos_penalty=3.0, scale_scores=True, clip_scores=0.5, kl_coef=0.0, num_iterations=1, learning_rate=0.0
    )
    trainer = make_trainer(args, tokenizer)
    rollout, targets = make_rollout(trainer)
    raw = torch.tensor([float(i % 3) for i in range(8)])
    shaped = torch.where(rollout.ended, raw, raw - 3.0)
    expected = (shaped / shaped.std(correction=0)).clamp(-0.5, 0.5)
    assert_close(targets.rewards.sum(-1), expected)
    assert_close(trainer.state.log_history[0]["score"], float(raw.mean()))


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"top_k": 5}, "top_k=5"),
        ({"top_p": 0.9}, r"top_p=0\.9"),
        ({"kl_estimator": "full"}, "'full' in the reward"),
        ({"kl_estimator": "k2"}, "'k2' in the reward"),
        ({"kl_estimator": "k3"}, "'k3' in the reward"),
        ({"kl_estimator": "k3", "kl_placement": "loss"}, "'k3' in the loss"),
    ],
)
def test_settings_that_bias_the_gradient_warn_once(overrides, match, tokenizer, config_factory):
    # kills: a warning dropped, or repeated every iteration
    with pytest.warns(UserWarning, match=match) as record:
        make_trainer(config_factory(num_iterations=1, **overrides), tokenizer).train()
    assert sum(w.category is UserWarning for w in record) == 1


# Saving, logging, evaluating


def test_trained_model_is_saved_and_loads(tokenizer, config_factory, tmp_path):
    # kills: value head or tokenizer not saved
    make_model("llama").save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    args = config_factory(learning_rate=1e-2)
    trainer = PPOTrainer(str(tmp_path / "base"), count_vowels, args, PROMPTS, peft_config=make_lora("llama"))
    trainer.train()
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(args.output_dir)
    ids = torch.tensor([tokenizer(TEXTS[0]).input_ids])
    for mine, theirs in zip(trainer.model(ids), loaded(ids), strict=True):
        if mine is not None:
            assert_close(mine, theirs, atol=0, rtol=0)
    assert (tmp_path / "run" / "tokenizer.json").exists()


def test_log_is_complete_and_strict_json(tokenizer, config_factory, tmp_path):
    # kills: NaN in the log, a metric of the list missing
    trainer = make_trainer(config_factory(), tokenizer)
    trainer.train()
    lines = (tmp_path / "run" / LOG_FILE).read_text().splitlines()
    logs = [json.loads(line, parse_constant=lambda c: pytest.fail(f"{c} in the log")) for line in lines]
    assert [log["iteration"] for log in logs] == [1, 2]
    wanted = {
        "score", "score_std", "ref_kl", "ref_kl_per_completion", "entropy", "approx_kl", "clip_fraction",
        "value_clip_fraction", "explained_variance", "value_loss", "policy_loss", "completion_length", "eos_rate",
        "learning_rate", "kl_coef", "tokens_per_second", "grad_norm", "initial_ratio_error", "episodes", "global_step",
    }  # fmt: skip
    assert wanted <= set(logs[0])


def test_evaluation_repeats_itself_and_changes_nothing(tokenizer, config_factory):
    # kills: evaluation drawing new random numbers, training on evaluation prompts
    trainer = make_trainer(config_factory(), tokenizer, eval_dataset=PROMPTS[:3])
    before = {n: p.detach().clone() for n, p in trainer.model.trainable_parameters()}
    first, second = trainer.evaluate(), trainer.evaluate()
    assert first == second
    assert first["eval_ref_kl"] == 0
    assert all(torch.equal(before[n], p) for n, p in trainer.model.trainable_parameters())
    assert trainer.state.iteration == 0


def test_evaluations_come_before_between_and_after(tokenizer, config_factory):
    # kills: eval_every ignored, no evaluation of the starting model
    for every, expected in ((None, [0, 5]), (2, [0, 2, 4, 5])):
        args = config_factory(output_dir=config_factory().output_dir + str(every), num_iterations=5, eval_every=every)
        trainer = make_trainer(args, tokenizer, eval_dataset=PROMPTS[:10])
        trainer.train()
        assert [log["iteration"] for log in trainer.state.log_history if "eval_score" in log] == expected


@pytest.mark.parametrize("save_every", [None, 1])
def test_output_dir_of_another_run_is_refused_and_left_alone(save_every, tokenizer, config_factory, tmp_path):
    # kills: overwriting or mixing logs, also where the run could be resumed and is not
    args = config_factory(num_iterations=1, save_every=save_every)
    make_trainer(args, tokenizer).train()
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="already holds"):
        make_trainer(args, tokenizer).train()
    if save_every:
        trainer = make_trainer(args, tokenizer, eval_dataset=[{"prompt": "The"}])
        queries = [torch.tensor([5, 6])] * 8
        for write in (trainer.evaluate, trainer.save_checkpoint, lambda: trainer.step(queries, queries, [1.0] * 8)):
            with pytest.raises(ValueError, match=r"already holds.*resume_from_checkpoint=True"):
                write()
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_model_with_value_head_is_used_as_it_is(tokenizer, config_factory):
    # kills: a second head made, settings for loading silently ignored
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model("llama"), peft_config=make_lora("llama"), value_head="mlp"
    )
    with pytest.raises(ValueError, match="value_head='mlp'"):
        make_trainer(config_factory(), tokenizer, model=model, lora=False)
    with pytest.raises(ValueError, match="dtype"):
        make_trainer(config_factory(value_head="mlp", dtype="bfloat16"), tokenizer, model=model, lora=False)
    trainer = make_trainer(config_factory(value_head="mlp"), tokenizer, model=model, lora=False)
    assert trainer.model is model


def test_the_config_is_not_changed(tokenizer, config_factory):
    # kills: derived sizes written back into the user's config
    args = config_factory()
    before = copy.deepcopy(args)
    make_trainer(args, tokenizer).train()
    assert args == before


def test_chat_prompts_reach_rewards_as_messages(tokenizer, config_factory):
    # kills: completions of chats given as bare text, template markers in the text
    chat_tokenizer = copy.deepcopy(tokenizer)
    chat_tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    dataset = [{"prompt": [{"role": "user", "content": text[:8]}], "answer": i} for i, text in enumerate(TEXTS)]
    seen = []

    def reward(prompts, completions, completion_ids, answer, **kwargs):
        for prompt, completion, number in zip(prompts, completions, answer, strict=True):
            assert prompt == dataset[number]["prompt"]
            assert [message["role"] for message in completion] == ["assistant"]
        seen.extend(completions)
        return [float(number) for number in answer]

    trainer = make_trainer(config_factory(num_iterations=1), chat_tokenizer, reward=reward, dataset=dataset)
    trainer.train()
    assert len(seen) == 8


def test_lora_targets_exist_for_every_family():
    # kills: a family added without targets
    assert set(LORA_TARGETS) >= {"gpt2", "opt", "gpt_neox", "llama", "qwen3", "gemma3"}


def test_missing_parts_are_named(tokenizer, config_factory):
    # kills: None called as a function
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    with pytest.raises(ValueError, match="train_dataset"):
        trainer.train()
    with pytest.raises(ValueError, match="eval_dataset"):
        trainer.evaluate()
    with pytest.raises(ValueError, match="eval_every"):
        make_trainer(config_factory(eval_every=2), tokenizer)
    with pytest.raises(ValueError, match="reward_weights"):
        make_trainer(config_factory(reward_weights=[1.0]), tokenizer, reward=None)
    assert PPOConfig().reward_weights is None


# Found by breaking it


@pytest.mark.parametrize("lora", [False, True])
def test_reference_that_shares_weights_with_the_policy_is_refused(lora, tokenizer, config_factory):
    # kills: freezing the reference freezing the policy, a reference KL that is 0 for ever
    base = make_model("llama")
    with pytest.raises(ValueError, match="shares weights"):
        make_trainer(config_factory(), tokenizer, model=base, ref_model=base, lora=lora)


def test_bfloat16_weights_are_not_trained_directly(tokenizer, config_factory):
    # kills: full fine-tuning in which most updates are rounded away
    with pytest.raises(ValueError, match=r"bfloat16.*float32"):
        make_trainer(config_factory(), tokenizer, model=make_model("llama").to(torch.bfloat16), lora=False)
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer, model=make_model("llama").to(torch.bfloat16))
    assert all(p.dtype == torch.float32 for _, p in trainer.model.trainable_parameters())
    assert math.isfinite(trainer.train()["loss"])


def test_reference_given_to_the_model_is_kept(tokenizer, config_factory):
    # kills: an own reference replaced by a copy of the policy without a word
    other = make_model("llama", seed=7)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(make_model("llama"))
    model.create_reference(other)
    trainer = make_trainer(config_factory(num_iterations=1), tokenizer, model=model, lora=False)
    assert trainer.model.ref_model is other
    assert trainer.train()["ref_kl"] > 0.01


def test_an_exception_in_the_update_leaves_no_gradient_and_no_lost_time(tokenizer, config_factory, tmp_path):
    # kills: half a gradient used by the next step, a schedule that runs ahead of the iterations
    runs = []
    for broken in (False, True):
        args = config_factory(output_dir=str(tmp_path / str(broken)), num_iterations=3, lr_scheduler_type="linear")
        trainer = make_trainer(args, tokenizer)
        if broken:
            score, calls = trainer.model.score, []

            def failing(*args, _score=score, _calls=calls, **kwargs):
                _calls.append(torch.is_grad_enabled())
                if sum(_calls) == 6:  # in the third mini-batch's second micro-batch
                    raise KeyboardInterrupt
                return _score(*args, **kwargs)

            trainer.model.score = failing
            with pytest.raises(KeyboardInterrupt):
                trainer.train()
            trainer.model.score = score
        trainer.train()
        runs.append([log["learning_rate"] for log in trainer.state.log_history])
        assert all(p.grad is None for _, p in trainer.model.trainable_parameters())
    assert_close(runs[0], runs[1])


def test_gradients_left_on_the_model_do_not_enter_the_first_step(tokenizer, config_factory, tmp_path):
    # kills: zero_grad after the step only
    norms = []
    for dirty in (False, True):
        trainer = make_trainer(config_factory(output_dir=str(tmp_path / str(dirty)), num_iterations=1), tokenizer)
        if dirty:
            for _, p in trainer.model.trainable_parameters():
                p.grad = torch.full_like(p, 5.0)
        norms.append(trainer.train()["grad_norm"])
    assert norms[0] == norms[1]


def test_whitened_rewards_keep_their_mean_and_equal_rewards_stay(tokenizer, config_factory):
    # kills: division by a zero variance, the mean scaled too
    args = config_factory(max_completion_length=1, whiten_rewards=True, kl_coef=0.0, learning_rate=0.0)
    metrics = make_trainer(args, tokenizer, reward=lambda completions: [1.0] * 8).train()
    assert_close(metrics["return"], 1.0)
    trainer = make_trainer(
        config_factory(output_dir=args.output_dir + "2", whiten_rewards=True, kl_coef=0.0), tokenizer
    )
    rollout, targets = make_rollout(trainer)
    kept = targets.rewards[rollout.completion_mask]
    assert_close(kept.mean(), rollout.scores.sum() / rollout.completion_mask.sum())
    assert_close(kept.std(correction=0), torch.tensor(1.0), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("query", "response", "match"),
    [
        (range(3, 6), [7, 0, 0], "first end token is number 2"),
        (range(1, 101), range(1, 60), "159 tokens are more than the model's context of 128"),
    ],
)
def test_step_refuses_what_the_policy_cannot_have_sampled(query, response, match, tokenizer, config_factory):
    # kills: training on padding after the end token, positions beyond the context
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    with pytest.raises(ValueError, match=match):
        trainer.step([torch.tensor([*query])] * 8, [torch.tensor([*response])] * 8, [1.0] * 8)


def test_generate_and_step_name_input_that_is_no_token_ids(tokenizer, config_factory):
    # kills: bare errors of torch
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    with pytest.raises(ValueError, match=r"query_tensors\[0\] is text"):
        trainer.generate(["Hi there"])
    with pytest.raises(ValueError, match=r"query_tensors must be a list .*, which is empty"):
        trainer.generate([])
    with pytest.raises(ValueError, match=r"query_tensors must be a list .* got BatchEncoding"):
        trainer.generate(tokenizer(["Hi there"]))
    with pytest.raises(ValueError, match="context of 128"):
        trainer.generate([torch.arange(1, 127)])
    queries = queries_of(trainer)
    with pytest.raises(ValueError, match="one number per response"):
        trainer.step(queries, trainer.generate(queries), 1.0)


def test_step_warns_of_responses_that_begin_with_their_query(tokenizer, config_factory):
    # kills: training on prompts in silence, as with TRL's return_prompt=True
    trainer = make_trainer(config_factory(), tokenizer, reward=None, dataset=None)
    queries = queries_of(trainer)
    joined = [torch.cat(pair) for pair in zip(queries, trainer.generate(queries), strict=True)]
    with pytest.warns(UserWarning, match="every response begins with its query"):
        trainer.step(queries, joined, [1.0] * 8)


def test_early_stop_says_how_far_the_policy_had_moved(tokenizer, config_factory):
    # kills: the mini-batch that ended the update missing from the log
    args = config_factory(num_iterations=1, ppo_epochs=20, learning_rate=3e-2, max_approx_kl=1e-4)
    metrics = make_trainer(args, tokenizer).train()
    assert metrics["stopping_approx_kl"] > 1e-4


def test_output_dir_below_a_file_is_refused_at_once(tokenizer, config_factory, tmp_path):
    # kills: an iteration trained before the first line can be written
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"cannot be made: '.*file' is a file"):
        PPOTrainer(make_model(), None, config_factory(output_dir=str(tmp_path / "file" / "run")),
                   processing_class=tokenizer)  # fmt: skip


def test_a_model_that_could_not_be_saved_is_refused_before_it_is_trained(tokenizer, config_factory):
    # kills: transformers' refusal of a contradictory generation config after the last iteration
    model = make_model()
    model.generation_config.do_sample, model.generation_config.temperature = False, 0.7
    with pytest.raises(ValueError, match="the model could not be saved, for its generation_config contradicts itself"):
        PPOTrainer(model, None, config_factory(), processing_class=tokenizer)
    PPOTrainer(model, None, config_factory(), processing_class=tokenizer, peft_config=make_lora())
