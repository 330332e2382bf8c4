"""GRPO: advantages of a group, the loss in its variants by hand, and the expected gradients by enumeration."""

import itertools
import math

import pytest
import torch

from minirl.algorithms.grpo import (
    GRPO,
    GRPOConfig,
    group_advantages,
    grpo_loss,
    kl_in_loss,
    process_supervision_advantages,
)
from minirl.algorithms.optimize import average_stats
from minirl.algorithms.ppo import clipped_surrogate_loss
from minirl.algorithms.reinforce import leave_one_out, policy_gradient_loss
from minirl.functional.kl import categorical_kl

NAN = float("nan")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-12):
    expected = tensor(expected) if isinstance(expected, (list, float, int)) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ---- advantages


def test_advantages_use_the_sample_deviation(evidence):
    # (1,0,0,1): ±0.5 / √(1/3); (1,0,0,0): s = 0.5
    paper, hand = "Shao et al. 2024, section 4.1.2", "two groups of four by hand"
    found = group_advantages(tensor([1, 0, 0, 1, 1, 0, 0, 0]), 4, eps=0.0)
    right = [0.866025, -0.866025, -0.866025, 0.866025, 1.5, -0.5, -0.5, -0.5]
    evidence(paper, group_advantages, hand, found, right, 1e-6)
    found, right = group_advantages(tensor([1, 0, 0, 0]), 4), [0.75 / 0.5001] + [-0.25 / 0.5001] * 3
    evidence(paper + ", with ε", group_advantages, hand, found, right, 1e-12)
    close(group_advantages(tensor([1, 0, 0, 0]), 4, eps=0.5), [0.75, -0.25, -0.25, -0.25])


def test_groups_do_not_see_each_other():
    close(group_advantages(tensor([1, 3, 10, 30]), 2, scale=False), [-1, 1, -10, 10])
    scores = torch.randn(12, dtype=torch.float64)
    advantages = group_advantages(scores, 4, eps=0.0).view(3, 4)
    close(advantages.sum(1), [0, 0, 0])
    close(advantages.std(1), [1, 1, 1])
    close(group_advantages(scores * 100 + 7, 4, eps=0.0).view(3, 4), advantages)


def test_without_scale_it_is_leave_one_out_shrunk(evidence):
    scores = torch.randn(12, dtype=torch.float64)
    found, right = group_advantages(scores, 4, scale=False), 0.75 * leave_one_out(scores, 4)
    paper, reference = "Liu et al. 2025 (Dr. GRPO): no deviation", "(G−1)/G `leave_one_out`"
    evidence(paper, group_advantages, reference, found, right, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("eps", [1e-4, 1e-8, 0.0])
@pytest.mark.parametrize("score", [0.0, 1.0, 0.7, 1000.1])
def test_equal_scores_give_zero_not_rounding_noise(score, eps, dtype):
    scores = torch.full((8,), score, dtype=dtype)
    assert not group_advantages(scores, 8, eps=eps).any()
    assert group_advantages(scores, 8, scale=False).abs().max() <= 1e-7 * max(1, score)


def test_small_but_real_differences_count():
    # noise ends at 1e-6 · max(1, largest)
    close(group_advantages(tensor([1e-5, -1e-5]), 2, eps=0.0), [math.sqrt(0.5), -math.sqrt(0.5)], 1e-6)
    assert not group_advantages(tensor([5e-7, -5e-7]), 2, eps=0.0).any()
    assert not group_advantages(tensor([100, 100.00005]), 2, eps=0.0).any()
    close(group_advantages(tensor([100, 100.0002]), 2, eps=0.0), [-math.sqrt(0.5), math.sqrt(0.5)], 1e-6)


@pytest.mark.parametrize("rows, size", [(4, 1), (5, 2), (4, 0)])
def test_groups_need_two_rows_or_more(rows, size):
    for function in (lambda: group_advantages(torch.zeros(rows), size),
                     lambda: process_supervision_advantages(torch.zeros(rows, 2), torch.ones(rows, 2), size)):
        with pytest.raises(ValueError, match=f"group_size is {size} with {rows} rows"):
            function()


def test_process_supervision_by_hand(evidence):
    # two rows, two steps each. Rewards 1, 0 | 0, 3: mean 1, s² = (0 + 1 + 1 + 4) / 3 = 2
    rewards = tensor([[1e9, 1, 9, 0, 9], [0, 9, -1e9, 3, 9]])
    ends = torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0]])
    a = 1 / math.sqrt(2)  # normalised: 0, −a | −a, 2a
    found = process_supervision_advantages(rewards, ends, 2, eps=0.0)
    right = [[-a, -a, -a, -a, 0], [a, 2 * a, 2 * a, 2 * a, 0]]
    paper = "Shao et al. 2024, section 4.1.3"
    evidence(paper, process_supervision_advantages, "two rows of two steps by hand", found, right, 1e-12)
    close(process_supervision_advantages(rewards, ends.bool(), 2, eps=math.sqrt(2)), found / 2)
    close(process_supervision_advantages(rewards.masked_fill(ends == 0, NAN), ends, 2, eps=0.0), found)
    close(process_supervision_advantages(rewards, ends, 2), found * math.sqrt(2) / (math.sqrt(2) + 1e-4))


