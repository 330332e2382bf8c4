"""The reward model: Bradley and Terry's loss, where the score is read, and the model as a reward."""

import math
import statistics

import pytest
import torch

from minirl.algorithms.reward_model import LearnedReward, RewardModel, RewardModelConfig, bradley_terry_loss
from minirl.models.policies import TokenCritic
from minirl.training import fit
from minirl.worlds.batch import Pairs
from minirl.worlds.rows import pack_completions, pack_rows

PROMPTS = ["a", "bc", "def", "gh", "c", "hh", "ab", "e"]
CHOSEN, REJECTED = ["aa", "b", "cab", "", "a", "ha", "baa", "a"], ["bcd", "hh", "", "fe", "cc", "g", "d", "efg"]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def make_model(make_gpt):
    def make(dtype=torch.float64, config=None, **settings):
        critic = TokenCritic(make_gpt(dtype, **settings)).to(dtype)
        torch.nn.init.normal_(critic.head.weight)  # a fresh critic says 0 everywhere
        return RewardModel(critic, config)

    return make


@pytest.fixture
def pairs(letters):
    return Pairs(pack_completions(letters, PROMPTS, CHOSEN), pack_completions(letters, PROMPTS, REJECTED))


# ---- the loss


def test_one_pair_by_hand(evidence):
    # −log σ(2 − 0.5 − 1) = log(1 + e^−0.5) = 0.474077; 0.1 (2 + 0.5)² = 0.625
    loss, stats = bradley_terry_loss(tensor(2.0), tensor(0.5), tensor(1.0), centering=0.1)
    right = math.log(1 + math.exp(-0.5)) + 0.625
    evidence("Touvron et al. 2023, eq. 2, centred", bradley_terry_loss, "one pair by hand", loss, right, 1e-15)
    assert stats == {"loss": loss, "accuracy": 1, "margin": 1.5, "score_mean": 1.25, "count": 1}
    assert not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("centering", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_loss_in_probabilities(with_margin, centering, evidence):
    # P(w > l) = e^w / (e^w + e^(l + m)), as Bradley and Terry wrote it
    chosen, rejected, margin = torch.randn(3, 7, dtype=torch.float64)
    shifted = rejected + margin if with_margin else rejected
    reference = -(chosen.exp() / (chosen.exp() + shifted.exp())).log().mean()
    reference = reference + centering * (chosen**2 + 2 * chosen * rejected + rejected**2).mean()
    loss, stats = bradley_terry_loss(chosen, rejected, margin if with_margin else None, centering)
    paper = "Touvron et al. 2023 (Llama 2), eq. 2" if with_margin else "Ouyang et al. 2022, eq. 1"
    evidence(paper, bradley_terry_loss, "probabilities e^w / (e^w + e^l)", loss, reference, 1e-13)
    assert stats["accuracy"] == (chosen > rejected).double().mean() and stats["count"] == 7


def test_gradients_by_finite_differences_and_none_into_the_margin():
    chosen, rejected, margin = (torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(3))
    constant = margin.detach()
    assert torch.autograd.gradcheck(
        lambda w, o: bradley_terry_loss(w, o, constant, 0.3)[0], (chosen, rejected), atol=1e-8
    )
    bradley_terry_loss(chosen, rejected, margin)[0].backward()
    assert margin.grad is None and (chosen.grad < 0).all() and torch.equal(chosen.grad, -rejected.grad)


def test_ties_are_half_a_margin_does_not_count_and_large_scores_stay_finite():
    scores = tensor(1.0, 0.5, 1e4, -1e4), tensor(1.0, 0.0, -1e4, 1e4)
    loss, stats = bradley_terry_loss(*scores, margin=tensor(0.0, 2.0, 0.0, 0.0))
    assert stats["accuracy"] == 2.5 / 4  # a tie, two right, one wrong; the second leads by less than its margin
    assert abs(loss - (math.log(2) + math.log(1 + math.exp(1.5)) + 0 + 2e4) / 4) < 1e-9


def test_a_constant_more_changes_only_the_centering():
    chosen, rejected = torch.randn(2, 6, dtype=torch.float64)
    for centering, same in ((0.0, True), (0.1, False)):
        losses = [bradley_terry_loss(chosen + c, rejected + c, centering=centering)[0] for c in (0.0, 3.0)]
        assert torch.allclose(*losses, rtol=0, atol=1e-12) == same


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"margin has shape \(2, 1\), but chosen_scores has shape \(2,\)"):
        bradley_terry_loss(tensor(1.0, 2.0), tensor(1.0, 2.0), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"chosen_scores has shape \(2, 3\); it must be \(B,\), one score per answer"):
        bradley_terry_loss(torch.zeros(2, 3), torch.zeros(2, 3))


