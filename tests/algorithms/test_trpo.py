"""TRPO's algebra against explicit matrices, and its promise: KL(old‖new) ≤ δ and a better surrogate, or no step."""

import math

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from minirl.algorithms.ppo import value_loss
from minirl.algorithms.trpo import (
    TRPO,
    TRPOConfig,
    conjugate_gradient,
    fisher_product,
    fisher_vector_product,
    surrogate_loss,
    trust_region_step,
)
from minirl.functional.kl import categorical_kl
from minirl.functional.returns import gae
from minirl.models.policies import CategoricalPolicy, GaussianPolicy, TokenPolicy


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-6):
    expected = tensor(expected) if isinstance(expected, (list, float)) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


class Softmax(torch.nn.Module):
    """The same three logits in every state."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(tensor(logits))

    def forward(self, obs):
        return Categorical(logits=self.logits.expand(*obs.shape[:2], -1))


class Gaussian(torch.nn.Module):
    def __init__(self, std):
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(len(std), dtype=torch.float64))
        self.log_std = torch.nn.Parameter(tensor(std).log())

    def forward(self, obs):
        mean = self.mean.expand(*obs.shape[:2], -1)
        return Independent(Normal(mean, self.log_std.exp().expand_as(mean)), 1)


FISHER = "Schulman et al. 2015, appendix C"
ONE, ALL = torch.zeros(1, 1, 1), torch.ones(1, 1)


def dense_fisher(policy, obs, mask):
    """Hessian of the mean exact KL(old‖·) at the policy's parameters, from the definition, with torch's own hessian."""
    names, tensors = zip(*((n, p) for n, p in policy.named_parameters() if p.requires_grad), strict=True)
    sizes = [p.numel() for p in tensors]
    with torch.no_grad():
        old = policy(obs)

    def mean_kl(vector):
        parts = [v.view_as(p) for v, p in zip(vector.split(sizes), tensors, strict=True)]
        new = functional_call(policy, dict(zip(names, parts, strict=True)), (obs,))
        return kl_divergence(old, new)[mask.bool()].mean()

    with sdpa_kernel(SDPBackend.MATH):
        start = torch.cat([p.detach().flatten() for p in tensors])
        return torch.autograd.functional.hessian(mean_kl, start)


def outer_products(policy, obs, mask):
    """Σ_a π(a|s) ∇log π(a|s) ∇log π(a|s)ᵀ, mean over states: the Fisher matrix as an expectation, no KL anywhere."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    logprobs = policy(obs).logits[mask.bool()].log_softmax(-1)
    total = 0.0
    for value in logprobs.flatten():
        row = torch.autograd.grad(value, parameters, retain_graph=True)
        row = torch.cat([g.flatten() for g in row])
        total = total + value.detach().exp() * row[:, None] * row
    return total / len(logprobs)


# ---- the Fisher matrix


def test_fisher_vector_product_of_a_softmax(evidence):
    # F = diag(p) − p pᵀ; the KL with its old side not detached would give (0, 0, 0)
    policy, v = Softmax([1, 0, -1]), tensor([1, 2, 3])
    product = fisher_vector_product(policy, ONE, ALL, v, damping=0.0)
    close(product, [-0.282587, 0.140770, 0.141817])
    close(v @ product, 0.424405)
    close(fisher_vector_product(policy, ONE, ALL, v, damping=0.1), [-0.182587, 0.340770, 0.441817])
    close(fisher_vector_product(policy, ONE, ALL, v), [-0.182587, 0.340770, 0.441817])  # 0.1 is the default
    p = policy.logits.detach().softmax(0)
    right = (p.diag() - p[:, None] * p) @ v
    evidence(FISHER, fisher_vector_product, "diag(p) − p pᵀ of a softmax", product, right, 1e-14)
    close(dense_fisher(policy, ONE, ALL), p.diag() - p[:, None] * p, 1e-12)


@pytest.mark.parametrize("std, of_the_mean", [(0.5, 4.0), (2.0, 0.25)])
def test_fisher_of_a_gaussian(std, of_the_mean, evidence):
    policy = Gaussian([std, 1.0])
    matvec = fisher_product(policy, ONE, ALL, damping=0.0)
    matrix = torch.stack([matvec(unit) for unit in torch.eye(4, dtype=torch.float64)])
    right = tensor([of_the_mean, 1, 2, 2]).diag()
    evidence(FISHER, fisher_product, "1/σ² and 2 of a Gaussian", matrix, right, 1e-12)


