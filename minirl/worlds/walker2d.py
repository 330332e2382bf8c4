"""Walkers: many Walker2d's stepped together without what gymnasium adds to a step, and equal to it to the bit.

One `MjData` a walker and a tight loop of `mj_step`; observations, rewards and ends are computed for all walkers at
once. Half again as fast as gymnasium on one core (data/BENCHMARKS.md). MuJoCo's own `rollout` would be shorter, but it
loses each walker's solver warm start, and drifts. Left out of a step: `mj_rnePostConstraint`, whose contact forces
Walker2d never observes.
"""

from concurrent.futures import ThreadPoolExecutor

import mujoco
import numpy as np
from gymnasium.utils.seeding import np_random

ENV_IDS = ("Walker2d-v4", "Walker2d-v5")


class Walkers:
    """Walkers of one version, each in an episode of its own.

    The reward of a step is gymnasium's,  r = (x′ − x)/dt + healthy − 0.001 Σ a²,  where v4 pays `healthy` on the fatal
    step too and v5 does not. An episode terminates when the torso leaves 0.8 < z < 2 or −1 < angle < 1, and is
    truncated at the time limit.

    Args:
        env: a fresh environment from gymnasium.make, of one of ENV_IDS; model and constants are taken from it.
        count: how many walkers.
        threads: that step them, each a share of the walkers; the results are the same with any number.
    """

    def __init__(self, env, count, threads=1):
        inner = env.unwrapped
        self._env, self._inner, self._model = env, inner, inner.model
        self._limit = env.spec.max_episode_steps
        self._pays_fatal_step = env.spec.version < 5
        self._data = [mujoco.MjData(inner.model) for _ in range(count)]
        # Views into MuJoCo's memory, made once: making one costs as much as a tenth of a step.
        self._ctrl, self._qpos, self._qvel = ([getattr(data, name) for data in self._data]
                                              for name in ("ctrl", "qpos", "qvel"))  # fmt: skip
        self._x, self._length = np.zeros(count), np.zeros(count, dtype=int)
        self._threads = min(threads, count)
        self._pool = ThreadPoolExecutor(self._threads) if self._threads > 1 else None

    def start(self, row, seed):
        """Begin an episode of walker `row` as gymnasium's reset(seed=seed) does; returns obs, (17,) float64."""
        inner, data, noise = self._inner, self._data[row], np_random(seed)[0]
        mujoco.mj_resetData(self._model, data)
        scale = inner._reset_noise_scale
        data.qpos[:] = inner.init_qpos + noise.uniform(-scale, scale, self._model.nq)
        data.qvel[:] = inner.init_qvel + noise.uniform(-scale, scale, self._model.nv)
        mujoco.mj_forward(self._model, data)
        self._x[row], self._length[row] = data.qpos[0], 0
        return self._observe([row])[0][0]

    def step(self, rows, actions):
        """Act for 8 ms, four steps of the simulator.

        Args:
            rows: (N,) int, which walkers.
            actions: (N, 6) float32 torques within [−1, 1].
        Returns:
            (obs (N, 17) float64, rewards (N,) float64, terminated (N,) bool, truncated (N,) bool).
        """
        if self._pool is None:
            self._simulate(rows, actions)
        else:
            shares = zip(np.array_split(rows, self._threads), np.array_split(actions, self._threads), strict=True)
            for done in [self._pool.submit(self._simulate, *share) for share in shares]:
                done.result()
        inner = self._inner
        obs, qpos = self._observe(rows)
        speed = (qpos[:, 0] - self._x[rows]) / inner.dt
        self._x[rows] = qpos[:, 0]
        self._length[rows] += 1
        (low, high), (least, most) = inner._healthy_z_range, inner._healthy_angle_range
        z, angle = qpos[:, 1], qpos[:, 2]
        healthy = (low < z) & (z < high) & (least < angle) & (angle < most)
        paid = np.ones(len(z)) if self._pays_fatal_step else healthy.astype(np.float64)
        squares = np.square(actions).sum(1)  # float32, as in gymnasium; weighted one by one, also as there:
        cost = np.array([inner._ctrl_cost_weight * each for each in squares])  # numpy 1 makes a float64 of a scalar
        rewards = inner._forward_reward_weight * speed + inner._healthy_reward * paid - cost
        return obs, rewards, ~healthy, self._length[rows] >= self._limit

    def _simulate(self, rows, actions):
        for row, action in zip(rows, actions, strict=True):
            self._ctrl[row][:] = action
            mujoco.mj_step(self._model, self._data[row], self._inner.frame_skip)

    def _observe(self, rows):
        """(obs (N, 17), qpos (N, 9)): all but the horizontal position, and velocities within ±10."""
        qpos = np.stack([self._qpos[row] for row in rows])
        qvel = np.stack([self._qvel[row] for row in rows]).clip(-10, 10)
        return np.concatenate([qpos[:, 1:], qvel], axis=1), qpos

    def close(self):
        """Free what gymnasium made, and the threads."""
        self._env.close()
        if self._pool is not None:
            self._pool.shutdown()