# ---- where the score is read


def test_the_score_is_the_value_after_the_last_real_token(make_model):
    # lengths: in the middle, an end token alone, an answer up to the last column
    model = make_model()
    prompts, answers = [[1, 2], [3, 1, 4], [5]], [[4, 6, 8], [8], [1, 2, 3, 4, 5, 6, 8]]
    right = [model.critic(torch.tensor([p + a]))[0, -1].item() for p, a in zip(prompts, answers, strict=True)]
    for pad_id in (9, 8):  # padding may have the end token's id
        scores = model.score(*pack_rows(prompts, answers, pad_id))
        torch.testing.assert_close(scores, tensor(*right), rtol=0, atol=1e-12)
    assert len(set(right)) == 3


def test_a_value_before_the_last_token_would_not_know_the_answer(make_model):
    model = make_model()
    scores = model.score(*pack_rows([[1], [1]], [[2, 3, 8], [2, 3, 4]], pad_id=9))
    assert scores[0] != scores[1]  # obs is the same in both


def test_a_row_without_an_answer_is_refused(make_model):
    obs, actions, mask = pack_rows([[1, 2], [3]], [[4], [5, 8]], pad_id=9)
    mask[1] = False
    with pytest.raises(ValueError, match="row 1 of mask is empty"):
        make_model().score(obs, actions, mask)
    with pytest.raises(ValueError, match="mask has shape"):
        make_model().score(obs, actions, mask[:, :1])


def test_the_class_is_the_loss_of_its_scores(make_model, pairs):
    model = make_model(config=RewardModelConfig(centering=0.3, lr=0.02, weight_decay=0.5))
    chosen, rejected = (model.score(side.obs, side.actions, side.mask) for side in (pairs.chosen, pairs.rejected))
    assert torch.equal(model.loss(pairs)[0], bradley_terry_loss(chosen, rejected, centering=0.3)[0])
    margin = torch.linspace(0, 2, 8, dtype=torch.float64)
    loss, _ = model.loss(Pairs(pairs.chosen, pairs.rejected, margin))
    assert torch.equal(loss, bradley_terry_loss(chosen, rejected, margin, 0.3)[0])
    group = model.optimizer.param_groups[0]
    assert group["lr"] == 0.02 and group["weight_decay"] == 0.5


def test_a_pair_of_equals_teaches_nothing_but_to_stay_near_0(make_model, pairs):
    model = make_model(config=RewardModelConfig(centering=0.0))
    loss, _ = model.loss(Pairs(pairs.chosen, pairs.chosen))
    loss.backward()
    assert abs(loss - math.log(2)) < 1e-15
    assert all(p.grad is None or p.grad.abs().max() < 1e-15 for p in model.critic.parameters())


def test_no_dropout_is_in_a_score(make_model, pairs):
    model = make_model(dropout=0.3)
    model.critic.train()
    assert model.loss(pairs)[0] == model.loss(pairs)[0]


def test_it_learns_eight_preferences(make_gpt, pairs):
    model = RewardModel(TokenCritic(make_gpt(torch.float32, std=0.05)), RewardModelConfig(lr=0.02))
    history = fit(model, pairs, steps=60)
    assert abs(history[0]["loss"] - math.log(2)) < 1e-6 and history[0]["accuracy"] == 0.5  # all scores are 0: all tie
    assert history[-1]["accuracy"] == 1 and history[-1]["loss"] < 0.2 and history[-1]["count"] == 8
    assert abs(history[-1]["score_mean"]) < 1


