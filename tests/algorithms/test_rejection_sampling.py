"""Rejection sampling: which rows are kept, that an update is fine-tuning on them; repeated, it helps."""

import itertools
import math

import pytest
import torch
from torch.distributions import Categorical

from minirl.algorithms.reinforce import policy_gradient_loss
from minirl.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig, best_of_group
from minirl.algorithms.sft import SFT
from minirl.worlds.batch import Batch, Completions

NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-12):
    torch.testing.assert_close(found, torch.as_tensor(expected, dtype=torch.float64), rtol=0, atol=atol)


def copies(module):
    return [p.detach().clone() for p in module.parameters()]


def same(module, parameters):
    return all(torch.equal(p, q) for p, q in zip(module.parameters(), parameters, strict=True))


# ---- which rows are kept


def test_the_best_by_hand():
    scores = tensor([1, 3, 2, 9, 0, 9])
    assert best_of_group(scores, 3).tolist() == [1, 3]  # of the two nines the first
    assert best_of_group(scores, 3, keep=2).tolist() == [1, 2, 3, 5]
    assert best_of_group(scores, 2).tolist() == [1, 3, 5]
    assert best_of_group(scores, 3, keep=3).tolist() == best_of_group(scores, 1).tolist() == list(range(6))
    assert best_of_group(scores, 3, min_score=3.0).tolist() == [1, 3]  # 3 is not below 3
    assert best_of_group(scores, 3, min_score=3.5).tolist() == [3]
    assert best_of_group(scores, 3, keep=3, min_score=2).tolist() == [1, 2, 3, 5]
    assert best_of_group(scores, 3, min_score=10).tolist() == [] and best_of_group(scores, 3).dtype == torch.long
    assert best_of_group(-scores, 3).tolist() == [0, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_brute_force(dtype):
    generator = torch.Generator().manual_seed(0)
    for group_size, min_score in itertools.product(range(1, 6), (None, -1.0, 0.5, 2)):
        for keep in range(1, group_size + 1):
            scores = torch.randint(-2, 3, (4 * group_size,), generator=generator).to(dtype)  # many ties
            wanted = []
            for start in range(0, len(scores), group_size):
                rows = sorted(range(start, start + group_size), key=lambda row: (-float(scores[row]), row))[:keep]
                wanted += sorted(row for row in rows if min_score is None or scores[row] >= min_score)
            assert best_of_group(scores, group_size, keep, min_score).tolist() == wanted


def test_a_score_that_is_no_number_is_never_the_best():
    scores = tensor([NAN, 1, 2, NAN, NAN, NAN])
    assert best_of_group(scores, 3).tolist() == [2]
    assert best_of_group(scores, 3, keep=3).tolist() == [1, 2]
    assert best_of_group(tensor([-math.inf, NAN]), 2).tolist() == [0]


@pytest.mark.parametrize("rows, size, keep", [(5, 2, 1), (4, 0, 1), (4, 2, 3), (4, 2, 0), (4, 1, 2)])
def test_groups_must_be_whole_and_hold_what_is_kept(rows, size, keep):
    text = f"keep is {keep} of groups of {size}" if size and rows % size == 0 else f"group_size is {size} with {rows}"
    with pytest.raises(ValueError, match=text):
        best_of_group(torch.zeros(rows), size, keep)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_best_of_n_has_the_distribution_of_a_maximum(n, evidence):
    # the best scores at most s exactly if all n do: F(s)ⁿ. Enumerated over all 4ⁿ groups.
    probs, scores = tensor([0.4, 0.1, 0.3, 0.2]), tensor([1.0, -0.7, 2.0, 0.2])
    found = torch.zeros(4, dtype=torch.float64)
    for group in itertools.product(range(4), repeat=n):
        group = torch.tensor(group)
        (kept,) = best_of_group(scores[group], n)
        found[group[kept]] += probs[group].prod()
    for one in range(4):
        at_most, less = probs[scores <= scores[one]].sum(), probs[scores < scores[one]].sum()
        reference = "F(y)ⁿ − F(y⁻)ⁿ, over all 4ⁿ groups"
        evidence("Dong et al. 2023, algorithm 1", best_of_group, reference, found[one], at_most**n - less**n, 1e-12)
    mean, before = found @ scores, probs @ scores
    assert mean > before + 0.2 if n > 1 else abs(mean - before) < 1e-12


# ---- the class


def test_one_update_is_fine_tuning_on_the_best_rows(make_text):
    world, policy, _ = make_text(group_size=4, prompts_per_batch=3)
    batch = world.collect(policy)
    _, other, _ = make_text()
    kept = [max(range(start, start + 4), key=lambda row: float(batch.scores[row])) for start in (0, 4, 8)]
    loss, wanted = SFT(other).loss(Completions(batch.obs[kept], batch.actions[kept], batch.mask[kept]))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 0.1)
    torch.optim.Adam(other.parameters(), lr=0.02 * 0.75, eps=1e-5).step()
    stats = RejectionSampling(policy, RejectionSamplingConfig(lr=0.02, max_grad_norm=0.1)).update(batch, progress=0.25)
    for found, reference in zip(policy.parameters(), other.parameters(), strict=True):
        close(found.detach(), reference.detach(), 1e-9)
    close(stats["policy_loss"], wanted["loss"])
    close(stats["grad_norm"], norm.detach(), 1e-10)
    close(stats["kept_score"].double(), batch.scores[kept].double().mean(), 1e-6)
    close(stats["ratio_max"], 1.0)
    assert stats["kept_fraction"] == 0.25 and stats["count"] == batch.mask.sum() and 0.1 < norm
    old = [row for row in range(12) if row not in kept]
    log_ratio = (policy(batch.obs).log_prob(batch.actions) - batch.logprobs).detach()
    close(stats["kl_old_new"], (log_ratio.exp() - 1 - log_ratio)[batch.mask].mean())  # of all rows, not of those kept
    assert log_ratio[old].any()


