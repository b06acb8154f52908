"""From scores and numbers per token to rewards, advantages and returns."""

import pytest
import torch
from test_metrics import MASK, make_rollout
from torch.testing import assert_close

from rlhf_kit import PPOConfig
from rlhf_kit.state import RunningMoments
from rlhf_kit.targets import compute_targets, shaped_scores

TOKEN_REWARDS = torch.tensor([[1.0, 0.0, -3.0, 0.0], [0.5, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
SCORES = torch.tensor([2.0, 3.0, -1.0])  # the numbers per token are part of them


def rewards_of(scores=SCORES, token_rewards=TOKEN_REWARDS, *, kl_coef=0.0, **settings):
    rollout = make_rollout(scores=scores, token_rewards=token_rewards)
    args = PPOConfig(whiten_advantages=False, kl_coef=kl_coef, **settings)
    shaped = shaped_scores(rollout, args, RunningMoments().update)
    return compute_targets(rollout, *shaped, args, kl_coef=kl_coef)


def test_numbers_per_token_stay_at_their_tokens_and_the_rest_comes_last():
    # kills: the token part counted twice or lost, put at the end, or shifted by one
    rewards = rewards_of().rewards
    assert_close(rewards, torch.tensor([[1.0, 0.0, -3.0, 4.0], [0.5, 2.5, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]))
    assert_close(rewards.sum(-1), SCORES)


def test_kl_penalty_comes_on_top():
    # kills: numbers per token in place of the KL penalty
    with_kl, without = rewards_of(kl_coef=0.5).rewards, rewards_of().rewards
    assert_close(with_kl - without, -0.5 * torch.where(MASK, make_rollout().kl, 0))


def test_scaling_is_of_both_parts():
    # kills: only the score divided
    std = SCORES.double().std(correction=0).float()
    assert_close(rewards_of(scale_scores=True).rewards, rewards_of().rewards / std)


def test_clipping_is_of_the_whole_and_falls_on_the_last_token():
    # kills: single tokens clipped, the last token's number lost
    rewards = rewards_of(clip_scores=1.0).rewards
    assert_close(rewards, torch.tensor([[1.0, 0.0, -3.0, 3.0], [0.5, 0.5, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]]))


def test_missing_eos_penalty_falls_on_the_last_token():
    # kills: the penalty on every token, or on completions that ended
    rewards = rewards_of(missing_eos_penalty=2.0).rewards
    assert_close(rewards[0], torch.tensor([1.0, 0.0, -3.0, 2.0]))
    assert_close(rewards[1:], rewards_of().rewards[1:])


def test_without_numbers_per_token_nothing_is_rounded():
    # kills: score - 0 + 0 computed in another precision
    scores = torch.tensor([0.1, 1 / 3, -1e-7])
    rewards = rewards_of(scores, torch.zeros(3, 4)).rewards
    assert rewards[[0, 1, 2], [3, 1, 0]].tolist() == scores.tolist()


@pytest.mark.parametrize("gae_lambda", [0.0, 1.0])
def test_credit_of_a_token_reward_does_not_reach_later_tokens(gae_lambda):
    # kills: rewards seen by tokens that come after them
    base = rewards_of(gae_lambda=gae_lambda).advantages
    more = TOKEN_REWARDS.clone()
    more[0, 1] += 5.0
    moved = rewards_of(SCORES + torch.tensor([5.0, 0, 0]), more, gae_lambda=gae_lambda).advantages - base
    expected = [5.0, 5.0, 0.0, 0.0] if gae_lambda else [0.0, 5.0, 0.0, 0.0]
    assert_close(moved[0], torch.tensor(expected))
    assert not moved[1:].any()