def test_the_product_may_be_used_many_times():
    matvec = fisher_product(Softmax([1, 0, -1]), ONE, ALL, damping=0.0)
    for _ in range(3):
        close(matvec(tensor([1, 2, 3])), [-0.282587, 0.140770, 0.141817])
    close(fisher_product(Softmax([1, 0, -1]), ONE, ALL)(tensor([1, 2, 3])), [-0.182587, 0.340770, 0.441817])


def obs_and_mask():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, 4, 2, generator=generator, dtype=torch.float64), torch.rand(3, 4, generator=generator) < 0.7


@pytest.mark.parametrize("kind", [CategoricalPolicy, GaussianPolicy])
def test_products_of_a_network_are_those_of_the_dense_matrix(kind, evidence):
    torch.manual_seed(0)
    policy, (obs, mask) = kind(2, 3, hidden=(4,)).double(), obs_and_mask()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    dense = dense_fisher(policy, obs, mask)
    if kind is CategoricalPolicy:
        close(dense, outer_products(policy, obs, mask), 1e-12)
    v = torch.randn(len(dense), dtype=torch.float64)
    found = fisher_vector_product(policy, obs, mask, v, damping=0.0)
    evidence(FISHER, fisher_vector_product, "Hessian of the exact KL of a network", found, dense @ v, 1e-12)
    everywhere = torch.ones_like(mask)
    assert (fisher_vector_product(policy, obs, everywhere, v, damping=0.0) - dense @ v).abs().max() > 1e-3


def test_products_of_a_gpt_are_those_of_the_dense_matrix(make_gpt, evidence):
    # second derivatives through embeddings, attention, LayerNorm and GELU
    policy = TokenPolicy(make_gpt(vocab_size=4, block_size=4, n_embd=4, n_inner=4), temperature=0.7)
    policy.gpt.wpe.weight.requires_grad_(False)  # vectors run over the others only
    obs, mask = torch.tensor([[0, 1, 2, 3], [2, 2, 1, 0]]), torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    dense = dense_fisher(policy, obs, mask)
    assert len(dense) == sum(p.numel() for p in policy.parameters()) - 16
    close(dense, outer_products(policy, obs, mask), 1e-11)
    v = torch.randn(len(dense), dtype=torch.float64)
    found = fisher_vector_product(policy, obs, mask, v, damping=0.2)
    evidence(FISHER, fisher_vector_product, "Hessian of the exact KL of a GPT", found, dense @ v + 0.2 * v, 1e-11)


# ---- conjugate gradient


def test_conjugate_gradient_on_a_diagonal():
    # H = diag(4, 1, 1/4), b = (1, 1, 1): three distinct eigenvalues, three iterations
    diagonal, b = tensor([4, 1, 0.25]), tensor([1, 1, 1])
    solutions = [conjugate_gradient(lambda v: diagonal * v, b, iterations) for iterations in (1, 2, 3)]
    close(solutions[-1], [0.25, 1, 4])
    values = [float(0.5 * x @ (diagonal * x) - b @ x) for x in solutions]
    close(tensor(values), [-0.857143, -1.915966, -2.625])
    assert conjugate_gradient(lambda v: diagonal * v, b, 0).tolist() == [0, 0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_conjugate_gradient_solves_in_as_many_steps_as_there_are_dimensions(seed, evidence):
    generator = torch.Generator().manual_seed(seed)
    root, b = torch.randn(6, 6, generator=generator, dtype=torch.float64), torch.randn(6, generator=generator).double()
    matrix = root @ root.T + torch.eye(6, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, b)
    found = conjugate_gradient(lambda v: matrix @ v, b, 6, tolerance=0.0)
    evidence("Hestenes and Stiefel 1952", conjugate_gradient, "`torch.linalg.solve`", found, exact, 1e-9)
    assert (conjugate_gradient(lambda v: matrix @ v, b, 3, tolerance=0.0) - exact).norm() > 1e-4


def test_conjugate_gradient_stops_when_it_is_done():
    calls = []

    def matvec(v):
        calls.append(v)
        return 2 * v

    close(conjugate_gradient(matvec, tensor([1, 2, 3]), iterations=10), [0.5, 1, 1.5], 1e-15)
    assert len(calls) == 1
    assert not conjugate_gradient(matvec, torch.zeros(3)).any() and len(calls) == 1
    loose = conjugate_gradient(lambda v: tensor([1.0, 1.1]) * v, tensor([1.0, 1.0]), tolerance=0.01)
    assert 0 < (loose * tensor([1.0, 1.1]) - 1).square().sum() <= 0.01  # one step is near enough


def test_conjugate_gradient_ends_at_a_direction_without_curvature():
    assert conjugate_gradient(lambda v: 0 * v, tensor([1, 1])).tolist() == [0, 0]
    assert conjugate_gradient(lambda v: -v, tensor([1, 1])).tolist() == [0, 0]
    x = conjugate_gradient(lambda v: tensor([1, 0]) * v, tensor([1, 1]))
    assert x.isfinite().all()


# ---- the surrogate


def test_surrogate_by_hand(evidence):
    # ratios 2 and 0.5, advantages 3 and −4: −(6 − 2) / 2
    logprobs, old = tensor([[math.log(2), math.log(0.5), 5]]).requires_grad_(), torch.zeros(1, 3, dtype=torch.float64)
    advantages = tensor([[3, -4, float("nan")]]).requires_grad_()
    loss, stats = surrogate_loss(logprobs, old, advantages, torch.tensor([[1, 1, 0]]))
    loss.backward()
    paper = "Schulman et al. 2015, eq. 14"
    evidence(paper, surrogate_loss, "two actions by hand", loss, -2.0, 1e-12)
    assert stats["count"] == 2 and abs(stats["ratio_max"] - 2) < 1e-12
    evidence(paper, surrogate_loss, "its gradient by hand", logprobs.grad, [[-3.0, 1.0, 0.0]], 1e-12)
    assert advantages.grad is None and not stats["policy_loss"].requires_grad


def test_surrogate_treats_the_old_policy_as_a_constant():
    old = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    loss, _ = surrogate_loss(old + 0.1, old, torch.ones(1, 2), torch.ones(1, 2))
    loss.backward()
    close(old.grad, torch.full((1, 2), -0.5 * math.exp(0.1)).double(), 1e-7)


@pytest.mark.parametrize("wrong", [1, 2, 3])
def test_surrogate_refuses_shapes_that_would_broadcast(wrong):
    inputs = [torch.zeros(2, 3)] * 4
    inputs[wrong] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"has shape \(2, 1\), but logprobs has shape \(2, 3\)"):
        surrogate_loss(*inputs)


