"""The path-star graph of Q#'s paper (Zhou et al. 2025, section 3.1), in a form that can be enumerated.

d arms of l nodes leave one start; the goal ends one of them, and the answer is that arm. A model trained on next tokens
falls for a shortcut: it names any of the d first nodes, and from then on follows the only edge there is. So it succeeds
with probability 1/d, and since its features do not tell the right first node from the others, REINFORCE has nothing to
raise. A guide that predicts how the reference's answers end can tell, if it sees the whole graph.

Here the shortcut is built in, not trained: the reference's first logits are shared by all graphs (one for each place
in the shuffled list of arms), its later steps are forced, and the guide is a table with an entry per graph and first
node.
That tiny transformers end up there by themselves, and that a guide of their size finds the way, is measured in
data/star_graph.
"""

import pytest
import torch
from torch.distributions import Categorical

from minirl.algorithms.q_sharp import guided_logits, optimal_q, project_to_support
from minirl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from minirl.worlds.batch import Batch

SUPPORT, ETA, GRAPHS = torch.tensor([0.0, 1.0], dtype=torch.float64), 0.1, 200


class Shortcut(torch.nn.Module):
    """Logits over the d places of the list, the same in every graph; the rest of the path follows by itself."""

    def __init__(self, degree):
        super().__init__()
        self.first = torch.nn.Parameter(torch.zeros(degree, dtype=torch.float64))

    def forward(self, obs):
        return Categorical(logits=self.first.expand(*obs.shape, -1))


def graphs(degree, generator):
    """For each of GRAPHS graphs the place of the arm that leads to the goal: arms are shuffled, so any is as likely."""
    return torch.randint(degree, (GRAPHS,), generator=generator)


def success(logits, right):
    """Mean probability of the right first node, (GRAPHS, d) logits; the later steps are forced."""
    return float(logits.softmax(-1).gather(1, right.unsqueeze(1)).mean())


@pytest.mark.parametrize("degree", [2, 5, 20])
def test_reinforce_stays_at_one_over_the_degree_and_q_sharp_solves_the_star(degree):
    generator = torch.Generator().manual_seed(degree)
    torch.manual_seed(degree)
    right = graphs(degree, generator)
    reference = Shortcut(degree)
    assert abs(success(reference.first.expand(GRAPHS, -1).detach(), right) - 1 / degree) < 1e-12

    policy = Shortcut(degree)
    algorithm = REINFORCE(policy, None, REINFORCEConfig(baseline="ema", lr=0.02))
    for update in range(100):  # fresh graphs each time: what is learned must hold for graphs never seen
        target = graphs(degree, generator)
        obs = torch.zeros(GRAPHS, 1, dtype=torch.long)
        with torch.no_grad():
            actions = policy(obs).sample()
            logprobs = policy(obs).log_prob(actions)
        scores, done = (actions.squeeze(1) == target).double(), torch.ones(GRAPHS, 1, dtype=torch.bool)
        algorithm.update(Batch(
            obs=obs, actions=actions, logprobs=logprobs, rewards=scores.unsqueeze(1), scores=scores, terminated=done,
            truncated=~done, mask=done, rows_are_sequences=True,
        ), update / 100)  # fmt: skip
    after = success(policy.first.expand(GRAPHS, -1).detach(), right)
    # Whatever it has drifted to, over all shuffles it is right in 1/d of the graphs; 200 of them: ± 4 deviations.
    assert abs(after - 1 / degree) < 4 * (1 / degree * (1 - 1 / degree) / GRAPHS) ** 0.5

    rollouts = 40 * degree  # of the reference in every graph: each first node is tried about 40 times
    first = Categorical(logits=reference.first.expand(GRAPHS, rollouts, -1)).sample()  # (GRAPHS, rollouts)
    outcomes = (first == right.unsqueeze(1)).double()
    masses = project_to_support(torch.ones_like(outcomes).unsqueeze(-1), outcomes.unsqueeze(-1), SUPPORT)
    tried = torch.nn.functional.one_hot(first, degree).double()  # (GRAPHS, rollouts, d)
    table = torch.einsum("grd,grk->gdk", tried, masses) / tried.sum(1).clamp(min=1).unsqueeze(-1)
    q = optimal_q(table, SUPPORT, ETA)  # 1 on the right arm, 0 on the others
    guided = success(guided_logits(reference.first.expand(GRAPHS, -1), q, ETA).detach(), right)
    exact = torch.tensor(1 / ETA, dtype=torch.float64).exp()
    assert abs(guided - float(exact / (exact + degree - 1))) < 1e-9 and guided > 0.999
