"""ControlWorld on toy environments whose every number is known, and on CartPole, Pendulum and Walker2d."""

import copy
import json
import warnings

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete
from torch.distributions import Categorical, Independent, Normal

from minirl.functional.returns import gae
from minirl.models.normalizer import ObservationNormalizer
from minirl.worlds.control import ControlWorld, make_env


class Counter(gymnasium.Env):
    """Observes (steps so far in this episode, index of the episode); ends after `horizon` steps if that is given.

    Rewards come round robin. Like some real environments it writes on into the array it has returned, and into the
    action it was given. `seeds` and `received` hold, for all instances, the reset seeds and the actions.
    """

    seeds, received = [], []

    def __init__(self, horizon=None, rewards=(1.0,), action_space=None, observation_space=None):
        self.action_space = action_space or Box(-1.0, 1.0, (1,), np.float32)
        self.observation_space = observation_space or Box(-np.inf, np.inf, (2,), np.float64)
        self.horizon, self.rewards, self.taken = horizon, rewards, 0
        self.state = np.array([0.0, -1.0])

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.state[:] = 0.0, self.state[1] + 1
        return self.state, {}

    def step(self, action):
        self.received.append(copy.deepcopy(action))
        if isinstance(action, np.ndarray) and action.ndim:
            action[:] = 77.0
        self.state[0] += 1
        self.taken += 1
        reward = self.rewards[(self.taken - 1) % len(self.rewards)]
        return self.state, reward, self.state[0] == self.horizon, False, {}


