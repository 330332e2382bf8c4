"""DPO: the loss by hand, the optimum it shares with RLHF, and what must not reach it."""

import copy
import math

import pytest
import torch
from torch.distributions import Categorical

from minirl.algorithms.dpo import DPO, DPOConfig, dpo_loss, sequence_logprobs
from minirl.algorithms.optimize import descend
from minirl.models.policies import TokenPolicy
from minirl.training import fit
from minirl.worlds.batch import Completions, Pairs
from minirl.worlds.rows import pack_completions, pack_rows

PROMPTS = ["a", "bc", "def", "gh"]
CHOSEN, REJECTED = ["aa", "b", "cab", ""], ["bcd", "hh", "", "fe"]


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


class Table(torch.nn.Module):
    """A policy whose logits are parameters, whatever the ids."""

    def __init__(self, logits):
        super().__init__()
        self.table = torch.nn.Parameter(logits)

    def forward(self, obs):
        return Categorical(logits=self.table[: len(obs), : obs.shape[1]])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def pairs(letters):
    return Pairs(pack_completions(letters, PROMPTS, CHOSEN), pack_completions(letters, PROMPTS, REJECTED))


@pytest.fixture
def make_policies(make_gpt):
    def make(seed=1, **settings):
        return TokenPolicy(make_gpt(seed=0, **settings)), TokenPolicy(make_gpt(seed=seed, **settings))

    return make


# ---- the loss


def test_one_pair_by_hand(evidence):
    # rewards 0.5 (-2 + 3) = 0.5 and 0.5 (-5 + 4) = -0.5, so h = 1 and L = log(1 + e^-1) = 0.313262
    loss, stats = dpo_loss(tensor(-2.0), tensor(-5.0), tensor(-3.0), tensor(-4.0), beta=0.5)
    evidence("Rafailov et al. 2023, eq. 7", dpo_loss, "one pair by hand", loss, math.log(1 + math.exp(-1)), 1e-15)
    right = {"loss": loss, "accuracy": 1, "chosen_reward": 0.5, "rejected_reward": -0.5, "margin": 1,
             "chosen_logprob": -2, "rejected_logprob": -5, "count": 1}  # fmt: skip
    assert stats == right and not any(value.requires_grad for value in stats.values())


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.4])
@pytest.mark.parametrize("beta", [0.1, 0.5])
def test_the_loss_is_a_cross_entropy_of_probabilities(beta, label_smoothing, evidence):
    # P(w > l) = π_w^β ref_l^β / (π_w^β ref_l^β + π_l^β ref_w^β), target 1 − ε: binary cross-entropy without any sigmoid
    chosen, rejected, ref_chosen, ref_rejected = -torch.rand(4, 6, dtype=torch.float64) * 5
    one, other = (chosen.exp() * ref_rejected.exp()) ** beta, (rejected.exp() * ref_chosen.exp()) ** beta
    p = one / (one + other)
    reference = -((1 - label_smoothing) * p.log() + label_smoothing * (1 - p).log()).mean()
    loss, stats = dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing)
    paper = "Mitchell 2023 (cDPO), eq. 3" if label_smoothing else "Rafailov et al. 2023, eq. 7"
    evidence(paper, dpo_loss, "cross-entropy of Bradley-Terry probabilities", loss, reference, 1e-14)
    assert stats["accuracy"] == (p > 0.5).double().mean() and stats["count"] == 6


def test_gradients_by_finite_differences_and_none_into_the_reference():
    inputs = [(-torch.rand(5, dtype=torch.float64) * 9).requires_grad_() for _ in range(4)]
    references = [x.detach() for x in inputs[2:]]
    assert torch.autograd.gradcheck(lambda w, o: dpo_loss(w, o, *references, 0.5, 0.1)[0], inputs[:2], atol=1e-8)
    dpo_loss(*inputs)[0].backward()
    assert inputs[2].grad is None and inputs[3].grad is None
    assert (inputs[0].grad < 0).all() and torch.equal(inputs[0].grad, -inputs[1].grad)


def test_smoothing_stops_where_the_labels_odds_are():
    # dL/dh = σ(h) − (1 − ε) = 0 at h = log((1 − ε)/ε); here β = 1 and the reference is 0, so h is the log-ratio
    for label_smoothing in (0.1, 0.25):
        chosen = tensor(math.log((1 - label_smoothing) / label_smoothing)).requires_grad_()
        zero = tensor(0.0)
        dpo_loss(chosen, zero, zero, zero, 1.0, label_smoothing)[0].backward()
        assert abs(chosen.grad) < 1e-15


