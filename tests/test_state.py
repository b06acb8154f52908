"""Running moments and the one place that holds the progress of a run."""

import json

import numpy as np
import pytest
import torch

from rlhf_kit.state import PPOState, RunningMoments


@pytest.mark.parametrize("sizes", [[1, 1, 1], [5], [3, 1, 7, 2], [64, 64]])
def test_equals_numpy_over_all_batches_at_every_moment(sizes):
    # kills: the between-batches term of m2, n - 1 for n, the mean updated before delta is used
    batches = [torch.from_numpy(np.random.default_rng(i).normal(i, 1 + i, n)) for i, n in enumerate(sizes)]
    moments = RunningMoments()
    for i, batch in enumerate(batches):
        seen = np.concatenate([b.numpy() for b in batches[: i + 1]])
        assert moments.update(batch) == pytest.approx(seen.std(), rel=1e-12, abs=1e-12)
        assert moments.mean == pytest.approx(seen.mean(), rel=1e-12)
        assert moments.count == len(seen)


def test_small_spread_on_a_large_offset():
    # kills: float32 arithmetic, E[x^2] - E[x]^2
    x = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64) + 1e9
    moments = RunningMoments()
    for value in x:
        std = moments.update(value[None])
    assert std == pytest.approx(np.std([0, 1, 2, 3]), rel=1e-6)


def test_one_element_has_no_spread():
    # kills: the unbiased estimator, which divides by 0
    assert RunningMoments().update(torch.tensor([7.0])) == 0.0


def test_takes_any_shape_and_dtype_and_leaves_its_input():
    # kills: numel replaced by len, in-place arithmetic, a result that is a tensor
    x = torch.tensor([[1, 2], [3, 6]])
    moments = RunningMoments()
    std = moments.update(x)
    assert type(std) is float
    assert std == pytest.approx(np.std([1, 2, 3, 6]))
    assert moments.count == 4
    assert x.tolist() == [[1, 2], [3, 6]]


def test_gradients_stay_outside():
    # kills: detach dropped, which would keep the graph of every rollout alive
    moments = RunningMoments()
    moments.update(torch.tensor([1.0, 2.0], requires_grad=True))
    assert all(type(value) in (int, float) for value in vars(moments).values())


def test_every_state_has_moments_of_its_own():
    # kills: a mutable default shared by two runs
    a, b = PPOState(), PPOState()
    a.score_moments.update(torch.tensor([1.0, 2.0]))
    assert b.score_moments.count == 0


def test_state_can_be_written_as_json(tmp_path):
    # kills: a field that json cannot hold
    state = PPOState(iteration=3, episodes=24, kl_coef=0.1)
    state.score_moments.update(torch.tensor([1.0, 3.0]))
    state.save_to_json(str(tmp_path / "state.json"))
    saved = json.loads((tmp_path / "state.json").read_text())
    assert (saved["iteration"], saved["episodes"], saved["kl_coef"]) == (3, 24, 0.1)
    assert saved["score_moments"] == {"count": 2, "mean": 2.0, "m2": 2.0}


# Found by breaking it


def test_state_comes_back_from_json_as_it_was(tmp_path):
    # kills: the inherited load_from_json giving score_moments as a dict, whose update() means something else
    state = PPOState(iteration=3)
    state.score_moments.update(torch.tensor([1.0, 3.0]))
    state.save_to_json(str(tmp_path / "state.json"))
    assert PPOState.load_from_json(str(tmp_path / "state.json")) == state
