"""What every algorithm does around its loss, and what must hold for every algorithm alike."""

import copy

import pytest
import torch

from minirl.algorithms.dpo import DPO, DPOConfig
from minirl.algorithms.grpo import GRPO, GRPOConfig
from minirl.algorithms.optimize import Stateful, anneal, average_stats, descend, movement, trainable
from minirl.algorithms.orpo import ORPO, ORPOConfig
from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.algorithms.ppo_kl import PPOKL, PPOKLConfig
from minirl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from minirl.algorithms.rejection_sampling import RejectionSampling, RejectionSamplingConfig
from minirl.algorithms.reward_model import RewardModel, RewardModelConfig
from minirl.algorithms.sft import SFT
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.functional.masked import masked_mean
from minirl.worlds.batch import Pairs
from minirl.worlds.text import pack_completions

EMA = REINFORCEConfig(baseline="ema", lr=0.01)
FEW = dict(critic_epochs=1, critic_minibatches=2)
LEARNED = REINFORCEConfig(baseline="learned", **FEW)
SMALL_PPO = PPOConfig(epochs=2, minibatches=2, value_clip=0.2, target_kl=9.0, **FEW)
SMALL_REJECTION = RejectionSamplingConfig(epochs=2, minibatches=2)
SMALL_TRPO = TRPOConfig(fisher_fraction=0.5, **FEW)
ALGORITHMS = {
    "reinforce-ema": lambda policy, critic: REINFORCE(policy, critic, EMA),
    "reinforce-learned": lambda policy, critic: REINFORCE(policy, critic, LEARNED),
    "reinforce-none": lambda policy, critic: REINFORCE(policy, None, REINFORCEConfig("none")),
    "trpo": lambda policy, critic: TRPO(policy, critic, SMALL_TRPO),
    "ppo": lambda policy, critic: PPO(policy, critic, SMALL_PPO),
    "ppo-kl": lambda policy, critic: PPOKL(policy, critic, PPOKLConfig(epochs=2, minibatches=2, **FEW)),
    "grpo": lambda policy, critic: GRPO(policy, GRPOConfig(epochs=2, minibatches=2, micro_batches=2, kl_beta=0.0)),
    "rejection-sampling": lambda policy, critic: RejectionSampling(policy, SMALL_REJECTION),
}
ON_TEXT = {
    **ALGORITHMS,
    "reinforce-loo": lambda policy, critic: REINFORCE(policy, None, REINFORCEConfig("leave-one-out")),
    "grpo-kl": lambda policy, critic: GRPO(policy, GRPOConfig(kl_beta=0.1, kl_estimator="k3_weighted")),
}
SMOOTHED = DPOConfig(dpo_beta=0.5, label_smoothing=0.1)
FROM_RECORDS = {  # what learns from Completions or Pairs: (policy, reference, critic) -> algorithm
    "sft": lambda policy, reference, critic: SFT(policy),
    "reward-model": lambda policy, reference, critic: RewardModel(critic, RewardModelConfig(centering=0.1)),
    "dpo": lambda policy, reference, critic: DPO(policy, reference, SMOOTHED),
    "dpo-free": lambda policy, reference, critic: DPO(policy, None, DPOConfig(reference_free=True)),
    "orpo": lambda policy, reference, critic: ORPO(policy, ORPOConfig(orpo_lambda=0.5)),
    "orpo-all": lambda policy, reference, critic: ORPO(policy, ORPOConfig(likelihood_scope="all")),
}
from_records = pytest.mark.parametrize("name", FROM_RECORDS)
on_text = pytest.mark.parametrize("make", ON_TEXT.values(), ids=ON_TEXT)
on_control = pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def parameters_of(algorithm):
    modules = [getattr(algorithm, name, None) for name in ("policy", "critic")]
    modules = [module for module in modules if module is not None]
    return torch.cat([p.detach().flatten() for module in modules for p in module.parameters()])


def check(algorithm, before, stats, device="cpu"):
    after = parameters_of(algorithm)
    assert after.isfinite().all() and not torch.equal(before, after)
    for name in ("policy_loss", "entropy", "kl_old_new", "ratio_max", "clip_fraction", "grad_norm", "count"):
        assert name in stats
    for name, value in stats.items():
        if isinstance(value, torch.Tensor):
            assert value.dim() == 0 and not value.requires_grad and value.device.type == device, name
        assert name == "explained_variance" or abs(float(value)) < 1e6, name
        assert not name.endswith("fraction") or 0 <= float(value) <= 1, name


