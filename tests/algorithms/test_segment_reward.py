"""The reward predictor of 2017: the loss, the ensemble and its moments, labels held out, l2, and which pairs to ask."""

import copy
import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from minirl.algorithms.segment_reward import (
    SegmentReward,
    SegmentRewardConfig,
    adapted_l2,
    disagreement,
    segment_preference_loss,
)

D, K = 4, 5  # numbers of a step (3 observed, 1 action), steps of a segment


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(**settings):
    return SegmentReward(3, 1, SegmentRewardConfig(**{"predictor_hidden": (16,), **settings})).double()


def labelled(predictor, count, flip=False):
    """Pairs of random segments, labelled by the sum of what the first number of a step says, added to a predictor."""
    pairs = torch.randn(count, 2, K, D, dtype=torch.float64)
    truth = pairs[..., 0].sum(-1)
    mu = (truth[:, 0] > truth[:, 1]).double()
    predictor.normalizer.update(pairs)
    predictor.add(pairs, 1 - mu if flip else mu)


# ---- the loss


@pytest.mark.parametrize(("mu", "expected"), [
    (1.0, -math.log(0.725)), (0.0, -math.log(0.275)), (0.5, -0.5 * math.log(0.725 * 0.275)),
])  # fmt: skip
def test_one_label_by_hand(mu, expected, evidence):
    # e² · 3 against e²: the softmax gives 3/4; with a tenth of coins 0.9 · 0.75 + 0.05 = 0.725, and 0.275 for the other
    loss, stats = segment_preference_loss(tensor(2 + math.log(3)), tensor(2.0), tensor(mu))
    paper = "Christiano et al. 2017, section 2.2.3"
    evidence(paper, segment_preference_loss, "one label by hand", loss, tensor(expected)[0], 1e-12)
    assert stats == {"loss": loss, "accuracy": mu, "count": 1} and not stats["loss"].requires_grad


@pytest.mark.parametrize("noise", [0.1, 0.01, 1.0])
def test_the_loss_as_a_softmax_over_two_segments(noise, evidence):
    sums = torch.randn(9, 2, dtype=torch.float64)
    mu = tensor(1, 0, 0.5, 1, 1, 0, 0, 0.5, 1)
    chosen = sums.exp() / sums.exp().sum(1, keepdim=True)  # the paper's equation, then its labeller with a coin
    answered = (1 - noise) * chosen + noise * 0.5
    reference = -(torch.stack([mu, 1 - mu], 1) * answered.log()).sum(1).mean()
    paper, found = "Christiano et al. 2017, section 2.2.3", segment_preference_loss(*sums.T, mu, noise)[0]
    evidence(paper, segment_preference_loss, "softmax over two segments, then a coin", found, reference, 1e-12)


def test_gradient_by_finite_differences():
    sums, mu = torch.randn(2, 6, dtype=torch.float64, requires_grad=True), tensor(1, 0, 0.5, 1, 0, 0.5)
    segment_preference_loss(sums[0], sums[1], mu)[0].backward()
    h = 1e-6
    for place in np.ndindex(2, 6):
        up, down = sums.detach().clone(), sums.detach().clone()
        up[place] += h
        down[place] -= h
        slope = (segment_preference_loss(*up, mu)[0] - segment_preference_loss(*down, mu)[0]) / (2 * h)
        assert abs(slope - sums.grad[place]) < 1e-8
    assert sums.grad[0, 0] < 0 < sums.grad[0, 1], "what was preferred must rise"
    assert torch.allclose(sums.grad[0], -sums.grad[1], atol=1e-12), "only the difference counts"


def test_swapping_segments_and_label_changes_nothing():
    first, second = torch.randn(2, 6, dtype=torch.float64)
    mu = tensor(1, 0, 0.5, 1, 0, 0.5)
    one, other = segment_preference_loss(first, second, mu)[0], segment_preference_loss(second, first, 1 - mu)[0]
    assert abs(one - other) < 1e-12


def test_a_wrong_answer_costs_no_more_than_a_coin_explains():
    sums = tensor(-1e4).requires_grad_()
    loss = segment_preference_loss(sums, tensor(1e4), tensor(1.0))[0]
    loss.backward()
    assert abs(loss + math.log(0.05)) < 1e-12 and sums.grad.isfinite().all()


def test_accuracy():
    stats = segment_preference_loss(tensor(2, 2, 2, 0, 1), tensor(1, 1, 1, 1, 1), tensor(1, 0, 0.5, 0, 1))[1]
    assert stats["accuracy"] == (1 + 0 + 0.5 + 1 + 0.5) / 5 and stats["count"] == 5


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="other_sums has shape"):
        segment_preference_loss(torch.zeros(3), torch.zeros(3, 1), torch.zeros(3))
    with pytest.raises(ValueError, match="one sum a segment"):
        segment_preference_loss(*torch.zeros(3, 2, 2))