# ---- the step


def bandit_problem(gradient):
    """Actions and advantages at which the gradient of the surrogate on (1, 0, −1) is the given one.

    One row per action, each weighted so that the mean of ratio · A is p-free: A_a = 3 g_a, ratio 1 and ∇ratio = ∇log π;
    since the gradient entries sum to 0, Σ_a A_a (e_a − p) / 3 = g.
    """
    policy, actions = Softmax([1, 0, -1]), torch.tensor([[0, 1, 2]])
    obs = torch.zeros(1, 3, 1)
    return policy, obs, actions, policy(obs).log_prob(actions).detach(), 3 * tensor([gradient]), torch.ones(1, 3)


def test_one_step_by_known_numbers(evidence):
    policy, *problem = bandit_problem([0.3, -0.1, -0.2])
    old = policy.logits.detach().clone()
    stats = trust_region_step(policy, *problem, delta=0.01, damping=0.1)
    paper, step = "Schulman et al. 2015, eq. 14 and appendix C", policy.logits.detach() - old
    hand = "three logits by hand, 6 digits"
    evidence(paper, trust_region_step, hand, step, [0.177412, 0.008619, -0.186030], 1e-6)
    close(stats["kl_old_new"], 0.006345)
    kl = categorical_kl(old, policy.logits.detach())
    evidence(paper, trust_region_step, "`categorical_kl(old, new)` of the step", stats["kl_old_new"], kl, 1e-12)
    assert stats["accepted"] and stats["backtracks"] == 0 and stats["count"] == 3
    close(stats["grad_norm"], math.sqrt(0.14), 1e-12)
    close(stats["entropy"], Categorical(logits=old).entropy(), 1e-12)
    before, after = (surrogate_loss(Softmax(x.tolist())(problem[0]).log_prob(problem[1]), *problem[2:])
                     for x in (old, policy.logits.detach()))
    close(stats["surrogate_gain"], (before[0] - after[0]).detach(), 1e-12)
    close(stats["policy_loss"], before[0].detach(), 1e-12)
    close(stats["ratio_max"], after[1]["ratio_max"], 1e-12)


@pytest.mark.parametrize("scale", [1e-9, 1e-3, 1e6])
def test_the_step_does_not_depend_on_the_unit_of_reward(scale):
    policy, *problem = bandit_problem([0.3, -0.1, -0.2])
    problem[3] = scale * problem[3]
    assert trust_region_step(policy, *problem)["accepted"]
    close(policy.logits.detach() - tensor([1, 0, -1]), [0.177412, 0.008619, -0.186030])