# ---- schedule, averages, one step


def test_anneal():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=9.0)
    for progress, decay, expected in ((0.0, True, 0.5), (0.25, True, 0.375), (1.0, True, 0.0), (0.25, False, 0.5)):
        anneal(optimizer, 0.5, progress, decay)
        assert optimizer.param_groups[0]["lr"] == expected


def test_trainable_leaves_frozen_parameters_out():
    module = torch.nn.Linear(2, 3)
    module.bias.requires_grad_(False)
    assert [id(p) for p in trainable(module)] == [id(module.weight)]


def test_averages_weight_by_count():
    parts = [
        {"loss": tensor(2.0).requires_grad_(), "ratio_max": tensor(1.5), "count": torch.tensor(2)},
        {"loss": tensor(0.5), "ratio_max": tensor(1.1), "count": torch.tensor(6)},
    ]
    stats = average_stats(parts)
    assert stats == {"loss": 0.875, "ratio_max": 1.5, "count": 8} and not stats["loss"].requires_grad
    assert average_stats(parts[:1]) == {"loss": 2, "ratio_max": 1.5, "count": 2}
    assert not average_stats(parts[:1])["loss"].requires_grad
    nothing = [{"loss": tensor(0.0), "count": torch.tensor(0)}] * 2
    assert average_stats(nothing) == {"loss": 0, "count": 0}


ROWS = [[1.0, 3.0], [0.5] * 6], [[4.0], [1.0] * 2, [0.2] * 5]  # token losses of two batches; token mean 0.875 in both


def token_losses(rows):
    """Rows of token losses as (B, T) values and mask."""
    values, mask = torch.zeros(len(rows), 6, dtype=torch.float64), torch.zeros(len(rows), 6)
    for index, row in enumerate(rows):
        values[index, : len(row)], mask[index, : len(row)] = tensor(row), 1
    return values, mask


def step_on(rows, parts, **settings):
    """One SGD step of size 1 on w · token loss, mean over tokens, the rows dealt to `parts` parts -> (w, stats)."""
    w = torch.nn.Parameter(tensor(10.0))
    values, mask = token_losses(rows)

    def losses():
        for index in torch.arange(len(rows)).tensor_split(parts):
            loss = masked_mean(w * values[index], mask[index])
            yield loss, {"loss": loss.detach(), "count": mask[index].sum()}

    stats = descend(torch.optim.SGD([w], lr=1.0), losses(), **settings)
    return w.item(), stats


@pytest.mark.parametrize("rows", ROWS)
def test_the_step_is_that_of_the_whole_batch_however_it_is_split(rows):
    # (1 + 3 + 6 · 0.5) / 8 = (4 + 2 · 1 + 5 · 0.2) / 8 = 0.875; means of means would be 1.25 and 1.733333
    for parts in range(1, len(rows) + 1):
        w, stats = step_on(rows, parts)
        assert abs(w - (10 - 0.875)) < 1e-12 and abs(stats["loss"] - 8.75) < 1e-12
        assert stats["count"] == 8 and abs(stats["grad_norm"] - 0.875) < 1e-12


def test_the_gradient_is_scaled_down_after_its_norm_is_reported():
    w, stats = step_on(ROWS[0], 2, max_grad_norm=0.25)
    assert abs(w - 9.75) < 1e-5 and abs(stats["grad_norm"] - 0.875) < 1e-12
    assert abs(step_on(ROWS[0], 2, max_grad_norm=1.0)[0] - 9.125) < 1e-12


def test_descend_forgets_the_gradient_of_the_step_before():
    w = torch.nn.Parameter(tensor(0.0))
    optimizer = torch.optim.SGD([w], lr=1.0)
    for step in (1, 2):
        descend(optimizer, [(3 * w, {"count": torch.tensor(1)})])
        assert w.item() == -3 * step


def test_a_part_without_tokens_moves_nothing():
    w = torch.nn.Parameter(tensor(1.0))
    loss = masked_mean(w * torch.zeros(1, 2), torch.zeros(1, 2))
    stats = descend(torch.optim.SGD([w], lr=1.0), [(loss, {"count": torch.tensor(0)})], 0.5)
    assert w.item() == 1 and stats["grad_norm"] == 0