def test_process_supervision_without_scale_is_centred_only():
    # the same rewards: 0, −1 | −1, 2
    rewards, ends = tensor([[0, 1, 0, 0, 0], [0, 0, 0, 3, 0]]), torch.tensor([[0, 1, 0, 1, 0], [1, 0, 0, 1, 0]])
    found = process_supervision_advantages(rewards, ends, 2, scale=False)
    close(found, [[-1, -1, -1, -1, 0], [1, 2, 2, 2, 0]])
    assert not process_supervision_advantages(torch.full((2, 3), 0.7), torch.ones(2, 3), 2, scale=False).any()


def test_process_supervision_keeps_groups_apart_and_survives_few_steps():
    rewards, ends = tensor([[1], [3], [5], [7], [9], [0]]), torch.tensor([[1], [1], [1], [0], [0], [0]])
    a = math.sqrt(0.5)
    close(process_supervision_advantages(rewards, ends, 2, eps=0.0), [[-a], [a], [0], [0], [0], [0]])
    assert not process_supervision_advantages(torch.full((2, 3), 0.7), torch.ones(2, 3), 2, eps=1e-8).any()


def test_with_one_step_at_the_end_it_is_outcome_supervision(evidence):
    scores, ends = torch.randn(4, dtype=torch.float64), torch.zeros(4, 3)
    ends[:, 2] = 1
    found = process_supervision_advantages(scores.unsqueeze(1).expand(4, 3), ends, 2)
    right = group_advantages(scores, 2).unsqueeze(1).expand(4, 3)
    paper = "Shao et al. 2024, sections 4.1.2 and 4.1.3"
    evidence(paper, process_supervision_advantages, "`group_advantages`, one step a row", found, right, 1e-12)


def test_process_supervision_checks_shapes():
    with pytest.raises(ValueError, match=r"step_ends has shape \(4, 1\), but step_rewards has shape \(4, 3\)"):
        process_supervision_advantages(torch.zeros(4, 3), torch.zeros(4, 1), 2)


# ---- expected gradients

LOGITS, SCORES = tensor([0.5, -0.2, 0.1]), tensor([1.0, 0.2, -0.7])


@pytest.mark.parametrize("group_size", [2, 3])
def test_the_group_mean_gives_a_known_share_of_the_gradient(group_size, evidence):
    # the own score sits in the mean, so E[∇] is exactly (G − 1)/G of ∇J; enumerated over all 3^G groups
    logits = LOGITS.clone().requires_grad_()
    logprobs, total = logits.log_softmax(-1), 0.0
    true = torch.autograd.grad((logprobs.exp() * SCORES).sum(), logits, retain_graph=True)[0]
    for group in itertools.product(range(3), repeat=group_size):
        group = list(group)
        advantages = group_advantages(SCORES[group], group_size, scale=False)
        column = logprobs[group].unsqueeze(1)
        loss, _ = grpo_loss(column, column.detach(), None, advantages, torch.ones(group_size, 1))
        total = total - logprobs[group].detach().sum().exp() * loss
    found, right = torch.autograd.grad(total, logits)[0], (group_size - 1) / group_size * true
    paper = "Shao et al. 2024, eq. 3, without the deviation"
    evidence(paper, grpo_loss, "(G−1)/G ∇J, over all 3^G groups", found, right, 1e-12)
    assert true.abs().max() > 0.1


