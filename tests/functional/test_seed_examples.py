"""The worked examples this project started from, number by number, through the public functions."""

import math
from itertools import pairwise

import pytest
import torch
from torch.testing import assert_close

from rlhf_kit.functional import (
    approx_kl,
    clip_fraction,
    clipped_policy_loss,
    clipped_value_loss,
    compute_gae,
    entropy_from_logits,
    full_kl,
    kl_shaped_rewards,
    masked_mean,
    masked_whiten,
    token_logprobs,
)

PLACEHOLDERS = [123.0, -999.0, math.nan, math.inf]


# --- Control task: three steps, the second of which ends an episode ---


def three_steps(*, values=(0.2, 0.4, 0.3), gae_lambda=0.8):
    return compute_gae(
        torch.tensor([0.0, 1.0, 0.0]),
        torch.tensor(values),
        continues=torch.tensor([True, False, True]),
        bootstrap_value=torch.tensor(0.5),
        gamma=0.9,
        gae_lambda=gae_lambda,
    )


# kills: next_value is not cut where the trajectory ends
def test_gae_of_three_steps_with_a_fall_in_the_middle():
    advantages, returns = three_steps()
    assert_close(advantages, torch.tensor([0.592, 0.6, 0.15]))
    assert_close(returns, torch.tensor([0.792, 1.0, 0.45]))


# kills: next_advantage is not cut where the trajectory ends
@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_what_follows_a_fall_in_the_same_row_is_not_read(placeholder):
    advantages, returns = three_steps(values=(0.2, 0.4, placeholder))
    assert_close(advantages[:2], torch.tensor([0.592, 0.6]))
    assert_close(returns[:2], torch.tensor([0.792, 1.0]))


# kills: ends are cut by multiplying with continues (NaN * 0 is NaN)
@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
def test_the_next_value_of_a_fall_is_a_placeholder(placeholder):
    # The same three steps as two rows, the fall being the last step of the first one (the second has one dummy step).
    advantages, returns = compute_gae(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        torch.tensor([[0.2, 0.4], [0.0, 0.3]]),
        continues=torch.tensor([[True, False], [False, True]]),
        bootstrap_value=torch.tensor([placeholder, 0.5]),
        gamma=0.9,
        gae_lambda=0.8,
    )
    assert_close(advantages, torch.tensor([[0.592, 0.6], [0.0, 0.15]]))
    assert_close(returns, torch.tensor([[0.792, 1.0], [0.0, 0.45]]))


# kills: bootstrap_value is never read (the recursion starts from 0)
def test_a_timer_is_not_a_fall():
    # Running into the step limit keeps the value of the last observation; a fall on the same step does not.
    inputs = (torch.tensor([1.0, 1.0]), torch.tensor([10.0, 10.0]))
    cut = {"bootstrap_value": torch.tensor(10.0), "gamma": 0.9, "gae_lambda": 0.0}
    timer, _ = compute_gae(*inputs, continues=torch.tensor([1, 1]), **cut)
    fall, _ = compute_gae(*inputs, continues=torch.tensor([1, 0]), **cut)
    assert_close(timer, torch.tensor([0.0, 0.0]))
    assert_close(fall, torch.tensor([0.0, -9.0]))


# --- The clipped objective ---


# kills: torch.minimum in place of torch.maximum
@pytest.mark.parametrize(
    ("advantage", "objective"), [(1.0, [0.5, 0.8, 1.0, 1.2, 1.2]), (-1.0, [-0.8, -0.8, -1.0, -1.2, -1.5])]
)
def test_clipped_objective_table(advantage, objective):
    log_ratios = torch.tensor([0.5, 0.8, 1.0, 1.2, 1.5]).log()
    loss = clipped_policy_loss(
        log_ratios, torch.zeros_like(log_ratios), torch.full_like(log_ratios, advantage), clip_range=0.2
    )
    assert_close(-loss, torch.tensor(objective))


# --- A tabular actor and critic, six updates on one rollout ---


ACTIONS = [0, 1, 0, 1]
ADVANTAGES = [1.0, 1.0, -1.0, -1.0]


def updates_with_the_library(steps, learning_rate):
    """Two-action actor and critic, one weight per state: the state is one-hot, so its table row is the network."""
    actor, critic = torch.zeros(4, 2, requires_grad=True), torch.zeros(4, requires_grad=True)
    actions, advantages = torch.tensor(ACTIONS), torch.tensor(ADVANTAGES)
    rollout = {
        "old_logprobs": token_logprobs(actor, actions).detach(),
        "old_values": critic.detach().clone(),
        "advantages": advantages,
        "returns": advantages + critic.detach(),
    }
    recorded = {name: tensor.clone() for name, tensor in rollout.items()}
    optimizer = torch.optim.SGD([actor, critic], lr=learning_rate)
    for _ in range(steps):
        policy_loss = clipped_policy_loss(
            token_logprobs(actor, actions), rollout["old_logprobs"], rollout["advantages"], clip_range=0.2
        )
        value_loss = clipped_value_loss(critic, rollout["old_values"], rollout["returns"], value_clip_range=None)
        optimizer.zero_grad()
        (policy_loss.mean() + value_loss.mean()).backward()
        optimizer.step()
        for name, tensor in rollout.items():
            assert torch.equal(tensor, recorded[name]), name
    return token_logprobs(actor, actions).exp().detach(), critic.detach()


