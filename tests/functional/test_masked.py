"""Masked statistics against numbers by hand, log-probabilities against torch.distributions."""

import math

import pytest
import torch
from torch.distributions import Categorical

from minirl.functional.masked import (
    check_same_shape,
    entropy,
    masked_mean,
    masked_sum,
    masked_whiten,
    token_logprobs,
    zero_outside,
)

NAN, INF = float("nan"), float("inf")
X = [[1.0, 2.0, 3.0, NAN, INF], [4.0, 5.0, NAN, -INF, NAN]]
MASK = [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_sums_and_means_skip_what_the_mask_skips(dtype, evidence):
    x, mask = tensor(X), torch.tensor(MASK).to(dtype)
    for function, dim, right in (
        (masked_sum, None, 15),
        (masked_sum, 1, [6, 9]),
        (masked_mean, None, 3),
        (masked_mean, 1, [2, 4.5]),  # not the 3 of all: rows differ in length
        (masked_mean, 0, [2.5, 3.5, 3, 0, 0]),
    ):
        evidence("definition", function, "small integers by hand", function(x, mask, dim), right, 0)


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_nothing_outside_the_mask_reaches_the_gradient(dim):
    x = tensor(X).requires_grad_()
    masked_mean(x, torch.tensor(MASK), dim).sum().backward()
    each = {None: [0.2] * 5, 0: [0.5, 0.5, 1, 0.5, 0.5], 1: [1 / 3, 1 / 3, 1 / 3, 0.5, 0.5]}[dim]
    expected = torch.zeros(2, 5, dtype=torch.float64)
    expected[torch.tensor(MASK).bool()] = tensor(each)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-15)


def test_an_empty_mask_gives_zero_and_no_gradient():
    x = tensor(X).requires_grad_()
    mean = masked_mean(x, torch.zeros(2, 5))
    mean.backward()
    assert mean == 0 and not x.grad.any()
    assert not masked_whiten(x.detach(), torch.zeros(2, 5)).any()
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_zero_outside(evidence):
    x, y = zero_outside(torch.tensor(MASK), tensor(X), tensor(X) + 1)
    right = [[[1, 2, 3, 0, 0], [4, 5, 0, 0, 0]], [[2, 3, 4, 0, 0], [5, 6, 0, 0, 0]]]
    evidence("definition", zero_outside, "small integers by hand", torch.stack([x, y]), right, 0)


def test_whitening_uses_the_sample_deviation_of_what_counts(evidence):
    # 1..5: mean 3, s² = (4 + 1 + 0 + 1 + 4) / 4 = 2.5, so 1 -> -2 / 1.581139
    white = masked_whiten(tensor(X), torch.tensor(MASK))
    expected = tensor([[-1.264911, -0.632456, 0, 0, 0], [0.632456, 1.264911, 0, 0, 0]])
    evidence("definition", masked_whiten, "1 to 5 by hand", white, expected, 1e-6)
    halved = masked_whiten(tensor(X), torch.tensor(MASK), eps=math.sqrt(2.5))
    torch.testing.assert_close(halved, expected / 2, rtol=0, atol=1e-6)


def test_whitened_values_have_mean_zero_and_deviation_one():
    x, mask = torch.randn(4, 6, dtype=torch.float64) * 7 + 100, torch.rand(4, 6) < 0.7
    white = masked_whiten(x, mask)
    assert white[mask].mean().abs() < 1e-12 and abs(white[mask].std() - 1) < 1e-8
    assert not white[~mask].any()