P, Q = tensor([0.7, 0.2, 0.1]), tensor([0.5, 0.3, 0.2])
GRADIENTS = {  # at π = π_old, on the logits of P (B06)
    "k1": [0, 0, 0],
    "k2": [0.175945, -0.098118, -0.077827],
    "k3_weighted": [0.175945, -0.098118, -0.077827],
    "k3": [0.2, -0.1, -0.1],
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_expected_gradient_of_the_kl_in_the_loss(kind, evidence):
    logits = P.log().requires_grad_()
    logprobs = logits.log_softmax(-1)
    expected = (P * kl_in_loss(logprobs, P.log(), Q.log(), kind)).sum()
    found = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    close(found, GRADIENTS[kind], 1e-6)
    exact = {"k1": lambda: 0 * logits.sum(), "k3": lambda: categorical_kl(Q.log(), logits)}
    true = exact.get(kind, lambda: categorical_kl(logits, Q.log()))()
    paper = "Shao et al. 2024, eq. 4" if kind.startswith("k3") else "Schulman, Approximating KL divergence (2020)"
    right = torch.autograd.grad(true, logits)[0]
    evidence(f"{paper}: E[∇ {kind}]", kl_in_loss, "autograd of `categorical_kl`", found, right, 1e-12)


def test_the_weighted_estimator_stays_right_off_the_old_policy(evidence):
    # E over old actions of ratio · k3 is KL(π‖ref) whatever π is, and so is its gradient
    logits, old = tensor([0.3, -1.0, 0.4]).requires_grad_(), P.log()
    logprobs = logits.log_softmax(-1)
    weighted = (P * kl_in_loss(logprobs, old, Q.log(), "k3_weighted")).sum()
    exact = categorical_kl(logits, Q.log())
    evidence("Shao et al. 2024, eq. 4, weighted by the ratio", kl_in_loss, "`categorical_kl`", weighted, exact, 1e-12)
    close(*(torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (weighted, exact)))


def test_kl_in_loss_checks_its_inputs():
    with pytest.raises(ValueError, match="'k4'; choose one of k1, k2, k3, k3_weighted"):
        kl_in_loss(P, P, P, "k4")
    with pytest.raises(ValueError, match=r"old_logprobs has shape \(1,\), but logprobs has shape \(3,\)"):
        kl_in_loss(P, P[:1], P)
    inputs = [p.clone().requires_grad_() for p in (P, P, Q)]
    kl_in_loss(*inputs, "k3_weighted").sum().backward()
    assert inputs[1].grad is None and inputs[2].grad is None


# ---- the loss

RATIOS = tensor([[1.5, 1.0, 0.9], [0.5, 1.0, 1.0]])  # third column of the second row is padding
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])
ADVANTAGES = tensor([2, -1])
# l = min(r A, clip(r) A): 2.4, 2.0, 1.8 | −0.8, −1.0


def loss_of(**settings):
    logprobs = RATIOS.log() - 1
    logprobs[1, 2] = NAN
    logprobs.requires_grad_()
    old = torch.full_like(logprobs, -1.0)
    ref = settings.pop("ref_logprobs", None)
    advantages = settings.pop("advantages", ADVANTAGES)
    loss, stats = grpo_loss(logprobs, old, ref, advantages, MASK, **settings)
    loss.backward()
    return loss.detach(), stats, logprobs.grad


