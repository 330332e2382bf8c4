"""Supervised fine-tuning: which tokens are targets, and that the model learns to stop."""

import pytest
import torch
import torch.nn.functional as F

from minirl.algorithms.sft import SFT, SFTConfig, likelihood_loss, sft_loss
from minirl.models.policies import TokenPolicy
from minirl.training import fit
from minirl.worlds.text import pack_completions, pack_rows

# B01: L[t][v] = sin(0.7 t + 1.3 v); row [1, 2 | 3, 4, 9] padded with 9, where 9 is the end token as well
LOGITS = torch.sin(0.7 * torch.arange(7.0).double().unsqueeze(1) + 1.3 * torch.arange(10.0).double()).unsqueeze(0)
ACTIONS, MASK = torch.tensor([[2, 3, 4, 9, 9, 9]]), torch.tensor([[0, 1, 1, 1, 0, 0]])


def test_the_end_token_is_a_target_even_where_padding_has_its_id():
    loss, stats = sft_loss(LOGITS[:, :6], ACTIONS, MASK)
    assert abs(loss - 2.474428) < 1e-6 and stats["count"] == 3
    # what goes wrong elsewhere: the end token dropped, padding supervised, the prompt supervised
    faults = (([0, 1, 1, 0, 0, 0], 2.893078), ([0, 1, 1, 1, 1, 1], 2.218361), ([1, 1, 1, 1, 0, 0], 2.357286))
    for faulty, value in faults:
        assert abs(sft_loss(LOGITS[:, :6], ACTIONS, torch.tensor([faulty]))[0] - value) < 1e-6


def test_packed_rows_give_the_same_loss():
    obs, actions, mask = pack_rows([[1, 2], [1]], [[3, 4, 9], [5, 6, 7, 8, 3, 9]], pad_id=9)
    assert obs[0].tolist() == [1, 2, 3, 4, 9, 9] and torch.equal(actions[:1], ACTIONS)
    assert mask[0].tolist() == MASK[0].bool().tolist() and mask[1].all()
    loss, stats = sft_loss(LOGITS[:, :6], actions[:1], mask[:1])
    assert abs(loss - 2.474428) < 1e-6 and stats["count"] == 3


def test_loss_and_gradient_agree_with_torchs_cross_entropy(evidence):
    logits = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
    actions, mask = torch.randint(5, (3, 4)), torch.tensor([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 0, 1]])
    loss, stats = sft_loss(logits, actions, mask)
    reference = F.cross_entropy(logits.flatten(0, 1), actions.masked_fill(mask == 0, -100).flatten())
    gradients = [torch.autograd.grad(value, logits)[0] for value in (loss, reference)]
    paper, torchs = "Ouyang et al. 2022, section 3.5", "`torch.nn.functional.cross_entropy`"
    evidence(paper, sft_loss, torchs, loss, reference, 1e-14)
    evidence(paper, sft_loss, f"gradient of {torchs}", *gradients, 1e-14)
    assert stats["count"] == 7 and not stats["loss"].requires_grad and stats["loss"] == loss


def test_the_likelihood_alone_is_one_mean_over_all_tokens(evidence):
    # rows of token losses 1, 3 and six times 0.5: (1 + 3 + 3) / 8 = 0.875; a mean of row means would be 1.25
    logprobs = torch.full((2, 6), -0.5, dtype=torch.float64)
    logprobs[0] = torch.tensor([-1.0, -3.0, *[float("nan")] * 4])
    logprobs.requires_grad_()
    mask = torch.tensor([[1, 1, 0, 0, 0, 0], [1] * 6])
    loss, stats = likelihood_loss(logprobs, mask)
    loss.backward()
    evidence("Ouyang et al. 2022, section 3.5", likelihood_loss, "eight tokens by hand", loss, 0.875, 0)
    assert stats["loss"] == 0.875 and stats["count"] == 8 and not stats["loss"].requires_grad
    assert torch.equal(logprobs.grad, -mask.double() / 8)
    with pytest.raises(ValueError, match="mask"):
        likelihood_loss(logprobs, mask[:1])


def test_accuracy_counts_targets_only():
    logits = F.one_hot(torch.tensor([[0, 1, 2, 0]]), 3).double()
    _, stats = sft_loss(logits, torch.tensor([[1, 1, 2, 1]]), torch.tensor([[0, 1, 1, 1]]))
    assert abs(stats["token_accuracy"] - 2 / 3) < 1e-15


def test_a_batch_without_targets_has_no_gradient():
    logits = LOGITS.clone().requires_grad_()
    loss, stats = sft_loss(logits[:, :6], ACTIONS, torch.zeros_like(MASK))
    loss.backward()
    assert loss == 0 and stats["count"] == 0 and not logits.grad.any()


def test_shapes_are_checked():
    with pytest.raises(ValueError, match=r"logits has shape \(1, 7, 10\), but actions has shape \(1, 6\)"):
        sft_loss(LOGITS, ACTIONS, MASK)
    with pytest.raises(ValueError, match=r"mask has shape \(1, 1\), but actions has shape \(1, 6\)"):
        sft_loss(LOGITS[:, :6], ACTIONS, MASK[:, :1])


def test_it_learns_an_answer_and_to_stop_by_itself(make_gpt, letters):
    policy = TokenPolicy(make_gpt(torch.float32, std=0.05))
    records = pack_completions(letters, ["a", "bb"], ["fedcb", "gg"])  # six and three tokens with the end
    history = fit(SFT(policy, SFTConfig(lr=0.02)), records, steps=60)
    assert history[-1]["loss"] < 0.1 and history[-1]["token_accuracy"] == 1 and history[0]["loss"] > 1
    prompt = torch.tensor([letters.encode("a")])
    row = policy.generate(prompt, 10, greedy=True, eos_id=letters.eos_id, pad_id=letters.pad_id)[0].tolist()
    assert row == letters.encode("a" + "fedcb") + [letters.eos_id] + [letters.pad_id] * 4


def test_the_class_scores_its_own_tempered_logits(make_gpt, letters):
    policy = TokenPolicy(make_gpt(), temperature=0.5)
    records = pack_completions(letters, ["a", "bb"], ["fed", "gg"])
    loss, _ = SFT(policy).loss(records)
    torch.testing.assert_close(loss, sft_loss(policy.gpt(records.obs) / 0.5, records.actions, records.mask)[0])


def test_the_settings_reach_the_optimizer(make_gpt):
    group = SFT(TokenPolicy(make_gpt()), SFTConfig(lr=0.02, weight_decay=0.3)).optimizer.param_groups[0]
    assert group["lr"] == 0.02 and group["weight_decay"] == 0.3


def test_dropout_acts_in_supervised_training_where_the_config_has_it(make_gpt, letters):
    policy = TokenPolicy(make_gpt(dropout=0.3))
    records = pack_completions(letters, ["a"], ["fed"])
    assert len({SFT(policy).loss(records)[0].item() for _ in range(3)}) == 3
    policy.eval()
    assert len({SFT(policy).loss(records)[0].item() for _ in range(3)}) == 1