def test_the_label_is_a_constant():
    mu = tensor(0.5, 1.0).requires_grad_()
    assert not segment_preference_loss(tensor(1.0, 2.0), tensor(0.0, 0.0), mu)[0].requires_grad


# ---- the ensemble


def test_architecture():
    """Three MLPs of D -> 64 -> 64 -> 1 with leaky ReLUs of slope 0.01, each drawn on its own."""
    predictor = SegmentReward(3, 1)
    assert len(predictor.members) == 3
    assert sum(p.numel() for p in predictor.parameters()) == 3 * ((D + 1) * 64 + 65 * 64 + 65)
    assert [layer.negative_slope for layer in predictor.members[0] if hasattr(layer, "negative_slope")] == [0.01, 0.01]
    raw = predictor.raw(torch.randn(7, 2, D))
    assert raw.shape == (3, 7, 2) and not torch.allclose(raw[0], raw[1])


def test_moments_of_the_reward():
    predictor, steps = make(), torch.randn(200, D, dtype=torch.float64)
    predictor.normalizer.update(3 + 2 * steps)
    predictor.normalise(steps)
    with torch.no_grad():
        each = predictor.raw(steps).numpy()
        rewards = predictor(steps.view(20, 10, D)).numpy()
    assert rewards.shape == (20, 10) and abs(rewards.mean()) < 1e-12 and abs(rewards.std() - 1) < 1e-12
    normalised = (each - each.mean(1, keepdims=True)) / each.std(1, keepdims=True)  # each member by itself, then a mean
    mean = normalised.mean(0)
    assert mean.std() < 0.99, "members that disagree cancel, so their mean needs a scale of its own"
    assert np.allclose(rewards.ravel(), mean / mean.std(), atol=1e-12)
    with torch.no_grad():
        predictor.members[1][-1].weight *= 1000  # a member that shouts is not heard more
        predictor.members[1][-1].bias += 50
    predictor.normalise(steps)
    assert np.allclose(predictor(steps).detach(), rewards.ravel(), atol=1e-9)


def test_a_constant_reward_stays_finite():
    predictor = make()
    for member in predictor.members:
        torch.nn.init.zeros_(member[-1].weight)
    predictor.normalise(torch.randn(9, D, dtype=torch.float64))
    assert (predictor(torch.randn(9, D, dtype=torch.float64)) == 0).all()


# ---- labels


def test_each_member_holds_out_a_share_of_1_over_e():
    predictor, n = make(), 20_000
    predictor.add(torch.zeros(n, 2, 1, D), torch.ones(n))
    held_out = predictor.counts == 0
    for member in range(3):  # four standard deviations of a share: 4 √(p (1 − p) / n) = 0.0136
        assert abs(held_out[member].double().mean() - 1 / math.e) < 0.0136
        assert abs(predictor.counts[member].mean() - 1) < 4 / math.sqrt(n)
    both = (held_out[0] & held_out[1]).double().mean()
    assert abs(both - math.exp(-2)) < 0.0097, "every member draws its own"
    predictor.add(torch.ones(10, 2, 1, D), torch.zeros(10))
    assert len(predictor) == n + 10 and (predictor.mu[-10:] == 0).all() and (predictor.pairs[-10:] == 1).all()
    assert ((predictor.counts[:, :n] == 0) == held_out).all(), "held out once is held out for good"


def test_a_member_never_learns_from_what_it_holds_out():
    torch.manual_seed(1)
    one = make(predictors=1, fit_steps=3)
    labelled(one, 40)
    other = copy.deepcopy(one)
    held_out = other.counts[0] == 0
    other.mu[held_out] = 1 - other.mu[held_out]
    first, second = ([torch.manual_seed(2), predictor.fit()][1] for predictor in (one, other))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert first["predictor_loss"] == second["predictor_loss"]
    assert abs(first["predictor_accuracy"] + second["predictor_accuracy"] - 1) < 1e-12