@pytest.mark.parametrize(
    "settings, expected, count, weights",  # weights: what a token's gradient is divided by, per row
    [
        (dict(), -(6.2 / 3 - 1.8 / 2) / 2, 2, (6, 4)),
        (dict(reduction="sequence"), -(6.2 / 3 - 1.8 / 2) / 2, 2, (6, 4)),
        (dict(reduction="token"), -(6.2 - 1.8) / 5, 5, (5, 5)),
        (dict(reduction="constant"), -(6.2 - 1.8) / 6, 2, (6, 6)),
        (dict(reduction="constant", normalizer_length=10), -(6.2 - 1.8) / 20, 2, (20, 20)),
    ],
)
def test_reductions_by_hand(settings, expected, count, weights, evidence):
    loss, stats, gradient = loss_of(**settings)
    papers = {"token": "Yu et al. 2025 (DAPO): token mean", "constant": "Liu et al. 2025 (Dr. GRPO): constant length"}
    paper = papers.get(settings.get("reduction"), "Shao et al. 2024, eq. 3")
    evidence(paper, grpo_loss, "two rows of three tokens by hand", loss, expected, 1e-12)
    assert stats["count"] == count and stats["policy_loss"] == loss
    right = [[0, -2 / weights[0], -1.8 / weights[0]], [0, 1 / weights[1], 0]]
    evidence(paper, grpo_loss, "its gradient by hand", gradient, right, 1e-12)


@pytest.mark.parametrize("rows, per_row", [([[1, 3], [0.5] * 6], 1.25), ([[4], [1] * 2, [0.2] * 5], 26 / 15)])
def test_what_a_mean_divides_by(rows, per_row):
    # B08: token losses of both batches have the mean 0.875 over tokens; means of rows average to 1.25 and 1.733333
    mask, advantages = torch.zeros(len(rows), 6), torch.zeros(len(rows), 6, dtype=torch.float64)
    for index, row in enumerate(rows):
        mask[index, : len(row)], advantages[index, : len(row)] = 1, -tensor(row)
    zeros = torch.zeros_like(advantages)
    for reduction, expected in (("token", 0.875), ("sequence", per_row)):
        close(grpo_loss(zeros, zeros, None, advantages, mask, reduction=reduction)[0], expected)
        pieces = [slice(i, i + 1) for i in range(len(rows))]
        parts = [grpo_loss(zeros[i], zeros[i], None, advantages[i], mask[i], reduction=reduction) for i in pieces]
        close(average_stats([stats for _, stats in parts])["policy_loss"], expected)


def test_clip_bounds_may_differ():
    # 1 + 0.6 leaves the ratio 1.5 alone: l = 3.0, 2.0, 1.8
    close(loss_of(clip=(0.2, 0.6))[0], -(6.8 / 3 - 1.8 / 2) / 2)
    close(loss_of(clip=(0.6, 0.2))[0], -(6.2 / 3 - 1.5 / 2) / 2)
    close(loss_of(clip=10.0)[0], -(6.8 / 3 - 1.5 / 2) / 2)


def test_advantages_may_come_per_token():
    close(loss_of(advantages=ADVANTAGES.unsqueeze(1).expand(2, 3))[0], loss_of()[0])
    per_token = tensor([[2, 1, 1], [0, -1, NAN]])  # l = 2.4, 1.0, 0.9 | 0, −1
    close(loss_of(advantages=per_token)[0], -(4.3 / 3 - 1 / 2) / 2)


def test_what_the_stats_say():
    _, stats, _ = loss_of()
    close(stats["ratio_max"], 1.5)
    close(stats["clip_fraction"], 0.4)
    close(stats["kl_old_new"], (0.5 - math.log(1.5) - 0.1 - math.log(0.9) - 0.5 - math.log(0.5)) / 5)
    assert stats["kl_policy_ref"] == 0 and not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "k3_weighted"])
