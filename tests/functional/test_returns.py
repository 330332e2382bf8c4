"""Returns and advantages against the published numbers of B09 and B10 and against the explicit double sum."""

import math

import pytest
import torch

from minirl.functional.returns import explained_variance, gae, rewards_to_go, token_rewards

NAN = float("nan")
GAE = "Schulman et al. 2016, section 3, eq. 16"


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def flags(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def close(found, expected, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


NONE = flags([0, 0, 0])
LAST = flags([0, 0, 1])
ONES, VALUES = tensor([1, 1, 1]), tensor([0.5, 0.6, 0.7])


def test_a_time_limit_still_counts_what_would_have_followed(evidence):
    # 3: 1 + 0.99·0.8 − 0.7 = 1.092; 2: 1 + 0.99·0.7 − 0.6 + 0.9405·1.092 = 2.120026; 1 likewise
    advantages, returns = gae(ONES, VALUES, tensor([0.6, 0.7, 0.8]), NONE, LAST, 0.99, 0.95)
    right = tensor([3.087884, 2.120026, 1.092000])
    evidence(GAE + ", at a time limit", gae, "three steps by hand", advantages, right, 1e-6)
    close(returns, tensor([3.587884, 2.720026, 1.792000]))


@pytest.mark.parametrize("truncated", [NONE, LAST])
def test_a_true_end_counts_nothing_and_wins(truncated, evidence):
    # the value of a terminal state is never read, not even when it is NaN
    advantages, returns = gae(ONES, VALUES, tensor([0.6, 0.7, NAN]), LAST, truncated, 0.99, 0.95)
    right = tensor([2.387329, 1.375150, 0.300000])
    evidence(GAE + ", at a true end", gae, "three steps by hand", advantages, right, 1e-6)
    close(returns, advantages + VALUES, 0)


def test_nothing_leaks_from_the_next_episode():
    advantages, _ = gae(
        tensor([1, 2, 3]), VALUES, tensor([0.6, 0.8, 0.9]), NONE, flags([0, 1, 0]), 0.99, 0.95
    )
    close(advantages, tensor([3.155576, 2.192000, 3.191000]))


def random_episodes(seed, rows=4, steps=7):
    generator = torch.Generator().manual_seed(seed)
    rewards, values, next_values = torch.randn(3, rows, steps, generator=generator, dtype=torch.float64)
    terminated, truncated = torch.rand(2, rows, steps, generator=generator) < 0.2
    return rewards, values, next_values, terminated, truncated


def explicit_sum(terms, ends, factor):
    """Σ_{l ≥ 0} factor^l terms_{t+l}, up to and with the first end at or after t, for every t on its own."""
    out = torch.zeros_like(terms)
    for row in range(terms.shape[0]):
        for t in range(terms.shape[1]):
            last = next((s for s in range(t, terms.shape[1]) if ends[row, s]), terms.shape[1] - 1)
            out[row, t] = sum(factor ** (s - t) * terms[row, s] for s in range(t, last + 1))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_advantages_are_the_discounted_sum_of_td_errors(seed, evidence):
    rewards, values, next_values, terminated, truncated = random_episodes(seed)
    deltas = rewards + 0.9 * next_values * (1 - terminated.double()) - values
    advantages, returns = gae(rewards, values, next_values, terminated, truncated, 0.9, 0.8)
    right = explicit_sum(deltas, terminated | truncated, 0.9 * 0.8)
    evidence(GAE, gae, "double loop over Σ (γλ)^l δ_{t+l}", advantages, right, 1e-12)
    close(returns, advantages + values, 1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_rewards_to_go_are_the_discounted_sum_of_rewards(seed, evidence):
    rewards, _, _, terminated, truncated = random_episodes(seed)
    found = rewards_to_go(rewards, terminated, truncated, 0.9)
    right = explicit_sum(rewards, terminated | truncated, 0.9)
    evidence("Sutton and Barto 2018, eq. 3.8", rewards_to_go, "double loop over Σ γ^l r_{t+l}", found, right, 1e-12)


def test_rewards_to_go_by_hand(evidence):
    # 1 + 0.5·(2 + 0.5·3) = 2.75; the episode ends after the third step by one flag, after the fourth by the other
    found = rewards_to_go(tensor([1, 2, 3, 4, 5]), flags([0, 0, 1, 0, 0]), flags([0, 0, 0, 1, 0]), 0.5)
    right = tensor([2.75, 3.5, 3, 4, 5])
    evidence("Sutton and Barto 2018, eq. 3.8", rewards_to_go, "five rewards by hand", found, right, 0)


def test_the_two_ends_of_lambda(evidence):
    rewards, values, next_values, terminated, truncated = random_episodes(9)
    temporal = rewards + 0.9 * next_values * ~terminated - values
    found = gae(rewards, values, next_values, terminated, truncated, 0.9, 0.0)[0]
    evidence("Schulman et al. 2016, eq. 17 (λ = 0)", gae, "TD errors", found, temporal, 1e-12)
    # λ = 1 with consistent values: return of the episode, plus the discounted value where it was cut, minus V
    next_values = torch.cat([values[:, 1:], next_values[:, -1:]], 1)
    no_end = torch.zeros_like(terminated)
    bootstrapped = rewards.clone()
    bootstrapped[:, -1] += 0.9 * next_values[:, -1]
    returns = gae(rewards, values, next_values, no_end, no_end, 0.9, 1.0)[1]
    right = rewards_to_go(bootstrapped, no_end, no_end, 0.9)
    evidence("Schulman et al. 2016, eq. 18 (λ = 1)", gae, "`rewards_to_go` with a bootstrap", returns, right, 1e-12)


@pytest.mark.parametrize("name", ["values", "next_values", "terminated", "truncated"])
def test_gae_refuses_a_shape_that_would_broadcast(name):
    inputs = dict.fromkeys(["rewards", "values", "next_values", "terminated", "truncated"], torch.zeros(3, 4))
    inputs[name] = torch.zeros(3, 1)
    with pytest.raises(ValueError, match=rf"{name} has shape \(3, 1\), but rewards has shape \(3, 4\)"):
        gae(**inputs, gamma=1.0, lam=1.0)


@pytest.mark.parametrize("name", ["terminated", "truncated"])
def test_rewards_to_go_refuses_a_shape_that_would_broadcast(name):
    inputs = {"terminated": torch.zeros(3, 4), "truncated": torch.zeros(3, 4), name: torch.zeros(1, 4)}
    with pytest.raises(ValueError, match=rf"{name} has shape \(1, 4\), but rewards has shape \(3, 4\)"):
        rewards_to_go(torch.zeros(3, 4), **inputs, gamma=1.0)


# ---- the rewards of a completion


def test_the_score_lands_on_the_end_token_not_on_padding(evidence):
    # [t0, t1, END, PAD, PAD], score 1, β 0.1; the padding's log-probs are whatever they are
    logprobs, mask = tensor([0.2, -0.1, 0.3, 9.0, NAN]), torch.tensor([[1, 1, 1, 0, 0]])
    rewards = token_rewards(tensor([1])[0], logprobs, torch.zeros(1, 5, dtype=torch.float64), mask, 0.1)
    right = tensor([-0.02, 0.01, 0.97, 0, 0])
    paper = "Ziegler et al. 2019, eq. 2; Ouyang et al. 2022, eq. 2"
    evidence(paper, token_rewards, "five tokens by hand", rewards, right, 1e-15)
    zeros = torch.zeros(1, 5, dtype=torch.float64)
    advantages, _ = gae(rewards, zeros, zeros, flags([0, 0, 1, 0, 0]), flags([0] * 5), 1.0, 0.95)
    close(advantages, tensor([0.864925, 0.9315, 0.97, 0, 0]))


def test_the_score_of_each_row_lands_on_its_own_last_token():
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    zeros = torch.zeros(4, 5, dtype=torch.float64)
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0]), zeros, zeros, mask.bool(), 0.5)
    assert rewards.tolist() == [[0, 0, 0, 0, 1], [2, 0, 0, 0, 0], [0, 0, 3, 0, 0], [0, 0, 0, 0, 0]]