def test_counts_are_how_often_a_label_is_drawn():
    """A member that counts one label only learns from that one, whatever the others say."""
    one = make(predictors=1, fit_steps=2)
    labelled(one, 6)
    one.counts = torch.tensor([[0.0, 2, 0, 0, 0, 0]])
    other = copy.deepcopy(one)
    other.mu[[0, 2, 3, 4, 5]] = 0.5
    one.fit()
    other.fit()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_a_label_counted_three_times_is_drawn_three_times_as_often(monkeypatch):
    one, drawn = make(predictors=1, fit_steps=20, label_batch=1000), []
    labelled(one, 3)
    one.counts = torch.tensor([[1.0, 0, 3]])
    loss = one.loss
    monkeypatch.setattr(one, "loss", lambda member, index: drawn.append(index) or loss(member, index))
    one.fit()
    drawn = torch.cat(drawn[:20])
    assert len(drawn) == 20_000 and abs((drawn == 2).double().mean() - 0.75) < 0.0123  # 4 standard deviations


@pytest.mark.parametrize("flip", [False, True])
def test_it_learns_the_reward_behind_the_labels(flip):
    predictor = make(fit_steps=300, label_batch=32)
    labelled(predictor, 300, flip)
    stats = predictor.fit()
    steps = torch.randn(500, D, dtype=torch.float64)
    predictor.normalise(steps)
    with torch.no_grad():
        alike = np.corrcoef(predictor(steps), steps[:, 0])[0, 1]
    assert alike * (-1 if flip else 1) > 0.9
    assert stats["predictor_accuracy"] > 0.85


# ---- l2


@pytest.mark.parametrize(("validation", "expected"), [
    (1.6, 0.02), (1.5, 0.01), (1.3, 0.01), (1.1, 0.01), (1.0, 0.005), (0.5, 0.005),
])  # fmt: skip
def test_l2_grows_with_overfitting_and_shrinks_without(validation, expected):
    assert adapted_l2(0.01, 1.0, validation, 2.0) == expected


def test_each_member_has_an_l2_weight_of_its_own(monkeypatch):
    predictor = make(l2=0.01, l2_factor=2.0)
    labelled(predictor, 30)
    ratios = (2.0, 1.3, 0.9)

    def loss(member, index):
        held_out = bool((predictor.counts[member][index] == 0).all())
        value = torch.tensor(ratios[member] if held_out else 1.0)
        return value, {"loss": value, "accuracy": value, "count": torch.tensor(1)}

    monkeypatch.setattr(predictor, "loss", loss)
    stats = predictor.judge()
    assert [group["weight_decay"] for group in predictor.optimizer.param_groups] == [0.02, 0.01, 0.005]
    assert abs(stats["predictor_validation_loss"] - sum(ratios) / 3) < 1e-6 and stats["predictor_loss"] == 1
    assert abs(stats["predictor_l2"] - 0.035 / 3) < 1e-6


def test_l2_pulls_weights_to_zero():
    norms = []
    for l2 in (0.0, 0.1, 1.0):
        torch.manual_seed(3)
        predictor = make(l2=l2, l2_factor=1.0, fit_steps=100)
        labelled(predictor, 50)
        predictor.fit()
        norms.append(sum(p.detach().square().sum().item() for p in predictor.parameters()))
    assert all(more > less for more, less in pairwise(norms))


def test_few_labels_or_none_on_one_side_are_no_error():
    predictor = make(fit_steps=1)
    labelled(predictor, 1)
    predictor.counts = torch.tensor([[1.0], [0.0], [3.0]])
    assert predictor.fit() == {}


# ---- which pairs to ask about


def test_disagreement_is_the_variance_of_the_preference():
    sums = torch.randn(3, 8, 2, dtype=torch.float64)
    for pair in range(8):
        preferred = [1 / (1 + math.exp(float(b - a))) for a, b in sums[:, pair]]
        mean = sum(preferred) / 3
        assert abs(disagreement(sums)[pair] - sum((p - mean) ** 2 for p in preferred) / 3) < 1e-12


def test_the_pairs_chosen_are_those_of_most_disagreement():
    predictor, pairs = make(), 3 * torch.randn(40, 2, K, D, dtype=torch.float64)
    spread = []
    for pair in pairs:
        preferred = []
        for member in predictor.members:
            first, second = (sum(member(step).item() for step in segment) for segment in pair)
            preferred.append(1 / (1 + math.exp(second - first)))
        spread.append(np.var(preferred))
    chosen = predictor.choose(pairs, 6)
    assert sorted(chosen.tolist()) == sorted(np.argsort(spread)[-6:].tolist())


def test_random_pairs():
    predictor, pairs = make(selection="random"), torch.randn(40, 2, K, D, dtype=torch.float64)
    draws = [predictor.choose(pairs, 6).tolist() for _ in range(30)]
    assert all(len(set(draw)) == 6 for draw in draws)
    assert len({index for draw in draws for index in draw}) > 35, "any pair may come"