def updates_in_plain_python(steps, learning_rate):
    """The same in float64 scalars: h is the sampled action's logit minus the other one's, sigmoid(h) its probability.

    The loss is a mean over the four states, and the two logits move by the same amount in opposite directions.
    """
    probabilities, values = [], []
    for advantage in ADVANTAGES:
        h, value = 0.0, 0.0
        for _ in range(steps):
            p = 1 / (1 + math.exp(-h))
            ratio = p / 0.5
            is_open = ratio <= 1.2 if advantage > 0 else ratio >= 0.8
            if is_open:
                h += learning_rate * 2 * (advantage * ratio * (1 - p)) / 4
            value += learning_rate * (advantage - value) / 4
        probabilities.append(1 / (1 + math.exp(-h)))
        values.append(value)
    return probabilities, values


# kills: the factor 1/2 of the value loss
def test_six_updates_of_a_tabular_agent():
    probabilities, values = updates_with_the_library(6, 0.1)
    expected_probabilities, expected_values = updates_in_plain_python(6, 0.1)
    assert_close(probabilities, torch.tensor(expected_probabilities))
    assert_close(values, torch.tensor(expected_values))
    assert (probabilities[:2] > 0.5).all()
    assert (probabilities[2:] < 0.5).all()
    errors = [((updates_with_the_library(k, 0.1)[1] - torch.tensor(ADVANTAGES)) ** 2).mean() for k in range(7)]
    assert all(later < earlier for earlier, later in pairwise(errors))
    # Each step shrinks an error by 1 - lr / 4.
    assert_close(errors[6].item(), (1 - 0.1 / 4) ** 12, atol=1e-6, rtol=0)


# kills: the clip is dropped from the policy loss
def test_longer_training_stops_at_the_clip():
    probabilities, _ = updates_with_the_library(200, 0.1)
    expected, _ = updates_in_plain_python(200, 0.1)
    assert_close(probabilities, torch.tensor(expected), atol=1e-5, rtol=0)
    assert (probabilities[:2] > 0.6).all()
    assert (probabilities[:2] < 0.61).all()
    assert (probabilities[2:] < 0.4).all()
    assert (probabilities[2:] > 0.39).all()


# --- Language: which logits belong to which token ---


# kills: token ids are shifted by one
def test_replayed_logprobs_are_those_of_sampling():
    # A model whose next-token logits depend on the last token only, and each row of which is different.
    table = torch.randn(11, 11, generator=torch.Generator().manual_seed(8)) * 2
    generator = torch.Generator().manual_seed(8)
    ids, prompt_length, at_sampling = [3, 7], 2, []
    for _ in range(3):
        probabilities = table[ids[-1]].softmax(-1)
        ids.append(torch.multinomial(probabilities, 1, generator=generator).item())
        at_sampling.append(probabilities[ids[-1]].item())
    sequence = torch.tensor(ids)
    logits = table[sequence]  # (5, V): row j sees tokens up to j and so predicts token j + 1
    positions = torch.arange(prompt_length - 1, len(ids) - 1)
    assert positions.tolist() == [1, 2, 3]
    replayed = token_logprobs(logits[positions], sequence[prompt_length:])
    assert_close(replayed.exp(), torch.tensor(at_sampling))
    shifted = token_logprobs(logits[positions + 1], sequence[prompt_length:])
    assert (shifted - replayed).abs().max() > 1


# kills: lambda * gamma multiplies the next value in place of gamma
def test_one_step_advantages_of_a_completion_scored_at_its_end():
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards = kl_shaped_rewards(torch.tensor([2.0]), torch.zeros(1, 3), mask, kl_coef=0.1)
    assert_close(rewards, torch.tensor([[0.0, 0.0, 2.0]]))
    advantages, returns = compute_gae(
        rewards,
        torch.tensor([[0.2, 0.5, 0.4]]),
        continues=torch.tensor([[True, True, False]]),
        bootstrap_value=torch.tensor([math.nan]),
        gamma=1.0,
        gae_lambda=0.0,
    )
    assert_close(returns, torch.tensor([[0.5, 0.4, 2.0]]))
    assert_close(advantages, torch.tensor([[0.3, -0.1, 1.6]]))


# kills: the ratio is old over new
def test_ratio_of_probabilities_half_and_two_fifths():
    new, old = torch.tensor([0.5]).log(), torch.tensor([0.4]).log()
    good, bad, real = torch.tensor([1.0]), torch.tensor([-1.0]), torch.tensor([True])
    assert_close(clipped_policy_loss(new, old, good, clip_range=10.0), torch.tensor([-1.25]))
    assert_close(clipped_policy_loss(new, old, good, clip_range=0.2), torch.tensor([-1.2]))
    assert_close(clipped_policy_loss(new, old, bad, clip_range=0.2), torch.tensor([1.25]))
    assert clip_fraction(new, old, real, clip_range=0.2).item() == 1
    assert clip_fraction(new, old, real, clip_range=0.3).item() == 0
    assert_close(approx_kl(new, old, real).item(), 0.25 - math.log(1.25), atol=1e-6, rtol=0)