def test_ties_are_half_and_large_differences_stay_finite():
    zero = tensor(0.0, 0.0, 0.0)
    loss, stats = dpo_loss(tensor(-1.0, -1e4, -1.0), tensor(-1.0, -1.0, -1e4), zero, zero, beta=1.0)
    assert stats["accuracy"] == 0.5 and abs(loss - (math.log(2) + 9999 + 0) / 3) < 1e-9


def test_the_optimum_is_that_of_rlhf(evidence):
    # all ordered pairs of four answers with their true Bradley-Terry probabilities: the minimum of the expected loss
    # over free logits is π_ref exp(r/β)/Z, the optimum of E[r] − β KL(π‖π_ref) (eq. 4)
    beta, rewards, ref_logprobs = 0.5, tensor(1.0, 0.2, -0.7, 0.4), tensor(0.1, 0.4, 0.3, 0.2).log()
    logits = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [logits], max_iter=500, tolerance_grad=1e-13, tolerance_change=1e-18, line_search_fn="strong_wolfe"
    )

    def expected_loss():
        optimizer.zero_grad()
        logprobs, total = logits.log_softmax(0), 0.0
        for w in range(4):
            for o in range(4):
                if w != o:
                    pair = logprobs[[w]], logprobs[[o]], ref_logprobs[[w]], ref_logprobs[[o]]
                    total = total + dpo_loss(*pair, beta)[0] / (1 + math.exp(rewards[o] - rewards[w]))
        total.backward()
        return total

    optimizer.step(expected_loss)
    right = (ref_logprobs + rewards / beta).softmax(0)
    found = logits.detach().softmax(0)
    evidence("Rafailov et al. 2023, eq. 4", dpo_loss, "π_ref exp(r/β)/Z of four answers", found, right, 1e-6)
    implicit = beta * (logits.detach().log_softmax(0) - ref_logprobs)
    found, right = implicit - implicit[0], rewards - rewards[0]  # Z cancels
    evidence("Rafailov et al. 2023, eq. 5", dpo_loss, "the rewards that made the labels", found, right, 1e-6)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"rejected_logprobs has shape \(1,\), but chosen_logprobs has shape \(2,\)"):
        dpo_loss(tensor(1.0, 2.0), tensor(1.0), tensor(1.0), tensor(1.0))
    with pytest.raises(ValueError, match=r"chosen_logprobs has shape \(2, 3\); it must be \(B,\), one sum per answer"):
        dpo_loss(*[torch.zeros(2, 3)] * 4)  # token log-probabilities that nobody summed


# ---- sequences


def test_log_probabilities_are_sums_over_the_answer_and_its_end(letters, make_gpt, evidence):
    policy = TokenPolicy(make_gpt())
    found = sequence_logprobs(policy, pack_completions(letters, PROMPTS, CHOSEN))
    for prompt, answer, ours in zip(PROMPTS, CHOSEN, found, strict=True):
        ids, right = letters.encode(prompt), 0.0
        for token in [*letters.encode(answer), letters.eos_id]:  # one prefix at a time, no padding anywhere
            right += policy.gpt(torch.tensor([ids]))[0, -1].log_softmax(-1)[token].item()
            ids.append(token)
        evidence("definition", sequence_logprobs, "one prefix at a time, no padding", ours, right, 1e-12)


def test_prompt_and_padding_get_no_gradient():
    records = Completions(*pack_rows([[1, 2], [3]], [[4, 8], [5, 6, 7, 8]], pad_id=9))
    policy = Table(torch.randn(2, 4, 10, dtype=torch.float64))
    sequence_logprobs(policy, records).sum().backward()
    assert torch.equal(policy.table.grad.abs().sum(-1) > 0, records.mask)


def test_padding_changes_nothing_even_where_it_looks_like_the_end(make_gpt):
    policy = TokenPolicy(make_gpt())
    prompts, answers = [[1, 2], [3]], [[4, 8], [5, 6, 7, 8]]
    alone = [Completions(*pack_rows([p], [a], pad_id=9)) for p, a in zip(prompts, answers, strict=True)]
    alone = torch.cat([sequence_logprobs(policy, record) for record in alone])
    for pad_id in (9, 8):
        together = sequence_logprobs(policy, Completions(*pack_rows(prompts, answers, pad_id)))
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)


