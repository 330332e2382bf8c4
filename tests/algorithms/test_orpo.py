"""ORPO: the odds at the edge of what a float can say, the loss by hand, and whose tokens count."""

import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch.distributions import Categorical

from minirl.algorithms.orpo import ORPO, ORPOConfig, log_odds, orpo_loss
from minirl.algorithms.sft import likelihood_loss
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


# ---- odds


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_log_odds_keep_their_digits_where_a_token_is_nearly_certain(dtype, tolerance, evidence):
    # log(P / (1 − P)) in 50 digits. Naive in float32: 15.942384 at −1e-7, and inf with a gradient of NaN at −1e-9
    logprobs = [-1e-3, -1e-6, -1e-7, -1e-9, -0.4, -1.2, -math.log(2) * 0.9, -30.0]
    found = log_odds(torch.tensor(logprobs, dtype=dtype)).tolist()
    for logp, ours in zip(torch.tensor(logprobs, dtype=dtype).tolist(), found, strict=True):
        with localcontext() as context:
            context.prec = 50
            right = Decimal(logp) - (1 - Decimal(logp).exp()).ln()
        reference = f"50 digits, {str(dtype).removeprefix('torch.')}, as a ratio"
        evidence("Hong et al. 2024, eq. 4", log_odds, reference, ours / float(right), 1.0, tolerance)
    for ours, listed in zip(found, (6.907255, 13.815510, 16.118096, 20.723266), strict=False):
        assert abs(ours / listed - 1) < 1e-5