def test_the_kl_is_added_per_token_before_the_reduction(kind):
    # log π − log π_ref = x everywhere that counts; on padding the reference is what it is
    x = tensor([[0.3, -0.2, 0.1], [0.4, 0.0, 0.0]])
    ref = RATIOS.log() - 1 - x
    ref[1, 2] = NAN
    k3 = (-x).exp() - 1 + x
    kl = {"k1": x, "k2": x**2 / 2, "k3": k3, "k3_weighted": RATIOS * k3}[kind]
    bare = loss_of()[0]
    for reduction, mean in (("sequence", lambda k: (k[0].mean() + k[1, :2].mean()) / 2),
                            ("token", lambda k: k[MASK.bool()].mean()),
                            ("constant", lambda k: k[MASK.bool()].sum() / 6)):
        loss, stats, gradient = loss_of(ref_logprobs=ref, beta=0.7, kl=kind, reduction=reduction)
        close(loss, loss_of(reduction=reduction)[0] + 0.7 * mean(kl))
        close(stats["kl_policy_ref"], k3[MASK.bool()].mean())  # always k3, whatever the loss uses
        assert gradient.isfinite().all() and gradient[1, 2] == 0
    close(loss_of(ref_logprobs=ref)[0], bare)  # beta 0: measured only


def test_k3_is_the_default():
    ref = RATIOS.log() - 1.3
    assert loss_of(ref_logprobs=ref, beta=1.0)[0] == loss_of(ref_logprobs=ref, beta=1.0, kl="k3")[0]


def test_on_the_first_step_the_loss_is_zero_and_its_gradient_is_not():
    logprobs = (-torch.rand(4, 3).double()).requires_grad_()
    advantages = group_advantages(tensor([1, 0, 0, 1]), 2)
    loss, _ = grpo_loss(logprobs, logprobs.detach(), None, advantages, torch.ones(4, 3))
    loss.backward()
    assert abs(loss) < 1e-15 and logprobs.grad.abs().min() > 0.01
    equal = torch.zeros(4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad(
        grpo_loss(logprobs, logprobs.detach(), None, equal, torch.ones(4, 3))[0], logprobs
    )
    assert not gradient.any()


def test_with_one_row_per_group_member_it_is_ppos_loss(evidence):
    logprobs, old = torch.randn(2, 3).double() / 5, torch.randn(2, 3).double() / 5
    advantages = torch.randn(2, 3).double()
    ours, _ = grpo_loss(logprobs, old, None, advantages, MASK, reduction="token")
    right = clipped_surrogate_loss(logprobs, old, advantages, MASK)[0]
    evidence("Shao et al. 2024, eq. 3, with β = 0", grpo_loss, "`clipped_surrogate_loss` of PPO", ours, right, 1e-12)
    first, _ = grpo_loss(old, old, None, ADVANTAGES, MASK, reduction="constant", normalizer_length=1)
    other, _ = policy_gradient_loss(torch.ones(2, 3).double(), ADVANTAGES[:, None].expand(2, 3), MASK, "trajectory")
    close(first, other)


def test_constants_get_no_gradient():
    inputs = [torch.rand(2, 3).double().requires_grad_() for _ in range(4)]
    grpo_loss(*inputs, torch.ones(2, 3), beta=1.0, kl="k3_weighted")[0].backward()
    assert inputs[0].grad is not None and all(x.grad is None for x in inputs[1:])


def test_gradient_agrees_with_finite_differences():
    old, ref = torch.zeros(2, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64) / 3
    x = tensor([[0.1, 0.3, -0.4], [-0.1, 0.05, 0.5]]).requires_grad_()
    for kl in ("k1", "k2", "k3", "k3_weighted"):
        settings = dict(beta=0.5, kl=kl)
        assert torch.autograd.gradcheck(lambda x, s=settings: grpo_loss(x, old, ref, ADVANTAGES, MASK, **s)[0], x)


def test_the_loss_checks_its_inputs():
    zeros, rows = torch.zeros(2, 3), torch.zeros(2)
    for wrong in (1, 2, 4):
        inputs = [zeros, zeros, zeros, rows, zeros]
        inputs[wrong] = torch.zeros(2, 1)
        with pytest.raises(ValueError, match=r"has shape \(2, 1\), but logprobs has shape \(2, 3\)"):
            grpo_loss(*inputs)
    with pytest.raises(ValueError, match=r"mask has shape \(2,\), but advantages has shape \(3,\)"):
        grpo_loss(zeros, zeros, None, torch.zeros(3), zeros)
    for shape in ((2, 1), (), (1, 3)):
        with pytest.raises(ValueError, match="logprobs has shape .*, but advantages has shape"):
            grpo_loss(zeros, zeros, None, torch.zeros(shape), zeros)
    with pytest.raises(ValueError, match="beta is 0.1 but ref_logprobs is None"):
        grpo_loss(zeros, zeros, None, rows, zeros, beta=0.1)
    with pytest.raises(ValueError, match="'mean'; choose 'sequence', 'token' or 'constant'"):
        grpo_loss(zeros, zeros, None, rows, zeros, reduction="mean")


# ---- the class


def test_one_update_is_one_step_on_the_groups(make_text):
    world, policy, _ = make_text()
    batch = world.collect(policy)
    batch = batch.with_(logprobs=batch.logprobs + 0.2 * torch.randn_like(batch.logprobs))  # so that the clip matters
    _, other, _ = make_text()
    config = GRPOConfig(clip=0.1, clip_high=0.3, kl_beta=0.2, reduction="constant", lr=0.01, kl_estimator="k2",
                        max_grad_norm=1e-4)
    advantages = group_advantages(batch.scores, 2)
    loss, wanted = grpo_loss(
        other(batch.obs).log_prob(batch.actions), batch.logprobs, batch.ref_logprobs, advantages, batch.mask,
        (0.1, 0.3), 0.2, "constant", world.max_new_tokens, "k2",
    )  # fmt: skip
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), 1e-4)
    torch.optim.Adam(other.parameters(), lr=0.01 * 0.75, eps=1e-5).step()
    stats = GRPO(policy, config).update(batch, progress=0.25)
    for found, reference in zip(policy.parameters(), other.parameters(), strict=True):
        close(found, reference, 1e-8)  # float32 scores, and rows in another order
    close(stats["policy_loss"], loss.detach(), 1e-8)
    close(stats["grad_norm"], norm, 1e-8)
    close(stats["kl_policy_ref"], wanted["kl_policy_ref"], 1e-10)
    assert stats["count"] == batch.mask.sum() and stats["kl_old_new"] > 0


