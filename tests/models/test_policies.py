"""Token policies with their dropout left on: the mistake is there to be looked at, and only where it is asked for."""

import torch

from minirl.models.policies import TokenPolicy


def noisy_policy(make_gpt, **settings):
    policy = TokenPolicy(make_gpt(dropout=0.5), **settings)
    return policy.train(), torch.randint(8, (2, 6), generator=torch.Generator().manual_seed(0))


def test_kept_dropout_makes_two_distributions_differ(make_gpt):
    policy, ids = noisy_policy(make_gpt, keep_dropout=True)
    first, second = policy(ids), policy(ids)
    assert not torch.equal(first.logits, second.logits)
    actions = ids.roll(-1, 1)
    ratio = (first.log_prob(actions) - second.log_prob(actions)).exp()
    assert (ratio - 1).abs().max() > 0.01  # of a policy to itself: this is what the algorithms would see
    torch.manual_seed(4)
    found = policy(ids).logits
    torch.manual_seed(4)
    wanted = policy.logits(ids).log_softmax(-1)  # the distribution of the logits of supervised training
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_kept_dropout_is_off_in_eval_mode(make_gpt):
    policy, ids = noisy_policy(make_gpt, keep_dropout=True)
    wanted = TokenPolicy(policy.gpt)(ids).logits  # without dropout, whatever the mode
    assert not torch.equal(policy(ids).logits, wanted)
    assert torch.equal(policy.eval()(ids).logits, wanted)


def test_by_default_no_dropout_is_kept(make_gpt):
    policy, ids = noisy_policy(make_gpt)
    assert not policy.keep_dropout
    assert torch.equal(policy(ids).logits, policy(ids).logits) and policy.training and policy.gpt.training


def test_acting_has_no_dropout_in_any_case(make_gpt):
    # what is sampled comes from the function without dropout; only the log-probabilities have noise in them
    policy, ids = noisy_policy(make_gpt, keep_dropout=True)
    plain = TokenPolicy(policy.gpt)
    assert torch.equal(policy.mode(ids), plain.mode(ids))
    assert torch.equal(policy.generate(ids, 4, greedy=True), plain.generate(ids, 4, greedy=True))
    assert policy.training and policy.gpt.training