def test_movement_is_measured_on_the_old_policys_actions(make_control):
    batch, policy, _ = make_control(episodes=True)
    assert abs(movement(policy, batch)["kl_old_new"]) < 1e-15
    with torch.no_grad():
        policy.log_std += 0.1
    log_ratio = (policy(batch.obs).log_prob(batch.actions) - batch.logprobs)[batch.mask]
    found = movement(policy, batch)["kl_old_new"]
    assert not found.requires_grad and abs(found - (log_ratio.exp() - 1 - log_ratio).mean()) < 1e-12


# ---- what holds for every algorithm


@on_text
def test_updates_on_text_and_then_under_a_foreign_default_device(make, make_text, request):
    world, policy, critic = make_text(torch.float32)
    algorithm = make(policy, critic)
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(world.collect(policy, critic)))
    request.getfixturevalue("foreign_default_device")
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(world.collect(policy, critic), progress=0.5))


@on_control
def test_updates_on_control_and_then_under_a_foreign_default_device(make, make_control, request):
    batch, policy, critic = make_control(torch.float32, episodes=True)
    algorithm = make(policy, critic)
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(batch))
    request.getfixturevalue("foreign_default_device")
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(batch, progress=0.5))


def make_from_records(name, make_text, letters, dtype=torch.float32, device="cpu", **options):
    """(algorithm, records): five rows of different lengths, the prompts' too."""
    world, policy, critic = make_text(dtype, device=device, **options)
    prompts, answers = ["a", "bc", "def", "gh", "c"], (["ab", "c", "", "defga", "a"], ["h", "fedc", "bb", "", "abc"])
    chosen, rejected = (pack_completions(letters, prompts, side, device) for side in answers)
    records = chosen if name == "sft" else Pairs(chosen, rejected)
    return FROM_RECORDS[name](policy, world.reference, critic), records


@from_records
def test_learns_from_records_and_then_under_a_foreign_default_device(name, make_text, letters, request):
    algorithm, records = make_from_records(name, make_text, letters)
    for fixture in ("make_text", "foreign_default_device"):
        request.getfixturevalue(fixture)
        before = parameters_of(algorithm)
        stats = descend(algorithm.optimizer, [algorithm.loss(records)], 1.0)
        assert not torch.equal(before, parameters_of(algorithm))
        assert all(value.device.type == "cpu" and value.isfinite() and value.dim() == 0 for value in stats.values())


@from_records
def test_a_step_from_records_is_the_same_however_they_are_split(name, make_text, letters):
    found = []
    for parts in (1, 2, 5):
        algorithm, records = make_from_records(name, make_text, letters, torch.float64)
        pieces = torch.arange(5).tensor_split(parts)
        stats = descend(algorithm.optimizer, (algorithm.loss(records.rows(piece)) for piece in pieces), 0.5)
        found.append((parameters_of(algorithm), stats))
    for parameters, stats in found[1:]:
        torch.testing.assert_close(parameters, found[0][0], rtol=0, atol=1e-9)
        for key, value in stats.items():
            torch.testing.assert_close(value, found[0][1][key], rtol=0, atol=1e-9, msg=key)
    assert found[0][1]["count"] == (int(records.mask.sum()) if name == "sft" else 5)


@from_records
def test_what_learns_from_records_goes_on_the_same_when_loaded(name, make_text, letters):
    algorithm, records = make_from_records(name, make_text, letters)
    descend(algorithm.optimizer, [algorithm.loss(records)])
    state = copy.deepcopy(algorithm.state_dict())
    other, _ = make_from_records(name, make_text, letters, seed=7)
    other.load_state_dict(state)
    for one in (algorithm, other):
        descend(one.optimizer, [one.loss(records)])
    assert torch.equal(parameters_of(algorithm), parameters_of(other))


@pytest.mark.cuda
@on_text
def test_updates_on_text_on_cuda(make, make_text):
    world, policy, critic = make_text(torch.float32, device="cuda")
    algorithm = make(policy, critic)
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(world.collect(policy, critic)), "cuda")


@pytest.mark.cuda
@on_control
def test_updates_on_control_on_cuda(make, make_control):
    batch, policy, critic = make_control(torch.float32, device="cuda", episodes=True)
    algorithm = make(policy, critic)
    before = parameters_of(algorithm)
    check(algorithm, before, algorithm.update(batch), "cuda")