def test_dead_groups_are_counted_and_move_nothing(make_text):
    world, policy, _ = make_text(reference=False)
    batch = world.collect(policy)
    scores = torch.tensor([1.0, 1, 0, 0, 0.7, 0.7, 1, 0])
    assert GRPO(policy, GRPOConfig(kl_beta=0.0)).update(batch.with_(scores=scores))["dead_group_fraction"] == 0.75
    before = [p.clone() for p in policy.parameters()]
    stats = GRPO(policy, GRPOConfig(kl_beta=0.0)).update(batch.with_(scores=torch.full((8,), 0.7)))
    assert stats["dead_group_fraction"] == 1 and stats["grad_norm"] == 0
    assert all(torch.equal(p, q) for p, q in zip(before, policy.parameters(), strict=True))


def test_it_takes_the_steps_that_the_config_says(make_text):
    world, policy, _ = make_text()
    algorithm = GRPO(policy, GRPOConfig(epochs=3, minibatches=2, micro_batches=2, lr_decay=False))
    algorithm.update(world.collect(policy), progress=0.5)
    assert next(iter(algorithm.optimizer.state.values()))["step"] == 6
    assert algorithm.optimizer.param_groups[0]["lr"] == 3e-4


def test_scale_of_the_config_is_used(make_text):
    norms = []
    for scale in (True, False):
        world, policy, _ = make_text()
        batch = world.collect(policy)
        batch = batch.with_(scores=batch.scores / 100)
        norms.append(float(GRPO(policy, GRPOConfig(scale=scale, kl_beta=0.0)).update(batch)["grad_norm"]))
    assert norms[0] > 10 * norms[1] > 0


def with_steps(batch, reward):
    """The batch with a step ending at each of its tokens, and one on its padding, which does not count."""
    return batch.with_(step_rewards=torch.where(batch.mask, reward, 1e9), step_ends=torch.ones_like(batch.mask))