# ---- as a reward


def test_a_reward_is_the_normalised_score_however_it_is_batched(make_model, letters, pairs):
    model = make_model()
    right = model.score(pairs.chosen.obs, pairs.chosen.actions, pairs.chosen.mask)
    for batch_size in (256, 3, 1):
        reward = LearnedReward(model, letters, mean=0.5, std=2.0, batch_size=batch_size)
        found = reward(PROMPTS, CHOSEN, answers=["not looked at"] * 8)
        torch.testing.assert_close(tensor(*found), (right.detach() - 0.5) / 2, rtol=0, atol=1e-12)
        assert all(type(score) is float for score in found)
    assert reward([], []) == []


def test_a_long_answer_is_cut_and_keeps_its_end(make_model, letters):
    model = make_model()  # reads 12 tokens
    reward = LearnedReward(model, letters)
    row = letters.encode("ab" + "cdefghcde") + [letters.eos_id]  # 2 + 9 + 1 = 12
    assert abs(reward(["ab"], ["cdefghcde"])[0] - model.critic(torch.tensor([row]))[0, -1]) < 1e-12
    long = reward(["ab"] * 2, ["cdefghcdefgh", "cdefghcdea"])
    assert long[0] == long[1] == pytest.approx(reward(["ab"], ["cdefghcde"])[0], abs=1e-12)
    row = letters.encode("abcdefghabc") + [letters.eos_id]  # a prompt of 11: the end token alone fits
    assert abs(reward(["abcdefghabc"], ["dd"])[0] - model.critic(torch.tensor([row]))[0, -1]) < 1e-12
    with pytest.raises(ValueError, match="a prompt has 12 tokens; the reward model reads 12, end included"):
        reward(["abcdefghabcd"], ["a"])


def test_calibration_gives_mean_0_and_deviation_1(make_model, letters):
    reward = LearnedReward(make_model(), letters, mean=7.0, std=3.0)
    raw = reward.raw(PROMPTS, CHOSEN)
    reward.calibrate(raw)
    normalised = reward(PROMPTS, CHOSEN)
    assert abs(statistics.fmean(normalised)) < 1e-12 and abs(statistics.stdev(normalised) - 1) < 1e-12
    assert reward.raw(PROMPTS, CHOSEN) == raw
    for scores, mean in (([2.5], 2.5), ([0.3, 0.3, 0.3], 0.3), ([0.1 + 0.2, 0.3], 0.3), ([1e3, 1e3 + 1e-4], 1e3)):
        reward.calibrate(scores)
        assert reward.std == 1.0 and reward.mean == pytest.approx(mean)
    reward.calibrate([1.0, 3.0])  # squares (1 + 1) / (2 − 1)
    assert reward.mean == 2 and abs(reward.std - math.sqrt(2)) < 1e-15


def test_a_reward_leaves_no_gradient_and_wants_equal_lengths(make_model, letters):
    model = make_model()
    reward = LearnedReward(model, letters)
    reward(PROMPTS, CHOSEN)
    assert all(parameter.grad is None for parameter in model.critic.parameters())
    for prompts, completions in ((PROMPTS, CHOSEN[:-1]), (PROMPTS[:-1], CHOSEN)):
        with pytest.raises(ValueError):
            reward(prompts, completions)
    with pytest.raises(ValueError, match="std is 0.0"):
        LearnedReward(model, letters, std=0.0)


def test_it_scores_what_a_world_collects(make_text, make_model, letters):
    reward = LearnedReward(make_model(torch.float32, seed=4), letters)
    world, policy, _ = make_text(torch.float32)
    world.reward = reward
    batch = world.collect(policy)
    ended = batch.mask & (batch.actions == letters.eos_id)
    rows = ended.any(1)  # those that ended by themselves: the row as collected is the row as scored
    assert rows.any()
    raw = reward.model.score(batch.obs[rows], batch.actions[rows], batch.mask[rows])
    torch.testing.assert_close(batch.scores[rows], raw.detach(), rtol=0, atol=1e-5)