def test_on_the_walker_it_raises_the_density_of_the_best_episodes(make_control):
    batch, policy, _ = make_control(episodes=True)
    _, other, _ = make_control(episodes=True)
    kept = [int(batch.scores[:2].argmax()), 2 + int(batch.scores[2:].argmax())]
    mask = batch.mask[kept]
    loss = -other(batch.obs[kept]).log_prob(batch.actions[kept])[mask].mean()
    entropy = other(batch.obs[kept]).entropy()[mask].mean()
    loss.backward()
    torch.optim.Adam(other.parameters(), lr=0.01, eps=1e-5).step()
    stats = RejectionSampling(policy, RejectionSamplingConfig(lr=0.01, max_grad_norm=1e9)).update(batch)
    for found, reference in zip(policy.parameters(), other.parameters(), strict=True):
        close(found.detach(), reference.detach(), 1e-9)
    close(stats["policy_loss"], loss.detach())
    close(stats["entropy"], entropy.detach())
    close(stats["kept_score"], batch.scores[kept].mean())
    assert (batch.obs[kept].shape[0], float(stats["kept_fraction"])) == (2, 0.5)


def test_with_a_verifier_it_is_reinforce_without_a_baseline(make_text):
    # scores 0 and 1, all right rows kept: the gradient of Σ R log π, divided by the tokens of the right rows
    world, policy, _ = make_text(group_size=4, prompts_per_batch=2)
    batch = world.collect(policy).with_(scores=tensor([1, 0, 1, 1, 0, 0, 0, 0]))
    advantages = batch.scores.unsqueeze(1).expand_as(batch.logprobs)
    loss, _ = policy_gradient_loss(policy(batch.obs).log_prob(batch.actions), advantages, batch.mask, "token")
    gradient = torch.autograd.grad(loss, list(policy.parameters()), materialize_grads=True)
    share = batch.mask[[0, 2, 3]].sum().double() / batch.mask.sum()
    norm = torch.cat([g.flatten() for g in gradient]).norm() / share
    stats = RejectionSampling(policy, RejectionSamplingConfig(keep=4, min_score=1.0)).update(batch)
    close(stats["grad_norm"], norm.detach(), 1e-10)
    assert stats["kept_fraction"] == 3 / 8 and stats["kept_score"] == 1


def test_what_does_not_count_does_not_matter(make_control):
    found = []
    for junk in (0.0, 1e9):
        batch, policy, _ = make_control(episodes=True)
        batch = batch.with_(actions=torch.where(batch.mask.unsqueeze(2), batch.actions, junk))
        RejectionSampling(policy).update(batch)
        found.append(copies(policy))
    assert all(torch.equal(p, q) for p, q in zip(*found, strict=True))


