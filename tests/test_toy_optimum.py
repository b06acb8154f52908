"""Where PPO with a KL penalty must converge to, known in closed form on toys of three tokens."""

import pytest
import torch
from conftest import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_kit import PPOConfig, PPOTrainer

pytestmark = pytest.mark.usefixtures("one_thread")


SCORES = torch.tensor([0.0, 0.5, 1.0])  # of token 0, 1, 2
PROMPT = [0, 2, 1]


def three_token_tokenizer():
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def three_token_model():
    no_special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return make_model("gpt2", vocab_size=3, scale=1.5, **no_special)


def train(tmp_path, reward, **overrides):
    settings = {
        "output_dir": str(tmp_path), "rollout_batch_size": 512, "mini_batch_size": 256, "micro_batch_size": 512,
        "ppo_epochs": 2, "num_iterations": 100, "max_completion_length": 1, "learning_rate": 3e-3,
        "whiten_advantages": False, "value_clip_range": None, "value_coef": 0.5, "log_every": 1000,
        "adam_epsilon": 1e-8,
    }  # fmt: skip
    trainer = PPOTrainer(
        three_token_model(),
        reward,
        PPOConfig(**{**settings, **overrides}),
        [{"prompt": "a c b"}],
        processing_class=three_token_tokenizer(),
    )
    trainer.train()
    return trainer


@torch.no_grad()
def next_token_probs(model, prefixes):
    ids = torch.tensor(prefixes)
    return model(input_ids=ids).logits[:, -1].softmax(-1)  # (number of prefixes, 3)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [0.5, 2.0])
@pytest.mark.parametrize(("placement", "estimator"), [("reward", "k1"), ("loss", "full"), ("loss", "k2")])
def test_one_token_converges_to_the_tilted_reference(placement, estimator, beta, tmp_path):
    # kills: kl_coef halved or doubled, KL in the other direction, 1/2 of k2 missing, score scaled
    trainer = train(
        tmp_path,
        lambda completion_ids: [float(SCORES[ids[0]]) for ids in completion_ids],
        kl_coef=beta,
        kl_placement=placement,
        kl_estimator=estimator,
    )
    reference = next_token_probs(trainer.model.ref_model, [PROMPT])[0]
    optimum = (reference.log() + SCORES / beta).softmax(-1)
    policy = next_token_probs(trainer.model.pretrained_model, [PROMPT])[0]
    assert (optimum - reference).abs().max() > 0.05  # the toy has somewhere to go
    torch.testing.assert_close(policy, optimum, atol=0.02, rtol=0)


def pair_score(first, second):
    """High only for the pair (0, 2): what the first token is worth depends on the second."""
    return 1.0 if (first, second) == (0, 2) else 0.0


def two_token_policy(model):
    first = next_token_probs(model, [PROMPT])[0]  # (3,)
    second = next_token_probs(model, [[*PROMPT, a] for a in range(3)])  # (3, 3)
    return first[:, None] * second  # (3, 3)


@pytest.mark.slow
def test_two_tokens_kl_in_the_reward_tilts_whole_completions(tmp_path):
    # kills: KL of later tokens not charged to earlier ones (lambda or gamma wrong), score not carried back
    beta = 0.5
    trainer = train(
        tmp_path,
        lambda completion_ids: [pair_score(*ids) for ids in completion_ids],
        max_completion_length=2, num_iterations=150, kl_coef=beta, gae_lambda=1.0,
    )  # fmt: skip
    reference = two_token_policy(trainer.model.ref_model)
    score = torch.tensor([[pair_score(a, b) for b in range(3)] for a in range(3)])
    optimum = (reference.log() + score / beta).flatten().softmax(-1).view(3, 3)
    torch.testing.assert_close(two_token_policy(trainer.model.pretrained_model), optimum, atol=0.03, rtol=0)


def optimum_of_kl_in_the_loss(reference_first, reference_second, beta):
    """Fixed point of the per-position objective: the second token tilts by its own score, the first by the expected
    score that follows, without being charged for the second position's KL."""
    score = torch.tensor([[pair_score(a, b) for b in range(3)] for a in range(3)])
    second = (reference_second.log() + score / beta).softmax(-1)  # (3, 3)
    expected = (second * score).sum(-1)  # (3,)
    first = (reference_first.log() + expected / beta).softmax(-1)
    return first[:, None] * second


@pytest.mark.slow
def test_two_tokens_kl_in_the_loss_has_another_optimum(tmp_path):
    # kills: kl_placement ignored
    beta = 0.5
    trainer = train(
        tmp_path,
        lambda completion_ids: [pair_score(*ids) for ids in completion_ids],
        max_completion_length=2, num_iterations=150, kl_coef=beta, gae_lambda=1.0, kl_placement="loss",
        kl_estimator="full",
    )  # fmt: skip
    reference = trainer.model.ref_model
    first = next_token_probs(reference, [PROMPT])[0]
    second = next_token_probs(reference, [[*PROMPT, a] for a in range(3)])
    optimum = optimum_of_kl_in_the_loss(first, second, beta)
    torch.testing.assert_close(two_token_policy(trainer.model.pretrained_model), optimum, atol=0.03, rtol=0)


def test_the_two_optima_differ_on_two_tokens():
    # kills: a toy on which the two tests above could not tell the placements apart
    torch.manual_seed(0)
    first, second = torch.rand(3).softmax(-1), torch.rand(3, 3).softmax(-1)
    score = torch.tensor([[pair_score(a, b) for b in range(3)] for a in range(3)])
    in_reward = ((first[:, None] * second).log() + score / 0.5).flatten().softmax(-1).view(3, 3)
    in_loss = optimum_of_kl_in_the_loss(first, second, 0.5)
    assert (in_reward - in_loss).abs().max() > 0.03
    for table in (in_reward, in_loss):
        torch.testing.assert_close(table.sum(), torch.tensor(1.0))


@pytest.mark.slow
def test_exact_kl_in_the_reward_does_not_hold_a_single_token(tmp_path):
    """The exact KL of a position does not depend on the token drawn there, so as a reward it cannot push on it.

    The documentation warns of this; here it is seen: one-token completions run away to the best token.
    """
    # kills: the warning of PPOConfig becoming untrue
    trainer = train(
        tmp_path,
        lambda completion_ids: [float(SCORES[ids[0]]) for ids in completion_ids],
        kl_coef=2.0,
        kl_estimator="full",
    )
    policy = next_token_probs(trainer.model.pretrained_model, [PROMPT])[0]
    reference = next_token_probs(trainer.model.ref_model, [PROMPT])[0]
    optimum = (reference.log() + SCORES / 2.0).softmax(-1)
    assert policy[2] > optimum[2] + 0.2