# kills: full_kl is KL(reference || policy)
@pytest.mark.parametrize(
    ("policy", "reference", "nats"),
    [([0.5, 0.5], [0.8, 0.2], 0.22314355), ([0.7, 0.2, 0.1], [0.5, 0.3, 0.2], 0.08512283)],
)
def test_full_kl_of_written_out_distributions(policy, reference, nats):
    p, q = (torch.tensor(x, dtype=torch.float64) for x in (policy, reference))
    assert_close(full_kl(p.log(), q.log()).item(), nats, atol=1e-8, rtol=0)
    assert abs(full_kl(q.log(), p.log()).item() - nats) > 5e-3


# kills: the entropy is negative (sign)
def test_only_completion_tokens_enter_the_objective():
    # L_clip - c_v L_value + c_H H - beta KL of one completion with two real tokens, and one padding slot.
    mask = torch.tensor([[True, True, False]])
    logits = torch.tensor([[0.5, 0.5], [0.75, 0.25], [0.9, 0.1]]).log()[None]
    ref_logits = torch.tensor([[0.8, 0.2], [0.75, 0.25], [0.1, 0.9]]).log()[None]
    new = token_logprobs(logits, torch.tensor([[0, 1, 0]]))
    old = torch.tensor([[0.4, 0.25, 0.01]]).log()
    policy_loss = clipped_policy_loss(new, old, torch.tensor([[1.0, -2.0, 50.0]]), clip_range=0.2)
    value_loss = clipped_value_loss(
        torch.tensor([[1.0, 2.0, 70.0]]), torch.zeros(1, 3), torch.zeros(1, 3), value_clip_range=None
    )
    means = [
        masked_mean(x, mask).item()
        for x in (policy_loss, value_loss, entropy_from_logits(logits), full_kl(logits, ref_logits))
    ]
    entropies = [math.log(2), math.log(4) - 0.75 * math.log(3)]
    expected = [(-1.2 + 2.0) / 2, (0.5 + 2.0) / 2, sum(entropies) / 2, 0.22314355 / 2]
    assert_close(means, expected, atol=1e-6, rtol=0)


# --- The numbers fixed by the design, section 5 ---


# kills: the KL is added to the reward (sign of the penalty)
@pytest.mark.parametrize("garbage", [100.0, math.nan])
def test_design_numbers_from_score_to_advantages(garbage):
    real = torch.tensor([[True, True, True, False, False]])
    kl = torch.tensor([[1.0, 1.0, 1.0, garbage, garbage]])
    rewards = kl_shaped_rewards(torch.tensor([1.0]), kl, real, kl_coef=0.1)
    assert_close(rewards, torch.tensor([[-0.1, -0.1, 0.9, 0.0, 0.0]]))
    for padded in (rewards, torch.where(real, rewards, torch.tensor(garbage))):
        advantages, returns = compute_gae(
            padded,
            torch.tensor([[0.5, 0.4, 0.2, garbage, garbage]]),
            continues=torch.tensor([[True, True, False, False, False]]),
            bootstrap_value=torch.tensor([garbage]),
            gamma=1.0,
            gae_lambda=0.95,
        )
        assert_close(advantages[:, :3], torch.tensor([[0.14675, 0.365, 0.7]]))
        assert_close(returns[:, :3], torch.tensor([[0.64675, 0.765, 0.9]]))
        white = masked_whiten(advantages, real)
        mean = (0.14675 + 0.365 + 0.7) / 3
        sd = math.sqrt(sum((a - mean) ** 2 for a in (0.14675, 0.365, 0.7)) / 3)
        assert_close(white, torch.tensor([[*((a - mean) / sd for a in (0.14675, 0.365, 0.7)), 0.0, 0.0]]))


# kills: the clamp before exp is [0.1, MAX_LOG_RATIO] (off centre: an unmoved policy has a ratio above 1)
def test_before_anything_moved_the_ratio_is_1():
    logits = torch.randn(4, 6, 50, generator=torch.Generator().manual_seed(0)) * 5
    tokens = torch.randint(50, (4, 6), generator=torch.Generator().manual_seed(1))
    logprobs = token_logprobs(logits, tokens, temperature=0.7)
    everything = torch.ones(4, 6, dtype=torch.bool)
    again = token_logprobs(logits, tokens, temperature=0.7)
    ones = torch.ones_like(logprobs)
    assert torch.equal(clipped_policy_loss(again, logprobs, -ones, clip_range=0.2), ones)
    assert clip_fraction(again, logprobs, everything, clip_range=0.2).item() == 0
    assert approx_kl(again, logprobs, everything).item() == 0
    assert_close(full_kl(logits, logits), torch.zeros(4, 6), atol=0, rtol=0)
