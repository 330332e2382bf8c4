"""One optimum, three ways to it: the policy that maximises E[r] − β KL(π‖π_ref) is known where it can be enumerated.

    π*(a) = π_ref(a) exp(r(a)/β) / Z          derivative of E_π[r] − β Σ π log(π/π_ref) + λ(Σ π − 1) set to zero

DPO's loss finds it in tests/algorithms/test_dpo.py, decoding with Q# in test_q_sharp.py; here PPO, REINFORCE and TRPO
approach it with the KL as a penalty in the reward.
"""

import pytest
import torch
from torch.distributions import Categorical

from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.functional.kl import categorical_kl
from minirl.functional.returns import token_rewards
from minirl.worlds.batch import Batch

REWARDS, BETA = torch.tensor([1.0, 0.0, 0.5, -1.0, 0.2], dtype=torch.float64), 0.5
REFERENCE = torch.tensor([0.1, 0.4, 0.2, 0.2, 0.1], dtype=torch.float64)
OPTIMUM = REFERENCE * (REWARDS / BETA).exp() / (REFERENCE * (REWARDS / BETA).exp()).sum()


class Table(torch.nn.Module):
    """A policy with a logit for each of five one-token answers to one prompt."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(REFERENCE.log().clone())

    def forward(self, obs):
        return Categorical(logits=self.table.expand(*obs.shape, -1))


class Constant(torch.nn.Module):
    """A critic of one state."""

    def __init__(self):
        super().__init__()
        self.value = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, obs):
        return self.value.expand(obs.shape)


class Answers:
    """A world of one prompt and five answers; its rewards hold the KL penalty, as a TokenWorld's do."""

    def collect(self, policy, critic=None, rows=2000):
        obs = torch.zeros(rows, 1, dtype=torch.long)
        with torch.no_grad():
            actions = policy(obs).sample()
            logprobs, ref_logprobs = policy(obs).log_prob(actions), REFERENCE.log()[actions]
            values = None if critic is None else critic(obs).clone()
        scores, mask = REWARDS[actions].squeeze(1), torch.ones(rows, 1, dtype=torch.bool)
        return Batch(
            obs=obs, actions=actions, logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, scores=scores,
            rewards=token_rewards(scores, logprobs, ref_logprobs, mask, BETA), terminated=mask, truncated=~mask,
            values=values, next_values=None if values is None else torch.zeros_like(values),
            rows_are_sequences=True, kl_in_reward=BETA,
        )  # fmt: skip


CRITIC = {"critic_epochs": 1, "critic_minibatches": 1, "critic_lr": 0.05}
ALGORITHMS = {
    "reinforce": lambda p, c: REINFORCE(p, None, REINFORCEConfig(baseline="ema", lr=0.1)),
    "trpo": lambda p, c: TRPO(p, c, TRPOConfig(gamma=1.0, delta=0.01, delta_decay=True, damping=1e-3, **CRITIC)),
    "ppo": lambda p, c: PPO(p, c, PPOConfig(gamma=1.0, lr=0.05, epochs=4, minibatches=1, **CRITIC)),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_kl_penalty_in_the_reward_leads_to_the_known_optimum(name):
    torch.manual_seed(0)
    policy, critic, world, updates = Table(), Constant(), Answers(), 80
    before = categorical_kl(policy.table.detach(), OPTIMUM.log())
    algorithm = ALGORITHMS[name](policy, critic)
    for update in range(updates):
        algorithm.update(world.collect(policy, getattr(algorithm, "critic", None)), update / updates)
    after = categorical_kl(policy.table.detach(), OPTIMUM.log())
    assert before > 0.5 and after < 0.003, (before, after)