@pytest.mark.parametrize("scale", [True, False])
def test_process_supervision_takes_its_advantages_from_the_steps(scale, make_text):
    found = []
    for _ in range(2):
        world, policy, _ = make_text()
        batch = world.collect(policy)
        config = GRPOConfig(supervision="process", scale=scale, kl_beta=0.0, reduction="token", lr=0.01, clip=9.0)
        if not found:
            reward = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(0)).double()
            stats = GRPO(policy, config).update(with_steps(batch, reward))
            found.append([p.detach().clone() for p in policy.parameters()])
            continue
        advantages = torch.zeros_like(reward)  # by hand: a loop over groups, rows and steps
        for group in range(0, 8, 2):
            steps = [reward[b, t] for b in (group, group + 1) for t in range(reward.shape[1]) if batch.mask[b, t]]
            mean, deviation = torch.stack(steps).mean(), torch.stack(steps).std() + 1e-4
            for b in (group, group + 1):
                for t in range(reward.shape[1]):
                    rest = [(reward[b, u] - mean) / (deviation if scale else 1)
                            for u in range(t, reward.shape[1]) if batch.mask[b, u]]
                    advantages[b, t] = sum(rest)
        loss = -((policy(batch.obs).log_prob(batch.actions) - batch.logprobs).exp() * advantages)[batch.mask].mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        torch.optim.Adam(policy.parameters(), lr=0.01, eps=1e-5).step()
        for ours, reference in zip(found[0], policy.parameters(), strict=True):
            close(ours, reference.detach(), 1e-8)
        close(stats["policy_loss"], loss.detach(), 1e-9)
        close(stats["grad_norm"], norm, 1e-8)


def test_process_supervision_does_not_look_at_scores(make_text):
    world, policy, _ = make_text(reference=False)
    batch = world.collect(policy)
    algorithm = GRPO(policy, GRPOConfig(supervision="process", kl_beta=0.0))
    before = [p.clone() for p in policy.parameters()]
    stats = algorithm.update(with_steps(batch, torch.full(batch.mask.shape, 0.7, dtype=torch.float64)))
    assert batch.scores.view(4, 2).std(1).any() and stats["dead_group_fraction"] == 1 and stats["grad_norm"] == 0
    assert all(torch.equal(p, q) for p, q in zip(before, policy.parameters(), strict=True))
    rewards = torch.zeros(batch.mask.shape, dtype=torch.float64)
    rewards[2:4] = torch.arange(rewards.shape[1])  # only in the second group do steps differ
    stats = algorithm.update(with_steps(batch.with_(scores=torch.ones_like(batch.scores)), rewards))
    assert stats["dead_group_fraction"] == 0.75 and stats["grad_norm"] > 0


def test_process_supervision_needs_steps(make_text):
    world, policy, _ = make_text()
    batch, algorithm = world.collect(policy), GRPO(policy, GRPOConfig(supervision="process"))
    for given in (dict(), dict(step_rewards=batch.rewards), dict(step_ends=batch.mask)):
        with pytest.raises(ValueError, match="no step_rewards; give them to the world, or set supervision to outcome"):
            algorithm.update(batch.with_(**given))
    with pytest.raises(ValueError, match="group_size is 1 with 8 rows"):
        algorithm.update(with_steps(batch, batch.rewards).with_(group_size=1))


def test_advantages_in_the_batch_are_made_anew(make_text):
    world, policy, _ = make_text()
    batch = world.collect(policy)
    stats = GRPO(policy, GRPOConfig(kl_beta=0.0)).update(batch.with_(advantages=torch.zeros_like(batch.rewards)))
    assert stats["grad_norm"] > 0


def test_it_refuses_a_kl_inside_the_reward_and_a_missing_reference(make_text):
    world, policy, _ = make_text(kl_in_reward=0.1)
    with pytest.raises(ValueError, match="KL penalty in its rewards"):
        GRPO(policy).update(world.collect(policy))
    world, policy, _ = make_text(reference=False)
    with pytest.raises(ValueError, match="beta is 0.04 but ref_logprobs is None"):
        GRPO(policy).update(world.collect(policy))
    world, policy, _ = make_text(group_size=1)
    with pytest.raises(ValueError, match="group_size is 1 with 4 rows"):
        GRPO(policy).update(world.collect(policy))