@pytest.mark.parametrize("values", [[0.7] * 8, [1000.1] * 8, [1e-7, -1e-7] * 4, [0.0] * 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_noise_is_not_blown_up(values, dtype):
    assert not masked_whiten(torch.tensor([values], dtype=dtype), torch.ones(1, 8)).any()


@pytest.mark.parametrize(
    ("offset", "spread", "kept"),
    [(0, 2e-6, True), (0, 5e-7, False), (100, 2e-4, True), (100, 5e-5, False), (-100, 2e-4, True), (-100, 5e-5, False)],
)
def test_where_noise_begins(offset, spread, kept):
    # two values offset ± spread/√2 have sample deviation `spread`; noise ends at 1e-6 · max(1, largest)
    x = tensor([[offset - spread / math.sqrt(2), offset + spread / math.sqrt(2)]])
    white = masked_whiten(x, torch.ones(1, 2), eps=0.0)
    torch.testing.assert_close(white, tensor([[-1, 1]]) * kept / math.sqrt(2), rtol=0, atol=1e-6)


def test_a_single_entry_is_whitened_to_zero():
    assert masked_whiten(tensor([[5.0, 7.0]]), torch.tensor([[0, 1]])).tolist() == [[0, 0]]


def test_token_logprobs_are_those_of_the_tempered_softmax(evidence):
    # B04: logits (2, 1, 0) at temperature 0.5, and the ratios that a recomputation without temperature would give
    logits, actions = tensor([2, 1, 0]).expand(1, 3, 3), torch.tensor([[0, 1, 2]])
    tempered = token_logprobs(logits, actions, 0.5)
    right = tensor([[-0.142932, -2.142932, -4.142932]])
    evidence("definition", token_logprobs, "three logits by hand", tempered, right, 1e-6)
    ratios = (token_logprobs(logits, actions) - tempered).exp()
    torch.testing.assert_close(ratios, tensor([[0.767456, 2.086161, 5.670774]]), rtol=0, atol=1e-6)


def test_logprobs_and_entropy_agree_with_torch(evidence):
    logits, actions = torch.randn(2, 3, 5, dtype=torch.float64), torch.randint(5, (2, 3))
    distribution = Categorical(logits=logits / 1.7)
    for function, found, right in (
        (token_logprobs, token_logprobs(logits, actions, 1.7), distribution.log_prob(actions)),
        (entropy, entropy(logits / 1.7), distribution.entropy()),
    ):
        evidence("definition", function, "`torch.distributions.Categorical`", found, right, 1e-14)


def test_a_forbidden_id_has_no_entropy():
    logits = tensor([[[0.3, 0.3, -INF]]]).requires_grad_()
    value = entropy(logits)
    value.sum().backward()
    assert abs(value.item() - math.log(2)) < 1e-15 and logits.grad.isfinite().all()


def test_logprobs_of_extreme_logits_are_finite():
    assert token_logprobs(torch.tensor([[[1e4, 0.0]]]), torch.tensor([[1]])).item() == -1e4


@pytest.mark.parametrize("function", [masked_sum, masked_mean, masked_whiten, lambda x, mask: zero_outside(mask, x)])
def test_shapes_that_would_broadcast_are_refused(function):
    with pytest.raises(ValueError, match=r"(?s)mask.*\(3, 1\)|\(3, 1\).*mask") as error:
        function(torch.zeros(3), torch.ones(3, 1))
    assert "(3,)" in str(error.value)


def test_check_names_both_tensors_and_shapes():
    check_same_shape(a=torch.zeros(2), b=None, c=torch.zeros(2))
    message = r"c has shape \(2, 1\), but a has shape \(2,\); they must be equal"
    with pytest.raises(ValueError, match=message):
        check_same_shape(a=torch.zeros(2), b=None, c=torch.zeros(2, 1))


@pytest.mark.parametrize("actions", [(2, 2), (2,), (2, 3, 1)])
def test_token_logprobs_refuses_what_does_not_fit(actions):
    with pytest.raises(ValueError, match=r"logits has shape \(2, 3, 5\), but actions has shape"):
        token_logprobs(torch.zeros(2, 3, 5), torch.zeros(actions, dtype=torch.long))


@pytest.mark.parametrize("temperature", [0, -1.0])
def test_token_logprobs_needs_a_positive_temperature(temperature):
    with pytest.raises(ValueError, match=f"temperature is {temperature}"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature)