@pytest.mark.parametrize("advantages", [[0, 0, 0], [1, 1, 1]])
def test_a_zero_gradient_moves_nothing(advantages):
    policy, *problem = bandit_problem([0.0, 0.0, 0.0])
    problem[3] = tensor([advantages])  # equal advantages weight (e_a − p) evenly: not 0 unless p is uniform
    policy.logits.data.zero_()
    problem[2] = policy(problem[0]).log_prob(problem[1]).detach()
    stats = trust_region_step(policy, *problem)
    assert not stats["accepted"] and stats["backtracks"] == 10
    assert policy.logits.abs().max() < 1e-6 and all(torch.as_tensor(v).isfinite().all() for v in stats.values())


def random_problem(seed, kind=CategoricalPolicy):
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    policy = kind(2, 3, hidden=(4,)).double()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.5 * torch.randn_like(parameter)
    obs = torch.randn(4, 5, 2, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    with torch.no_grad():
        actions = policy(obs).sample()
        logprobs = policy(obs).log_prob(actions)
    advantages = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    return policy, obs, actions, logprobs, advantages, mask


def parameters_of(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


@pytest.mark.parametrize("kind", [CategoricalPolicy, GaussianPolicy])
@pytest.mark.parametrize("delta", [0.001, 0.05, 0.5])
def test_an_accepted_step_keeps_its_promise(kind, delta):
    accepted = backtracked = 0
    for seed in range(12):
        policy, obs, actions, logprobs, advantages, mask = random_problem(seed, kind)
        with torch.no_grad():
            old = policy(obs)
        start = parameters_of(policy)
        stats = trust_region_step(policy, obs, actions, logprobs, advantages, mask, delta=delta, damping=0.001)
        with torch.no_grad():
            new = policy(obs)
        if stats["accepted"]:
            accepted += 1
            kl = kl_divergence(old, new)[mask].mean()
            gain = (((new.log_prob(actions) - logprobs).exp() - 1) * advantages)[mask].mean()
            assert kl <= delta and gain > 0
            close(stats["kl_old_new"], kl, 1e-12)
            close(stats["surrogate_gain"], gain, 1e-12)
            backtracked += stats["backtracks"] > 0
        else:
            assert torch.equal(parameters_of(policy), start)
    assert accepted >= 6
    assert delta < 0.5 or backtracked  # where the quadratic model is poor the line search has work to do


def test_the_kl_is_directed_from_old_to_new():
    # a Gaussian that may only widen or narrow: the two directions differ most there
    policy = Gaussian([1.0])
    obs, actions = torch.zeros(1, 2, 1), tensor([[[2.0], [0.1]]])
    logprobs = policy(obs).log_prob(actions).detach()
    stats = trust_region_step(policy, obs, actions, logprobs, tensor([[1, -1]]), torch.ones(1, 2), delta=0.3)
    new_mean, new_std = policy.mean.item(), policy.log_std.exp().item()
    assert abs(new_std - 1) > 0.1
    close(stats["kl_old_new"], math.log(new_std) + (1 + new_mean**2) / (2 * new_std**2) - 0.5, 1e-12)


@pytest.mark.parametrize("trouble", ["no better step", "advantages are not numbers"])
def test_a_rejected_step_leaves_every_bit(trouble):
    policy, obs, actions, logprobs, advantages, mask = random_problem(3)
    policy.float()
    start = parameters_of(policy)
    if trouble == "no better step":
        inputs = dict(delta=1e8, max_backtracks=2)  # two shrinkings cannot bring such a step into the region it claims
        advantages = advantages * 0 + torch.where(torch.rand(4, 5) < 0.5, 1e-12, -1e-12)
    else:
        inputs, advantages = {}, advantages * float("nan")
    stats = trust_region_step(policy, obs.float(), actions, logprobs.float(), advantages.float(), mask, **inputs)
    assert not stats["accepted"] and stats["kl_old_new"] == 0
    assert parameters_of(policy).numpy().tobytes() == start.numpy().tobytes()
    assert stats["backtracks"] == inputs.get("max_backtracks", 10)


def test_the_line_search_shrinks_by_its_factor():
    # a surrogate that only gets better for a step 0.5^3 as long: count the tries by the parameters that were tried
    tried = []

    class Watched(Softmax):
        def forward(self, obs):
            if not torch.is_grad_enabled():
                tried.append(self.logits.detach().clone())
            return super().forward(obs)

    policy = Watched([1, 0, -1])
    _, *problem = bandit_problem([0.3, -0.1, -0.2])
    problem[3] = problem[3] - 1e9 * torch.ones(1, 3)  # better only where all three sampled ratios fall: nowhere near
    stats = trust_region_step(policy, *problem, backtrack=0.5, max_backtracks=3)
    steps = [(x - tensor([1, 0, -1])).norm().item() for x in tried]
    longest = max(steps)
    wanted = [longest * 0.5**j for j in range(int(stats["backtracks"]) + 1)]
    close(tensor([step for step in steps if step > 0]), tensor(wanted), 1e-12)


def test_the_fisher_fraction_takes_evenly_spaced_rows():
    torch.manual_seed(0)
    policy, obs = CategoricalPolicy(1, 3, hidden=()).double(), torch.arange(10.0, dtype=torch.float64).view(10, 1, 1)
    actions, mask, advantages = torch.randint(3, (10, 1)), torch.ones(10, 1), torch.randn(10, 1, dtype=torch.float64)
    logprobs = policy(obs).log_prob(actions).detach()
    start = parameters_of(policy)
    loss, _ = surrogate_loss(policy(obs).log_prob(actions), logprobs, advantages, mask)
    gradient = -torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    for fraction, rows in ((0.3, [0, 3, 6]), (1.0, range(10)), (0.01, [0])):
        dense = dense_fisher(policy, obs[list(rows)], mask[list(rows)]) + 0.3 * torch.eye(6, dtype=torch.float64)
        wanted = torch.linalg.solve(dense, gradient)
        stats = trust_region_step(policy, obs, actions, logprobs, advantages, mask, 1e-4, damping=0.3,
                                  max_backtracks=40, fisher_fraction=fraction)
        step = parameters_of(policy) - start
        torch.nn.utils.vector_to_parameters(start.clone(), policy.parameters())
        assert stats["accepted"]
        close(step / step.norm(), wanted / wanted.norm(), 1e-4)


# ---- the class


def test_the_class_moves_policy_and_critic(make_control):
    batch, policy, critic = make_control()
    config = TRPOConfig(critic_epochs=20, critic_minibatches=4, delta=0.02)
    algorithm = TRPO(policy, critic, config)
    with torch.no_grad():
        old = policy(batch.obs)
    stats = algorithm.update(batch)
    with torch.no_grad():
        kl = kl_divergence(old, policy(batch.obs)).mean()
    assert stats["accepted"] and 0 < kl <= 0.02 and stats["count"] == 20
    close(stats["kl_old_new"], kl, 1e-12)
    _, returns = gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.99, 0.95)
    before, after = (value_loss(v, v, returns, batch.mask)[0] for v in (batch.values, critic(batch.obs)))
    assert after < before


def test_the_class_whitens_advantages_and_passes_its_settings_on(make_control):
    batch, policy, critic = make_control(episodes=True)
    _, other, _ = make_control(episodes=True)
    advantages, _ = gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.9, 0.8)
    counted = advantages[batch.mask]
    advantages = (advantages - counted.mean()) / counted.std()
    steps = trust_region_step(other, batch.obs, batch.actions, batch.logprobs, advantages, batch.mask,
                              delta=0.03, damping=0.4, iterations=3, backtrack=0.6, max_backtracks=4)
    config = TRPOConfig(gamma=0.9, gae_lambda=0.8, delta=0.03, damping=0.4, cg_iterations=3, backtrack=0.6,
                        max_backtracks=4)
    stats = TRPO(policy, critic, config).update(batch)
    close(parameters_of(policy), parameters_of(other), 1e-7)
    for name, value in steps.items():
        close(torch.as_tensor(stats[name]).double(), torch.as_tensor(value).double(), 1e-7)


def test_the_schedule_shrinks_the_trust_region(make_control):
    for progress, decay, limit in ((0.0, True, 0.02), (0.9, True, 0.002), (0.9, False, 0.02)):
        batch, policy, critic = make_control()
        config = TRPOConfig(delta=0.02, delta_decay=decay, lr_decay=decay, damping=1e-6, critic_epochs=1)
        algorithm = TRPO(policy, critic, config)
        kl = algorithm.update(batch, progress)["kl_old_new"]
        assert limit / 2 < kl <= limit
        assert algorithm.critic_optimizer.param_groups[0]["lr"] == (1e-3 * (1 - progress) if decay else 1e-3)


def test_on_control_a_share_of_the_rows_is_a_share_of_the_steps(make_control):
    # four rows of five steps: a tenth of them are two steps, not a row of five
    batch, policy, critic = make_control()
    seen, forward = [], policy.forward
    policy.forward = lambda obs: seen.append(tuple(obs.shape)) or forward(obs)
    TRPO(policy, critic, TRPOConfig(fisher_fraction=0.1, critic_epochs=1, critic_minibatches=1)).update(batch)
    assert (2, 1, 3) in seen and (20, 1, 3) in seen