def test_odds_are_even_at_one_half_and_the_slope_is_one_over_one_minus_p(evidence):
    logp = tensor(math.log(0.5), math.log(0.2), math.log(0.99)).requires_grad_()
    odds = log_odds(logp)
    odds.sum().backward()
    right = tensor(0.0, math.log(0.25), math.log(99))
    evidence("Hong et al. 2024, eq. 4", log_odds, "P = 1/2, 1/5 and 99/100 by hand", odds, right, 1e-12)
    torch.testing.assert_close(logp.grad, tensor(2.0, 1.25, 100.0), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_certainty_is_finite_in_value_and_gradient(dtype):
    # bfloat16 itself would be infinite from −1e-3 on
    for edge in (-1e-3, -1e-6, -1e-7, -1e-9, -1e-12, -1e-20, 0.0, 1e-7):
        chosen = torch.tensor([edge, -0.5, edge], dtype=dtype, requires_grad=True)
        rejected = torch.tensor([-0.5, edge, edge], dtype=dtype, requires_grad=True)
        loss, stats = orpo_loss(chosen, rejected, -chosen, lam=1.0)
        loss.backward()
        assert loss.isfinite() and chosen.grad.isfinite().all() and rejected.grad.isfinite().all()
        assert loss.dtype == stats["nll"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert all(value.isfinite() for value in stats.values())
    certain = torch.zeros(1, dtype=dtype, requires_grad=True)
    log_odds(certain).backward()
    assert log_odds(certain) <= 27.65 and certain.grad == 0


# ---- the loss


def test_one_pair_by_hand(evidence):
    # log odds −0.4 − log(1 − e^−0.4) and −1.2 − log(1 − e^−1.2): difference 1.551251; −log σ of it 0.192258;
    # 0.4 + 0.1 · 0.192258 = 0.419226
    loss, stats = orpo_loss(tensor(-0.4), tensor(-1.2), tensor(0.4))
    for name, value in {"log_odds_ratio": 1.551251, "odds_loss": 0.192258, "loss": 0.419226, "nll": 0.4}.items():
        paper = "Hong et al. 2024, eqs. 5 and 7" if "odds" in name else "Hong et al. 2024, eq. 6"
        evidence(paper, orpo_loss, "one pair by hand", stats[name], value, 1e-6)
    assert abs(loss - stats["loss"]) == 0 and stats["accuracy"] == 1 and stats["count"] == 1
    assert stats["chosen_logprob"] == -0.4 and stats["rejected_logprob"] == -1.2
    assert not any(value.requires_grad for value in stats.values())
    _, equal = orpo_loss(tensor(-0.7), tensor(-0.7), tensor(0.7))
    assert abs(equal["odds_loss"] - math.log(2)) < 1e-15 and equal["accuracy"] == 0.5


@pytest.mark.parametrize("lam", [0.0, 0.1, 1.0])
def test_the_loss_in_probabilities(lam, evidence):
    # σ(log a − log b) = a / (a + b) of the odds themselves: no logarithm of odds, no sigmoid
    chosen, rejected, nll = -torch.rand(3, 6, dtype=torch.float64) * 2 - 0.1
    odds = [logp.exp() / (1 - logp.exp()) for logp in (chosen, rejected)]
    reference = -nll.mean() - lam * (odds[0] / (odds[0] + odds[1])).log().mean()
    loss, stats = orpo_loss(chosen, rejected, -nll, lam)
    evidence("Hong et al. 2024, eqs. 6 and 7", orpo_loss, "odds as odds, no logarithm of them", loss, reference, 1e-14)
    torch.testing.assert_close(orpo_loss(chosen, rejected, -nll.mean(), lam)[0], reference, rtol=0, atol=1e-14)
    assert stats["accuracy"] == (chosen > rejected).double().mean()


def test_gradients_by_finite_differences():
    inputs = [(-torch.rand(5, dtype=torch.float64) * 3 - 0.05).requires_grad_() for _ in range(3)]
    assert torch.autograd.gradcheck(lambda *x: orpo_loss(*x, lam=0.7)[0], inputs, atol=1e-8)
    orpo_loss(*inputs)[0].backward()
    assert (inputs[0].grad < 0).all() and (inputs[1].grad > 0).all()


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"rejected_mean_logprobs has shape \(1,\), but chosen_mean_logprobs has"):
        orpo_loss(tensor(-1.0, -2.0), tensor(-1.0), tensor(1.0, 1.0))
    with pytest.raises(ValueError, match=r"chosen_nll has shape \(1,\)"):
        orpo_loss(tensor(-1.0, -2.0), tensor(-1.0, -2.0), tensor(1.0))
    with pytest.raises(ValueError, match=r"chosen_mean_logprobs has shape \(2, 3\); it must be \(B,\)"):
        orpo_loss(*[torch.zeros(2, 3)] * 3)


# ---- the class


def records_of(prompts, answers, pad_id=9):
    return Completions(*pack_rows(prompts, answers, pad_id))


def test_an_answer_has_the_mean_of_its_tokens_not_their_sum(evidence):
    # tokens −0.1, −0.2, −0.3, −0.4: mean −0.25, log odds 1.258691; the sum would give −0.541325
    first = tensor(-9.0, -0.1, -0.2, -0.3, -0.4).exp()  # of token 0; position 0 is the prompt's
    policy = Table(torch.stack([first, 1 - first], -1).log().unsqueeze(0))
    records = records_of([[0, 0]], [[0, 0, 0, 0]])
    _, stats = ORPO(policy).loss(Pairs(records, records_of([[0, 0]], [[1]])))
    found = [stats["chosen_logprob"], stats["nll"]]
    evidence("Hong et al. 2024, eq. 3", ORPO.loss, "the mean of four tokens by hand", found, [-0.25, 0.25], 1e-12)
    assert abs(log_odds(stats["chosen_logprob"]) - 1.258691) < 1e-6
    assert abs(stats["log_odds_ratio"] - (1.258691 - math.log((1 - first[1]) / first[1]))) < 1e-6


def test_the_likelihood_is_the_completions_or_everybodys(letters, make_gpt, pairs):
    policy = TokenPolicy(make_gpt())
    right = {"completion": [], "all": []}
    for prompt, answer in zip(PROMPTS, CHOSEN, strict=True):  # each row alone, through SFT's loss
        record = pack_completions(letters, [prompt], [answer])
        logprobs = policy(record.obs).log_prob(record.actions)
        right["completion"].append(likelihood_loss(logprobs, record.mask)[0])
        right["all"].append(likelihood_loss(logprobs, torch.ones_like(record.mask))[0])
    for scope, rows in right.items():
        _, stats = ORPO(policy, ORPOConfig(likelihood_scope=scope)).loss(pairs)
        torch.testing.assert_close(stats["nll"], torch.stack(rows).mean(), rtol=0, atol=1e-12)
        completion = torch.stack(right["completion"]).mean()
        torch.testing.assert_close(stats["chosen_logprob"], -completion, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scope", ["completion", "all"])
def test_which_tokens_get_a_gradient(scope):
    chosen, rejected = records_of([[1, 2], [3]], [[4, 8], [5, 6, 7, 8]]), records_of([[1, 2], [3]], [[5, 6, 8], [8]])
    policy = Table(torch.randn(2, 4, 10, dtype=torch.float64))
    ORPO(policy, ORPOConfig(likelihood_scope=scope)).loss(Pairs(chosen, rejected))[0].backward()
    seen = chosen.mask.clone()
    seen |= torch.nn.functional.pad(rejected.mask, (0, 4 - rejected.mask.shape[1]))
    seen[0, 0] |= scope == "all"  # the prompt's second token; its first has no state to be predicted from
    assert torch.equal(policy.table.grad.abs().sum(-1) > 0, seen)


@pytest.mark.parametrize("scope", ["completion", "all"])
def test_padding_changes_nothing_even_where_it_looks_like_the_end(scope, make_gpt):
    algorithm = ORPO(TokenPolicy(make_gpt()), ORPOConfig(likelihood_scope=scope))
    prompts, chosen, rejected = [[1, 2], [3]], [[4, 8], [5, 6, 7, 8]], [[5, 6, 7, 8], [8]]
    rows = zip(prompts, chosen, rejected, strict=True)
    alone = [algorithm.loss(Pairs(records_of([p], [c]), records_of([p], [r])))[0] for p, c, r in rows]
    for pad_id in (9, 8):
        pairs = Pairs(records_of(prompts, chosen, pad_id), records_of(prompts, rejected, pad_id))
        torch.testing.assert_close(algorithm.loss(pairs)[0], sum(alone) / 2, rtol=0, atol=1e-12)


def test_the_settings_arrive(make_gpt, pairs):
    policy = TokenPolicy(make_gpt())
    losses = {lam: ORPO(policy, ORPOConfig(orpo_lambda=lam)).loss(pairs) for lam in (0.0, 0.5)}
    assert losses[0.0][0] == losses[0.0][1]["nll"]
    torch.testing.assert_close(losses[0.5][0] - losses[0.0][0], 0.5 * losses[0.5][1]["odds_loss"], rtol=0, atol=1e-12)
    assert ORPO(policy, ORPOConfig(lr=0.02)).optimizer.param_groups[0]["lr"] == 0.02


def test_no_dropout_is_in_the_odds(make_gpt, pairs):
    algorithm = ORPO(TokenPolicy(make_gpt(dropout=0.3)).train())
    assert algorithm.loss(pairs)[0] == algorithm.loss(pairs)[0]


def test_it_learns_the_chosen_and_not_the_rejected(make_gpt, pairs):
    policy = TokenPolicy(make_gpt(torch.float32, std=0.05))
    history = fit(ORPO(policy, ORPOConfig(lr=0.02, orpo_lambda=0.5)), pairs, steps=60)
    last = history[-1]
    assert last["accuracy"] == 1 and last["nll"] < 0.3 < history[0]["nll"]
    assert last["rejected_logprob"] < history[0]["rejected_logprob"] and last["count"] == 4