# ---- the class


def test_the_loss_is_ln_2_before_any_step_in_spite_of_dropout(make_policies, pairs):
    # faulty, with dropout in either pass: 0.779, 0.729, 0.715
    policy, _ = make_policies(dropout=0.1)
    algorithm = DPO(policy.train(), copy.deepcopy(policy).train())
    for _ in range(3):
        loss, stats = algorithm.loss(pairs)
        assert abs(loss - math.log(2)) < 1e-15 and stats["accuracy"] == 0.5
        assert stats["chosen_reward"] == stats["rejected_reward"] == stats["margin"] == 0
    loss.backward()
    assert policy.gpt.wte.weight.grad.any()  # a loss that starts at a constant still has somewhere to go


def test_a_pair_of_equals_teaches_nothing(make_policies, pairs):
    policy, reference = make_policies()
    loss, _ = DPO(policy, reference).loss(Pairs(pairs.chosen, pairs.chosen))
    loss.backward()
    assert abs(loss - math.log(2)) < 1e-15
    for name, parameter in policy.named_parameters():  # the table of ids is used twice, and a + b − a − b may round
        assert parameter.grad.abs().max() <= (1e-16 if name == "gpt.wte.weight" else 0), name
    logprobs = sequence_logprobs(policy, pairs.chosen).detach().requires_grad_()
    dpo_loss(logprobs, logprobs, *[sequence_logprobs(reference, pairs.chosen)] * 2)[0].backward()
    assert not logprobs.grad.any()


def test_the_class_is_the_loss_of_its_sums(make_policies, pairs):
    policy, reference = make_policies()
    sums = [sequence_logprobs(model, side) for model in (policy, reference) for side in (pairs.chosen, pairs.rejected)]
    config = DPOConfig(dpo_beta=0.3, label_smoothing=0.2)
    assert torch.equal(DPO(policy, reference, config).loss(pairs)[0], dpo_loss(*sums, 0.3, 0.2)[0])
    free = DPO(policy, None, DPOConfig(reference_free=True)).loss(pairs)[0]
    assert torch.equal(free, dpo_loss(*sums[:2], *[torch.zeros_like(sums[0])] * 2)[0])
    assert torch.equal(free, DPO(policy, reference, DPOConfig(reference_free=True)).loss(pairs)[0])


def test_the_reference_never_moves_and_is_never_the_policy(make_policies, pairs):
    policy, reference = make_policies()
    before = copy.deepcopy(reference.state_dict())
    algorithm = DPO(policy, reference)
    descend(algorithm.optimizer, [algorithm.loss(pairs)])
    assert all(torch.equal(before[name], value) for name, value in reference.state_dict().items())
    assert all(parameter.grad is None for parameter in reference.parameters())
    with pytest.raises(ValueError, match="reference is None"):
        DPO(policy)
    with pytest.raises(ValueError, match="reference is the policy itself"):
        DPO(policy, policy)


def test_the_saved_state_has_the_reference(make_policies, pairs):
    policy, reference = make_policies()
    right, state = DPO(policy, reference).loss(pairs)[0], copy.deepcopy(DPO(policy, reference).state_dict())
    assert set(state) == {"policy", "reference", "optimizer"}
    other = DPO(*make_policies(seed=5))
    other.load_state_dict(state)
    assert torch.equal(other.loss(pairs)[0], right)


def test_it_learns_the_preferences(make_gpt, pairs):
    policy = TokenPolicy(make_gpt(torch.float32, std=0.05))
    history = fit(DPO(policy, copy.deepcopy(policy), DPOConfig(lr=0.01)), pairs, steps=40)
    assert abs(history[0]["loss"] - math.log(2)) < 1e-6 and history[-1]["loss"] < 0.4
    assert history[-1]["accuracy"] == 1 and history[-1]["count"] == 4
    assert history[-1]["margin"] > 0 > history[-1]["rejected_reward"]


def test_smoothing_must_be_below_a_half():
    with pytest.raises(ValueError, match="label_smoothing is 0.5; it must be a number >= 0 and < 0.5"):
        DPOConfig(label_smoothing=0.5)