def test_the_loss_is_a_mean_over_tokens_however_the_rows_are_dealt(make_text):
    found = []
    for minibatches in (1, 2, 3, 99):
        world, policy, _ = make_text(prompts_per_batch=6)
        config = RejectionSamplingConfig(minibatches=minibatches, epochs=2, lr=0.0)
        found.append(RejectionSampling(policy, config).update(world.collect(policy)))
    for stats in found[1:]:
        for name in ("policy_loss", "entropy", "kept_score", "count"):
            torch.testing.assert_close(stats[name], found[0][name], rtol=0, atol=1e-10)


def test_it_takes_the_steps_that_the_config_says(make_text):
    world, policy, _ = make_text()
    algorithm = RejectionSampling(policy, RejectionSamplingConfig(epochs=3, minibatches=2, lr_decay=False))
    algorithm.update(world.collect(policy), progress=0.5)
    assert next(iter(algorithm.optimizer.state.values()))["step"] == 6
    assert algorithm.optimizer.param_groups[0]["lr"] == 3e-4


@pytest.mark.parametrize("control", [False, True])
def test_where_nothing_is_good_enough_nothing_moves(control, make_text, make_control):
    if control:
        batch, policy, _ = make_control(episodes=True)
    else:
        world, policy, _ = make_text()
        batch = world.collect(policy)
    algorithm = RejectionSampling(policy, RejectionSamplingConfig(min_score=0.0, epochs=2))
    usual = algorithm.update(batch.with_(scores=batch.scores.abs()))  # from now on Adam has momentum
    before, state = copies(policy), str(algorithm.optimizer.state_dict()["state"])
    stats = algorithm.update(batch.with_(scores=-1 - batch.scores.abs()))
    assert same(policy, before) and str(algorithm.optimizer.state_dict()["state"]) == state
    assert stats.keys() == usual.keys() and all(value.isfinite() for value in stats.values())
    assert all(stats[name] == 0 for name in ("kept_fraction", "kept_score", "policy_loss", "grad_norm"))
    close(stats["entropy"].double(), policy(batch.obs).entropy().detach()[batch.mask].double().mean(), 1e-9)


def test_it_refuses_what_it_cannot_learn_from(make_text):
    world, policy, _ = make_text(kl_in_reward=0.1)
    with pytest.raises(ValueError, match="KL penalty in its rewards"):
        RejectionSampling(policy).update(world.collect(policy))
    world, policy, _ = make_text(group_size=1)
    batch = world.collect(policy)
    with pytest.raises(ValueError, match="keep is 1 of groups of 1, so nothing would be rejected"):
        RejectionSampling(policy).update(batch)
    RejectionSampling(policy, RejectionSamplingConfig(min_score=0.0)).update(batch)  # a filter needs no group


# ---- iterated


class Bandit(torch.nn.Module):
    """Four actions, no state that matters."""

    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(tensor([1.0, 0.0, 0.0, -1.0]))

    def forward(self, obs):
        return Categorical(logits=self.logits.expand(*obs.shape[:2], 4))


def play(seed, judge, updates=15):
    """Mean reward of a bandit after some iterations; judge(rewards) says what the algorithm sees."""
    torch.manual_seed(seed)
    policy, rewards = Bandit(), tensor([0.0, 0.3, 0.6, 1.0])
    algorithm = RejectionSampling(policy, RejectionSamplingConfig(lr=0.2, lr_decay=False))
    obs, zeros = torch.zeros(64, 1, 1), torch.zeros(64, 1, dtype=torch.float64)
    for _ in range(updates):
        with torch.no_grad():
            actions = policy(obs).sample()
            logprobs = policy(obs).log_prob(actions)
        earned, ends = rewards[actions], torch.ones(64, 1, dtype=torch.bool)
        algorithm.update(Batch(
            obs=obs, actions=actions, logprobs=logprobs, rewards=earned, scores=judge(earned[:, 0]), terminated=ends,
            truncated=~ends, mask=ends, values=zeros, group_size=4,
        ))  # fmt: skip
    return float(policy.logits.softmax(-1).detach() @ rewards)


def test_iterated_it_beats_imitating_a_random_one_of_n():
    # imitating samples of one's own has no direction: a run drifts off anywhere, their mean stays near the start
    start = float(Bandit().logits.softmax(-1).detach() @ tensor([0.0, 0.3, 0.6, 1.0]))
    best = [play(seed, lambda scores: scores) for seed in range(6)]
    random = [play(seed, torch.rand_like) for seed in range(6)]
    assert min(best) > 0.7 and abs(sum(random) / 6 - start) < 0.2 and start < 0.3
