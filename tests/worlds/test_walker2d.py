"""The fast Walker2d against gymnasium's own, to the bit: no tolerance anywhere in this file."""

import numpy as np
import pytest
import torch

from minirl.models.normalizer import ObservationNormalizer
from minirl.models.policies import GaussianPolicy, ValueNetwork
from minirl.worlds.control import ControlWorld
from minirl.worlds.environments import Environments, make_env, make_envs
from minirl.worlds.walker2d import ENV_IDS, Walkers


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ENV_IDS)
def test_10_000_random_steps_are_gymnasiums(env_id):
    env, walkers = make_env(env_id), Walkers(make_env(env_id), 1)
    draw, seed, ends = np.random.default_rng(0), 0, []
    np.testing.assert_array_equal(env.reset(seed=seed)[0], walkers.start(0, seed), strict=True)
    for _ in range(10_000):
        action = draw.uniform(-1, 1, 6).astype(np.float32)
        theirs, ours = env.step(action)[:4], walkers.step([0], action[None])
        np.testing.assert_array_equal(theirs[0], ours[0][0], strict=True)
        assert (float(theirs[1]), bool(theirs[2]), bool(theirs[3])) == tuple(value[0] for value in ours[1:])
        if theirs[2] or theirs[3]:
            seed += 1
            ends.append((theirs[2], theirs[3]))
            np.testing.assert_array_equal(env.reset(seed=seed)[0], walkers.start(0, seed))
    assert len(ends) > 100


@pytest.mark.parametrize("env_id", ENV_IDS)
@pytest.mark.parametrize("limit", [7, 30])
def test_the_time_limit_is_gymnasiums_also_where_a_walker_falls_on_the_last_step(env_id, limit):
    def limited():
        return make_env(env_id, max_episode_steps=limit)

    env, walkers = limited(), Walkers(limited(), 1)
    draw, seen = np.random.default_rng(1), set()
    for seed in range(200):
        env.reset(seed=seed)
        walkers.start(0, seed)
        flags = (False, False)
        while not any(flags):
            action = np.clip(draw.normal(size=6), -1, 1).astype(np.float32)
            flags = tuple(map(bool, env.step(action)[2:4]))
            assert flags == tuple(bool(value[0]) for value in walkers.step([0], action[None])[2:])
        seen.add(flags)
    assert (False, True) in seen and (limit == 7 or {(True, False), (True, True)} <= seen)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_many_walkers_are_as_many_single_ones_with_any_number_of_threads(threads):
    together = Walkers(make_env("Walker2d-v5"), 5, threads)
    alone = [Walkers(make_env("Walker2d-v5"), 1) for _ in range(5)]
    for row in range(5):
        np.testing.assert_array_equal(together.start(row, row), alone[row].start(0, row))
    draw = np.random.default_rng(0)
    for step in range(300):
        rows = np.flatnonzero(draw.random(5) < 0.8)  # some rest, as walkers do whose episode is over
        if not len(rows):
            continue
        actions = draw.uniform(-1, 1, (len(rows), 6)).astype(np.float32)
        found = together.step(rows, actions)
        for place, row in enumerate(rows):
            for ours, single in zip(found, alone[row].step([0], actions[place : place + 1]), strict=True):
                np.testing.assert_array_equal(ours[place], single[0])
            if found[2][place]:
                np.testing.assert_array_equal(together.start(row, step), alone[row].start(0, step))
    together.close()


@pytest.mark.parametrize("env_id", ENV_IDS)
@pytest.mark.parametrize("whole_episodes", [False, True])
def test_a_world_collects_and_evaluates_the_same_with_both(env_id, whole_episodes):
    def run(**how):
        torch.manual_seed(3)
        world = ControlWorld(env_id, 3, whole_episodes, steps=60, reward_scaling=True, warmup_steps=20, **how)
        policy = GaussianPolicy(17, 6, normalizer=ObservationNormalizer(17))
        critic = ValueNetwork(17, normalizer=policy.normalizer)
        batches = [world.collect(policy, critic) for _ in range(2)]
        return world, batches, world.evaluate(policy, 2, seed=5)

    fast, slow = run(), run(backend="gymnasium")
    assert fast[0].fast and not slow[0].fast
    assert fast[2] == slow[2] and fast[0].finished == slow[0].finished and fast[0].env_steps == slow[0].env_steps
    for ours, theirs in zip(fast[1], slow[1], strict=True):
        for name, value in vars(theirs).items():
            assert torch.equal(getattr(ours, name), value) if isinstance(value, torch.Tensor) else True, name


def test_only_the_two_ids_take_it_and_only_when_it_is_not_turned_off():
    assert isinstance(make_envs("Walker2d-v5", 2)[1], Walkers)
    assert isinstance(make_envs("Walker2d-v5", 2, backend="gymnasium")[1], Environments)
    assert isinstance(make_envs("Pendulum-v1", 2)[1], Environments)
    assert set(ENV_IDS) == {"Walker2d-v4", "Walker2d-v5"}