class Lottery(gymnasium.Env):
    """Draws initial state and length (1 to 5) from its seed, moves by the action, pays it, and then writes over it."""

    observation_space, action_space = Box(-9, 9, (1,), np.float64), Box(-9, 9, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.state, self.left = self.np_random.standard_normal(1), int(self.np_random.integers(1, 6))
        return self.state, {}

    def step(self, action):
        self.left, self.state, reward = self.left - 1, self.state + action, float(action[0])
        action[:] = 77.0
        return self.state, reward, self.left == 0, False, {}


def register(name, entry=Counter, limit=None, **settings):
    gymnasium.register(f"MinirlTest/{name}-v0", entry, max_episode_steps=limit, kwargs=settings)
    return f"MinirlTest/{name}-v0"


THREE_TRUNCATED = register("ThreeTruncated", limit=3)
THREE_TERMINATED = register("ThreeTerminated", limit=3, horizon=3)  # both flags at once
TWO_TRUNCATED = register("TwoTruncated", limit=2, rewards=(1.0, 2.0, 3.0))
FIVE = register("Five", horizon=5)
FIVE_TRUNCATED = register("FiveTruncated", limit=5)
ENDLESS = register("Endless")
SIX_TORQUES = register("SixTorques", limit=4, action_space=Box(-1.0, 1.0, (6,), np.float32))
FROM_ONE = register("FromOne", limit=4, action_space=Discrete(3, start=1))
LOTTERY = register("Lottery", Lottery, limit=4)


@pytest.fixture(autouse=True)
def fresh():
    Counter.seeds.clear()
    Counter.received.clear()
    torch.manual_seed(0)


class Gaussian(torch.nn.Module):
    """A linear Gaussian policy that keeps the observations it was shown."""

    def __init__(self, obs_dim, action_dim, normalizer=None, std=1.0):
        super().__init__()
        self.linear = torch.nn.Linear(obs_dim, action_dim)
        self.normalizer, self.std, self.shown = normalizer, std, []

    def mode(self, obs):
        self.shown.append(obs)
        return self.linear(obs if self.normalizer is None else self.normalizer.normalize(obs))

    def forward(self, obs):
        mean = self.mode(obs)
        return Independent(Normal(mean, torch.full_like(mean, self.std)), 1)


class Softmax(Gaussian):
    def forward(self, obs):
        return Categorical(logits=super().mode(obs))

    def mode(self, obs):
        return super().mode(obs).argmax(-1)


class Fixed(Normal):
    """A normal distribution whose draw is fixed."""

    def __init__(self, mean, std, draw):
        super().__init__(mean, std)
        self.draw = draw

    def sample(self, sample_shape=()):
        return self.draw.expand(self.mean.shape)


def fixed_policy(draw, std=1.0, shift=0.0):
    draw = torch.tensor(draw)
    return lambda obs: Independent(
        Fixed(torch.full((*obs.shape[:-1], len(draw)), shift), torch.full((len(draw),), std), draw), 1)


def policy_for(world, normalizer=None):
    torch.manual_seed(7)
    return (Softmax if world.discrete else Gaussian)(world.obs_dim, world.action_dim, normalizer)


def table_critic(*episodes):
    """V looked up by (episode, steps so far), the Counter's observation."""
    table = torch.tensor(episodes)
    return lambda obs: table[obs[..., 1].long(), obs[..., 0].long()]


def advantages(batch):
    return gae(batch.rewards, batch.values, batch.next_values, batch.terminated, batch.truncated, 0.99, 0.95)


def tensors(batch):
    return {name: value for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}


def assert_same(first, second):
    assert tensors(first).keys() == tensors(second).keys()
    assert all(torch.equal(value, tensors(second)[name]) for name, value in tensors(first).items())
    np.testing.assert_equal(first.metrics, second.metrics)  # nan equals nan here


# --- what ends an episode, and what follows it ---

def test_a_time_limit_bootstraps_from_the_state_that_really_followed():
    # Reset state of episode 1 is worth 0.1; the truncated state 0.8. By hand, backwards:
    # 1 + .99·.8 − .7 = 1.092; (1 + .99·.7 − .6) + .9405·1.092 = 2.120026; (1 + .99·.6 − .5) + .9405·2.120026 = 3.087884
    world = ControlWorld(THREE_TRUNCATED, steps=3)
    batch = world.collect(policy_for(world), table_critic([0.5, 0.6, 0.7, 0.8], [0.1, 0.1, 0.1, 0.1]))
    assert batch.truncated.tolist() == [[False, False, True]] and not batch.terminated.any()
    adv, returns = advantages(batch)
    np.testing.assert_allclose(adv.numpy(), [[3.087884, 2.120026, 1.092000]], atol=1e-6)
    np.testing.assert_allclose(returns.numpy(), [[3.587884, 2.720026, 1.792000]], atol=1e-6)


def test_a_true_end_at_the_limit_keeps_both_flags_and_termination_wins():
    world = ControlWorld(THREE_TERMINATED, steps=3)
    batch = world.collect(policy_for(world), table_critic([0.5, 0.6, 0.7, 0.8], [0.1, 0.1, 0.1, 0.1]))
    assert batch.terminated.tolist() == batch.truncated.tolist() == [[False, False, True]]
    np.testing.assert_allclose(advantages(batch)[0].numpy(), [[2.387329, 1.375150, 0.3]], atol=1e-6)
    assert world.finished[0]["terminated"] and world.finished[0]["truncated"]


def test_a_cut_in_mid_rollout_leaks_nothing():
    # rewards 1, 2 | 3: δ = 1 + .99·.6 − .5 = 1.094, 2 + .99·.8 − .6 = 2.192, 3 + .99·.9 − .7 = 3.191;
    # the first advantage is 1.094 + .9405·2.192 = 3.155576, and the third stays out of it
    world = ControlWorld(TWO_TRUNCATED, steps=3)
    batch = world.collect(policy_for(world), table_critic([0.5, 0.6, 0.8], [0.7, 0.9, 0.0]))
    np.testing.assert_allclose(advantages(batch)[0].numpy(), [[3.155576, 2.192000, 3.191000]], atol=1e-6)


def test_no_dummy_reset_steps():
    world = ControlWorld(THREE_TRUNCATED, steps=8)
    batch = world.collect(policy_for(world), lambda obs: obs[..., 0])  # V = the step counter shows both ends of a pair
    pairs = list(zip(batch.values[0].tolist(), batch.next_values[0].tolist(), strict=True))
    assert pairs == [(0, 1), (1, 2), (2, 3), (0, 1), (1, 2), (2, 3), (0, 1), (1, 2)]
    assert batch.mask.all() and len(Counter.received) == 8 == world.env_steps
    assert [(row["return"], row["length"], row["end_step"]) for row in world.finished] == [(3.0, 3, 3), (3.0, 3, 6)]
    assert batch.metrics == {"episode_return": 3.0, "episode_length": 3.0, "episodes": 2, "env_steps": 8}
    assert batch.scores.tolist() == [8.0]


def test_episodes_run_on_from_one_collect_to_the_next():
    world = ControlWorld(FIVE, num_envs=2, steps=3)
    policy = policy_for(world)
    batches = [world.collect(policy) for _ in range(2)]
    assert [batch.obs[:, :, 0].tolist() for batch in batches] == [[[0, 1, 2]] * 2, [[3, 4, 0]] * 2]
    assert np.isnan(batches[0].metrics["episode_return"]) and batches[0].metrics["episodes"] == 0
    assert [(row["return"], row["end_step"]) for row in world.finished] == [(5.0, 9), (5.0, 10)]
    assert batches[0].values is None and batches[0].next_values is None


def test_an_environment_without_a_limit_gets_one():
    world = ControlWorld(ENDLESS, steps=1200)
    assert world.collect(policy_for(world)).truncated.nonzero().tolist() == [[0, 999]]
    assert world.evaluate(policy_for(world), episodes=1, seed=0)["lengths"] == [1000]


# --- actions ---

def test_the_buffer_keeps_the_draw_and_the_environment_gets_the_clipped_action():
    # log N(2.5; 0, 1) = −2.5²/2 − ½ ln 2π = −3.125 − 0.918939
    world = ControlWorld(THREE_TRUNCATED, steps=2)
    policy = fixed_policy([2.5])
    batch = world.collect(policy)
    assert batch.actions.tolist() == [[[2.5], [2.5]]]
    assert [action.tolist() for action in Counter.received] == [[1.0], [1.0]]
    np.testing.assert_allclose(batch.logprobs.numpy(), [[-4.043939] * 2], atol=1e-6)
    assert torch.equal(policy(batch.obs).log_prob(batch.actions), batch.logprobs)


def test_six_torques_sum_their_logprobs():
    raw = [0.5, -1.5, 2.5, 0.0, 1.0, -0.2]
    world = ControlWorld(SIX_TORQUES, steps=1)
    policy, moved = fixed_policy(raw, std=0.6), fixed_policy(raw, std=0.6, shift=0.1)
    batch = world.collect(policy)
    np.testing.assert_allclose(Counter.received[0], [0.5, -1.0, 1.0, 0.0, 1.0, -0.2])
    assert batch.logprobs.item() == pytest.approx(-16.045900, abs=1e-5)
    assert policy(batch.obs).entropy().item() == pytest.approx(5.448677, abs=1e-5)
    ratio = (moved(batch.obs).log_prob(batch.actions) - batch.logprobs).exp()
    assert ratio.item() == pytest.approx(1.742909, abs=1e-5)
    kl = torch.distributions.kl_divergence(policy(batch.obs), moved(batch.obs))
    assert kl.item() == pytest.approx(6 * 0.1**2 / (2 * 0.6**2), abs=1e-6)  # 0.083333


def test_discrete_actions_are_indices_and_the_environment_counts_from_its_own_start():
    world = ControlWorld(FROM_ONE, steps=30)
    batch = world.collect(policy_for(world))
    assert world.discrete and world.action_dim == 3
    assert batch.actions.dtype == torch.long and set(batch.actions.flatten().tolist()) == {0, 1, 2}
    assert [int(action) - 1 for action in Counter.received] == batch.actions[0].tolist()


def test_a_diverged_policy_is_reported():
    world = ControlWorld(THREE_TRUNCATED, steps=2)
    with pytest.raises(ValueError, match="non-finite"):
        world.collect(fixed_policy([float("nan")]))


# --- whole episodes ---

def test_whole_episodes_are_padded_and_masked():
    world = ControlWorld(LOTTERY, num_envs=6, whole_episodes=True, seed=1)
    policy = policy_for(world)
    for _ in range(2):
        batch = world.collect(policy, lambda obs: obs[..., 0])
        lengths = batch.mask.sum(1)
        ended = world.finished[-6:]
        assert sorted(lengths.tolist()) == [row["length"] for row in ended]  # shorter ones end first
        assert batch.mask.shape[1] == lengths.max() and len(set(lengths.tolist())) > 1
        for row, length in enumerate(lengths.tolist()):
            assert batch.mask[row].tolist() == [True] * length + [False] * (batch.mask.shape[1] - length)
            flags = batch.terminated[row] | batch.truncated[row]
            assert flags.nonzero().flatten().tolist() == [length - 1]
            assert batch.scores[row].item() == pytest.approx(batch.actions[row, :length].sum().item(), abs=1e-5)
        assert not batch.rewards[~batch.mask].any() and not batch.obs[~batch.mask].any()
        assert all(torch.isfinite(value).all() for value in (batch.values, batch.next_values, batch.logprobs))
        assert batch.metrics["episode_return"] == pytest.approx(batch.scores.mean().item(), abs=1e-6)
    assert any(row["truncated"] for row in world.finished) and any(row["terminated"] for row in world.finished)
    assert world.env_steps == sum(row["length"] for row in world.finished)
    assert batch.max_length == 4 and not batch.rows_are_sequences


@pytest.mark.parametrize("env_id", [LOTTERY, "CartPole-v1"])
def test_a_group_shares_its_initial_state(env_id):
    world = ControlWorld(env_id, num_envs=6, whole_episodes=True, group_size=3)
    policy = policy_for(world)
    first, second = (world.collect(policy) for _ in range(2))
    for batch in (first, second):
        starts = batch.obs[:, 0].reshape(2, 3, -1)
        assert torch.equal(starts, starts[:, :1].expand_as(starts)) and not torch.equal(starts[0], starts[1])
        assert batch.group_size == 3
    assert len({tuple(start.tolist()) for start in torch.cat([first.obs[:, 0], second.obs[:, 0]])}) == 4
    assert len({tuple(row.flatten().tolist()) for row in first.actions[:3]}) == 3  # same state, other actions


# --- normaliser and reward scaler ---

def test_the_normaliser_rests_during_a_rollout_and_is_fed_before_the_next():
    normalizer = ObservationNormalizer(17)
    world = ControlWorld("Walker2d-v5", num_envs=2, steps=64, warmup_steps=50, seed=3)
    policy = policy_for(world, normalizer)
    seen, counts = [], []
    for _ in range(3):
        batch = world.collect(policy)
        counts.append(normalizer.count.item())
        with torch.no_grad():
            for part in batch.minibatches(4):  # (N, 1, 17): the shapes in which an algorithm computes the ratio
                ratio = (policy(part.obs).log_prob(part.actions) - part.logprobs).exp()
                assert (ratio - 1).abs().max() < 1e-5
        seen.append(batch.obs.reshape(-1, 17))
    assert counts == [50, 50 + 128, 50 + 256] and world.env_steps == 3 * 128
    fed = ObservationNormalizer(17)
    probe = ControlWorld("Walker2d-v5", steps=1, warmup_steps=50, seed=3)
    probe.collect(policy_for(probe, fed))
    for part in seen[:2]:
        fed.update(part)
    torch.testing.assert_close(fed.mean, normalizer.mean)
    torch.testing.assert_close(fed.variance, normalizer.variance)


def test_without_warm_up_the_first_rollout_sees_raw_observations():
    normalizer = ObservationNormalizer(2)
    world = ControlWorld(THREE_TRUNCATED, steps=6, normalizer=normalizer)  # given to the world, not to the policy
    policy = policy_for(world)
    world.collect(policy)
    assert normalizer.count.item() == 0
    world.collect(policy)
    assert normalizer.count.item() == 6 and normalizer.mean.tolist() == [1.0, 0.5]


def test_what_has_statistics_is_not_warmed_up():
    normalizer = ObservationNormalizer(2)
    normalizer.update(torch.zeros(3, 2))
    world = ControlWorld(THREE_TRUNCATED, steps=6, warmup_steps=50)
    world.collect(policy_for(world, normalizer))
    assert normalizer.count.item() == 3


def test_warm_up_takes_every_action_the_environment_has():
    world = ControlWorld(FROM_ONE, steps=1, warmup_steps=50)
    world.collect(policy_for(world, ObservationNormalizer(2)))
    assert {int(action) for action in Counter.received[:50]} == {1, 2, 3}


def test_a_rollout_is_fed_once_even_if_the_next_is_interrupted():
    normalizer = ObservationNormalizer(2)
    world = ControlWorld(THREE_TRUNCATED, steps=6, normalizer=normalizer)
    world.collect(policy_for(world))
    for _ in range(2):
        with pytest.raises(ValueError, match="non-finite"):
            world.collect(fixed_policy([float("nan")]))
    assert normalizer.count.item() == 6


def test_padding_never_reaches_the_normaliser():
    normalizer = ObservationNormalizer(1)
    world = ControlWorld(LOTTERY, num_envs=4, whole_episodes=True)
    policy = policy_for(world, normalizer)
    kept = world.collect(policy)
    world.collect(policy)
    assert normalizer.count.item() == kept.mask.sum()
    torch.testing.assert_close(normalizer.mean, kept.obs[kept.mask].mean(0))


@pytest.mark.parametrize("env_id", [FIVE, FIVE_TRUNCATED])
def test_reported_returns_are_never_scaled(env_id):
    normalizer = ObservationNormalizer(2)
    world = ControlWorld(env_id, num_envs=2, steps=10, reward_scaling=True)
    policy = policy_for(world, normalizer)
    batch = world.collect(policy)
    running = np.array([sum(0.99**k for k in range(t + 1)) for t in range(5)] * 4)  # R of an episode, 4 episodes
    np.testing.assert_allclose(batch.rewards.numpy(), np.full((2, 10), 1 / running.std()), rtol=1e-6)
    assert batch.scores.tolist() == [10.0, 10.0] and batch.metrics["episode_return"] == 5.0
    before = copy.deepcopy((normalizer.state_dict(), world.state_dict()))
    result = world.evaluate(policy, episodes=3, seed=1)
    assert result["returns"] == [5.0, 5.0, 5.0] and result["return_mean"] == 5.0 and result["return_std"] == 0.0
    assert result["lengths"] == [5, 5, 5] and result["length_mean"] == 5.0 and result["episodes"] == 3
    after = normalizer.state_dict(), world.state_dict()
    assert str(before) == str(after)


# --- seeds, evaluation, resuming ---

def test_environments_of_one_world_start_apart_and_the_same_seed_starts_the_same():
    def first_obs(seed):
        world = ControlWorld("CartPole-v1", num_envs=3, steps=1, seed=seed)
        return world.collect(policy_for(world)).obs[:, 0]

    assert len({tuple(obs.tolist()) for obs in first_obs(0)}) == 3
    assert torch.equal(first_obs(0), first_obs(0)) and not torch.equal(first_obs(0), first_obs(1))


def test_every_episode_has_a_seed_of_its_own():
    world = ControlWorld(THREE_TRUNCATED, num_envs=3, steps=30, seed=5, warmup_steps=9)
    world.collect(policy_for(world, ObservationNormalizer(2)))
    trained = {row["seed"] for row in world.finished}
    assert len(trained) == 30
    started = set(Counter.seeds)
    assert len(started) == len(Counter.seeds) == 30 + 3 + 4  # three episodes are running; warm-up: 9 steps start a 4th
    Counter.seeds.clear()
    world.evaluate(policy_for(world), episodes=20, seed=5)  # the same number on purpose
    assert len(set(Counter.seeds)) == 20 and not started & set(Counter.seeds)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_evaluation_changes_nothing(env_id):
    def run(evaluating):
        world = ControlWorld(env_id, num_envs=2, steps=30, seed=2, reward_scaling=True, warmup_steps=20)
        policy = policy_for(world, ObservationNormalizer(world.obs_dim))
        batches = []
        for _ in range(3):
            batches.append(world.collect(policy))
            for greedy in (True, False) if evaluating else ():
                world.evaluate(policy, episodes=2, seed=0, greedy=greedy)
        return batches, policy.normalizer.state_dict(), world.state_dict()

    (with_it, *state), (without, *other) = run(True), run(False)
    for first, second in zip(with_it, without, strict=True):
        assert_same(first, second)
    assert str(state) == str(other)


def test_evaluation_repeats_itself_and_can_sample():
    world = ControlWorld("Pendulum-v1", steps=10)
    policy = policy_for(world)
    greedy = [world.evaluate(policy, episodes=2, seed=4)["returns"] for _ in range(2)]
    sampled = []
    for _ in range(2):
        sampled.append(world.evaluate(policy, episodes=2, seed=4, greedy=False)["returns"])
        torch.rand(1)  # the global stream goes on; the evaluation's own does not care
    assert greedy[0] == greedy[1] and sampled[0] == sampled[1]
    assert greedy[0] != world.evaluate(policy, episodes=2, seed=5)["returns"]
    assert world.evaluate(policy)["returns"] == world.evaluate(policy, episodes=5, seed=0)["returns"]
    policy.std = 1e-6  # sampling without noise is what greedy means; with noise it is something else
    noiseless = world.evaluate(policy, episodes=2, seed=4, greedy=False)["returns"]
    assert noiseless == pytest.approx(greedy[0], rel=1e-3) and sampled[0] != pytest.approx(greedy[0], rel=1e-3)


def through_json(state):
    """As a checkpoint would write it: tensors as they are, everything else through text."""
    plain = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
    return {**json.loads(json.dumps(plain)), **{name: v.clone() for name, v in state.items() if name not in plain}}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Walker2d-v5", LOTTERY])
def test_resuming_is_bit_identical(env_id, whole):
    def fresh_world(seed):
        return ControlWorld(env_id, 3, whole, steps=37, seed=seed, reward_scaling=True, warmup_steps=20)

    world = fresh_world(seed=6)
    policy = policy_for(world, ObservationNormalizer(world.obs_dim))
    for _ in range(2):
        world.collect(policy)
    state, saved_policy, rng = through_json(world.state_dict()), copy.deepcopy(policy), torch.get_rng_state()
    straight = [world.collect(policy) for _ in range(2)]

    torch.set_rng_state(rng)
    resumed = fresh_world(seed=99)
    resumed.load_state_dict(state)
    for batch in straight:
        assert_same(batch, resumed.collect(saved_policy))
    assert resumed.finished == world.finished and resumed.env_steps == world.env_steps
    assert str(resumed.state_dict()) == str(world.state_dict())
    assert all(torch.equal(v, policy.state_dict()[name]) for name, v in saved_policy.state_dict().items())


def test_a_state_of_another_world_is_refused_and_a_replay_that_differs_is_reported():
    world = ControlWorld("CartPole-v1", num_envs=2, steps=5)
    world.collect(policy_for(world))
    with pytest.raises(ValueError, match="num_envs"):
        ControlWorld("CartPole-v1", num_envs=3, steps=5).load_state_dict(world.state_dict())
    state = world.state_dict()
    state["obs"][1, 0] += 0.5
    other = ControlWorld("CartPole-v1", num_envs=2, steps=5)
    with pytest.warns(UserWarning, match="replays differently"):
        other.load_state_dict(state)
    assert other.collect(policy_for(other)).mask.all()


# --- environments ---

@pytest.mark.parametrize(("env_id", "feet", "falling"), [("Walker2d-v5", (1.9, 1.9), -0.269975),
                                                         ("Walker2d-v4", (0.9, 1.9), 0.792699)])
def test_walker_versions_differ_where_they_should(env_id, feet, falling):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # v4 is asked for on purpose: no deprecation note
        env = make_env(env_id)
    model = env.unwrapped.model
    assert tuple(model.geom(name).friction[0] for name in ("foot_geom", "foot_left_geom")) == feet
    assert env.spec.max_episode_steps == 1000 and env.unwrapped.dt == pytest.approx(0.008)
    env.reset(seed=0)
    action, terminated = np.ones(6, np.float32), False
    while not terminated:
        _, reward, terminated, _, _ = env.step(action)
        action = -action
    assert reward == pytest.approx(falling, abs=1e-4)
    world = ControlWorld(env_id, steps=2)
    assert (world.obs_dim, world.action_dim, world.discrete, world.env_id) == (17, 6, False, env_id)
    assert (world._space.low == -1).all() and (world._space.high == 1).all()


def test_every_float_is_float32_and_was_so_before_it_moved():
    world = ControlWorld("Walker2d-v5", num_envs=2, steps=8, reward_scaling=True, warmup_steps=8)
    policy = policy_for(world, ObservationNormalizer(17))
    assert make_env("Walker2d-v5").observation_space.dtype == np.float64
    batch = world.collect(policy, lambda obs: policy.shown.append(obs) or obs.sum(-1))
    world.evaluate(policy, episodes=1, seed=0)
    assert {obs.dtype for obs in policy.shown} == {torch.float32}
    assert {value.dtype for value in tensors(batch).values()} == {torch.float32, torch.bool}
    assert all(not value.requires_grad for value in tensors(batch).values())


def test_an_unversioned_id_is_recorded_with_its_version():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ControlWorld("CartPole").env_id == "CartPole-v1"


@pytest.mark.parametrize("env_id", ["Walker3d-v5", "Walker2d-v9", "Walker2d-v2", "no_such_module:Env-v0", "a b", ""])
def test_an_environment_that_cannot_be_made_is_one_line(env_id):
    with pytest.raises(ValueError, match="cannot make environment") as caught:
        ControlWorld(env_id)
    assert "\n" not in str(caught.value)
    assert env_id != "Walker3d-v5" or "Walker2d" in str(caught.value)  # the close match


@pytest.mark.parametrize(("name", "spaces"), [
    ("Image", {"observation_space": Box(0, 255, (8, 8, 3), np.uint8)}),
    ("Named", {"observation_space": Dict({"x": Box(-1, 1, (2,))})}),
    ("Numbered", {"observation_space": Discrete(4)}),
    ("Levers", {"action_space": MultiDiscrete([2, 2])}),
    ("Steps", {"action_space": Box(0, 3, (2,), np.int64)}),
    ("Grid", {"action_space": Box(-1, 1, (2, 2))}),
])
def test_spaces_it_cannot_serve_are_refused_in_one_line(name, spaces):
    with pytest.raises(ValueError, match="one-dimensional") as caught:
        ControlWorld(register(name, limit=3, **spaces))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [
    {"num_envs": 0}, {"steps": 0}, {"group_size": 0}, {"num_envs": 4, "group_size": 2},
    {"num_envs": 3, "group_size": 2, "whole_episodes": True},
])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError, match="group_size"):
        ControlWorld("CartPole-v1", **settings)


def test_close():
    world = ControlWorld(THREE_TRUNCATED, num_envs=2)
    closed = []
    for env in world._envs._envs:
        env.unwrapped.close = lambda: closed.append(1)
    world.close()
    assert closed == [1, 1]
