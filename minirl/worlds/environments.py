"""Environments side by side: gymnasium's, in a plain loop, or Walker2d's own fast path behind the same two methods.

gymnasium's vector classes reset an environment behind the caller's back, one step earlier or later by version and mode;
here whoever steps also says when an episode begins.
"""

import warnings

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete

_LIMIT = 1000   # time limit of an environment that has none: the one of gymnasium's MuJoCo tasks


def make_env(env_id, **options):
    """A gymnasium environment with a time limit that ControlWorld can serve; otherwise a ValueError of one line."""
    try:
        with warnings.catch_warnings():
            # Older versions are asked for on purpose, to compare with published results; `env_id` names a missing one.
            warnings.filterwarnings("ignore", message=".*(is out of date|Using the latest versioned)")
            env = gymnasium.make(env_id, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}") from error
    seen, acted = env.observation_space, env.action_space
    flat = isinstance(seen, Box) and len(seen.shape) == 1
    torques = isinstance(acted, Box) and len(acted.shape) == 1 and acted.dtype.kind == "f"
    if not flat or not (torques or isinstance(acted, Discrete)):
        env.close()
        raise ValueError(f"{env_id} observes {seen} and acts in {acted}; ControlWorld needs a one-dimensional Box, and "
                         "a one-dimensional float Box or Discrete")
    return env if env.spec.max_episode_steps else gymnasium.wrappers.TimeLimit(env, _LIMIT)


def make_envs(env_id, count, backend="auto", threads=1):
    """(one of the environments, for its spec and spaces; what starts and steps all of them).

    Args:
        env_id: gymnasium id.
        count: how many.
        backend: "auto" takes worlds.walker2d for the ids that it knows; "gymnasium" never does.
        threads: of worlds.walker2d.
    """
    env = make_env(env_id)
    if backend == "auto" and env.spec.id.startswith("Walker2d-v"):
        from minirl.worlds.walker2d import ENV_IDS, Walkers

        if env.spec.id in ENV_IDS:
            return env, Walkers(env, count, threads)
    return env, Environments([env, *(make_env(env_id) for _ in range(count - 1))])


class Environments:
    """gymnasium environments, one episode running in each."""

    def __init__(self, envs):
        self._envs = envs

    def start(self, row, seed):
        """Begin an episode of environment `row`; returns obs (obs_dim,)."""
        return np.array(self._envs[row].reset(seed=seed)[0])

    def step(self, rows, actions):
        """Act.

        Args:
            rows: (N,) int, which environments.
            actions: (N, ...) as these want them.
        Returns:
            (obs (N, obs_dim), rewards (N,) float64, terminated (N,) bool, truncated (N,) bool).
        """
        # A copy of each action: some environments write into what they were given.
        seen = [self._envs[row].step(action.copy())[:4] for row, action in zip(rows, actions, strict=True)]
        obs, rewards, terminated, truncated = zip(*seen, strict=True)
        return np.stack(obs), np.array(rewards, np.float64), np.array(terminated, bool), np.array(truncated, bool)

    def close(self):
        """Free them."""
        for env in self._envs:
            env.close()