@pytest.mark.cuda
@from_records
def test_learns_from_records_on_cuda(name, make_text, letters):
    algorithm, records = make_from_records(name, make_text, letters, device="cuda")
    before = parameters_of(algorithm)
    stats = descend(algorithm.optimizer, [algorithm.loss(records)], 1.0)
    assert all(value.is_cuda and value.isfinite() for value in stats.values())
    assert not torch.equal(before, parameters_of(algorithm))


@on_text
def test_same_seed_same_update(make, make_text):
    runs = []
    for _ in range(2):
        world, policy, critic = make_text(torch.float32)
        algorithm = make(policy, critic)
        torch.manual_seed(5)
        stats = [algorithm.update(world.collect(policy, critic)) for _ in range(2)]
        runs.append((parameters_of(algorithm), [{k: float(v) for k, v in row.items()} for row in stats]))
    assert torch.equal(runs[0][0], runs[1][0]) and str(runs[0][1]) == str(runs[1][1])


@on_text
def test_saved_and_loaded_it_goes_on_the_same(make, make_text):
    world, policy, critic = make_text(torch.float32)
    algorithm = make(policy, critic)
    batches = []
    for _ in range(2):
        batches.append(world.collect(policy, critic))
        algorithm.update(batches[-1])
    state = copy.deepcopy(algorithm.state_dict())
    _, other_policy, other_critic = make_text(torch.float32, seed=7)
    other = make(other_policy, other_critic)
    other.load_state_dict(state)
    for one in (algorithm, other):
        torch.manual_seed(3)
        one.update(batches[-1], progress=0.5)
    assert torch.equal(parameters_of(algorithm), parameters_of(other))


def test_state_holds_modules_optimizers_and_numbers_only():
    class Thing(Stateful):
        def __init__(self, number):
            self.layer, self.number, self.config, self.critic = torch.nn.Linear(1, 1), number, object(), None

    state, thing = Thing(1.5).state_dict(), Thing(2.5)
    assert set(state) == {"layer", "number"}
    thing.load_state_dict(state)
    assert thing.number == 1.5 and torch.equal(thing.layer.weight, state["layer"]["weight"])
    with pytest.raises(KeyError, match="number"):
        thing.load_state_dict({"layer": state["layer"]})


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
@pytest.mark.parametrize("name", ["ppo", "grpo", "ppo-kl"])
def test_the_first_ratio_is_one(name, dtype, tolerance, make_text):
    # B04: dropout in the config, train mode, temperature 0.7: still the policy that sampled is the one being trained
    world, policy, critic = make_text(dtype, dropout=0.1, temperature=0.7)
    policy.train(), critic.train(), world.reference.train()
    batch = world.collect(policy, critic)
    one = {
        "ppo": lambda: PPO(policy, critic, PPOConfig(epochs=1, minibatches=1, **FEW)),
        "ppo-kl": lambda: PPOKL(policy, critic, PPOKLConfig(epochs=1, minibatches=1, **FEW)),
        "grpo": lambda: GRPO(policy, GRPOConfig()),
    }[name]()
    stats = one.update(batch)
    assert abs(stats["ratio_max"] - 1) <= tolerance and stats["clip_fraction"] == 0
    ratio = (policy(batch.obs).log_prob(batch.actions) - batch.logprobs).exp()
    assert (ratio[batch.mask] - 1).abs().max() > 1e-3  # the update itself did move the policy


@pytest.mark.parametrize("reduction", ["sequence", "token", "constant"])
def test_micro_batches_change_nothing(reduction, make_text):
    found = []
    for micro_batches in (1, 2, 8):
        world, policy, _ = make_text()
        batch = world.collect(policy)
        config = GRPOConfig(reduction=reduction, micro_batches=micro_batches, kl_beta=0.1, lr=0.01)
        algorithm = GRPO(policy, config)
        torch.manual_seed(0)
        stats = algorithm.update(batch)
        found.append((parameters_of(algorithm), stats))
    for parameters, stats in found[1:]:
        torch.testing.assert_close(parameters, found[0][0], rtol=0, atol=1e-9)
        for name in ("policy_loss", "grad_norm", "count"):
            torch.testing.assert_close(stats[name], found[0][1][name], rtol=0, atol=1e-9)