def test_the_penalty_points_away_from_the_reference_and_is_a_constant():
    logprobs, ones = tensor([-1.0, -2.0]).requires_grad_(), torch.ones(1, 2)
    rewards = token_rewards(torch.zeros(1), logprobs, tensor([-1.5, -1.0]), ones, 2.0)
    assert rewards.tolist() == [[-1.0, 2.0]] and not rewards.requires_grad


def test_token_rewards_refuses_shapes_that_do_not_fit():
    zeros = torch.zeros(2, 3)
    for scores in (torch.zeros(3), torch.zeros(2, 1), torch.zeros(())):
        with pytest.raises(ValueError, match=r"mask has shape \(2,\), but scores has shape"):
            token_rewards(scores, zeros, zeros, zeros, 0.0)
    with pytest.raises(ValueError, match=r"ref_logprobs has shape \(2, 1\), but logprobs has shape \(2, 3\)"):
        token_rewards(torch.zeros(2), zeros, torch.zeros(2, 1), zeros, 0.0)
    with pytest.raises(ValueError, match=r"mask has shape \(2, 4\), but logprobs has shape \(2, 3\)"):
        token_rewards(torch.zeros(2), zeros, zeros, torch.zeros(2, 4), 0.0)


# ---- explained variance


def test_explained_variance_by_hand(evidence):
    # errors (0, 0, 1, 1): variance 0.25; returns (0, 1, 2, 3): variance 1.25
    found = explained_variance(tensor([0, 1, 1, 2]), tensor([0, 1, 2, 3]))
    evidence("definition", explained_variance, "four values by hand", found, 0.8, 1e-15)
    assert explained_variance(tensor([1, 2, 3]), tensor([1, 2, 3])) == 1
    assert explained_variance(tensor([2, 2, 2]), tensor([1, 2, 3])) == 0
    assert abs(explained_variance(tensor([3, 2, 1]), tensor([1, 2, 3])) + 3) < 1e-15  # worse than the mean


def test_explained_variance_ignores_what_the_mask_ignores():
    values, returns = tensor([0, 1, 1, 2, NAN]), tensor([0, 1, 2, 3, NAN])
    value = explained_variance(values, returns, torch.tensor([[1, 1, 1, 1, 0]]))
    assert type(value) is float and abs(value - 0.8) < 1e-15


@pytest.mark.parametrize("returns", [[2.0, 2.0], [0.0, 0.0], [1000.1, 1000.1]])
def test_explained_variance_of_returns_that_do_not_vary(returns):
    values = torch.tensor([[0.0, 1.0]])
    assert math.isnan(explained_variance(values, torch.tensor([returns])))
    assert math.isnan(explained_variance(values, torch.tensor([returns]), torch.zeros(1, 2)))


def test_explained_variance_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"returns has shape \(3, 1\), but values has shape \(3,\)"):
        explained_variance(torch.zeros(3), torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"mask has shape \(3, 1\), but values has shape \(3,\)"):
        explained_variance(torch.zeros(3), torch.zeros(3), torch.zeros(3, 1))
