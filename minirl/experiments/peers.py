"""The yardstick: PPO of Stable-Baselines3 and TRPO of SB3-contrib at rl-zoo's settings, measured by our harness.

Their policies are wrapped as one of ours, so that ControlWorld.evaluate plays them from the same initial states; their
observation statistics (VecNormalize) are part of the wrapped policy, as ours are part of our policies.
"""

import math
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch.distributions import Independent

from minirl.experiments.on_policy import EVALUATION_SEED
from minirl.experiments.run_files import write_json
from minirl.tracking import machine, write_config, write_rows
from minirl.worlds.control import ControlWorld
from minirl.worlds.environments import make_env

try:
    from sb3_contrib import TRPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
except ImportError as error:
    raise ImportError(f'Stable-Baselines3 is missing ({error}); install it with: pip install -e ".[bench]"') from None

# rl-baselines3-zoo, hyperparams/ppo.yml (Walker2d-v3) and trpo.yml (Walker2d-v4); both with `normalize: true`.
PEERS = {
    "sb3-ppo": (PPO, 1, {
        "n_steps": 512, "batch_size": 32, "n_epochs": 20, "learning_rate": 5.05041e-05, "clip_range": 0.1,
        "ent_coef": 0.000585045, "gamma": 0.99, "gae_lambda": 0.95, "max_grad_norm": 1, "vf_coef": 0.871923,
    }),
    "sb3-trpo": (TRPO, 2, {
        "n_steps": 1024, "batch_size": 128, "n_critic_updates": 20, "learning_rate": 1e-3, "cg_max_steps": 25,
        "cg_damping": 0.1, "gamma": 0.99, "gae_lambda": 0.95, "sub_sampling_factor": 1,
    }),
}  # fmt: skip
EVALUATION_COLUMNS = ("env_steps", "return_greedy", "length_greedy", "return_sampled", "length_sampled")
EPISODE_COLUMNS = ("end_step", "return", "length", "terminated", "truncated", "seed")


def peer_versions():
    """dict: package -> installed version."""
    return {name: metadata.version(name) for name in ("stable_baselines3", "sb3_contrib")}


def make_peer(algorithm, env_id, num_envs, settings, seed):
    """A model of SB3 with an MLP policy (64-64 tanh, its default) on normalised environments; trains on the CPU.

    Args:
        algorithm: the class, PPO or TRPO.
        env_id: gymnasium id, of an environment with float actions.
        num_envs: environments stepped in one process.
        settings: keyword arguments of the class, `gamma` among them.
        seed: of everything random in it.
    """
    envs = DummyVecEnv([lambda: Monitor(make_env(env_id))] * num_envs)
    envs = VecNormalize(envs, gamma=settings["gamma"])
    return algorithm("MlpPolicy", envs, seed=seed, device="cpu", **settings)


class PeerPolicy:
    """The policy of an SB3 model on normalised environments, as one of ours: raw observations in, Distribution out.

    It stays the model's own: it learns when the model does, and so do the statistics that normalise.

    Args:
        model: what make_peer gave.
    """

    normalizer = None  # of ours

    def __init__(self, model):
        self._policy, self._envs = model.policy, model.get_vec_normalize_env()

    def __call__(self, obs):
        """(..., obs_dim) raw float32 -> Independent Normal over (..., action_dim) actions."""
        normalized = torch.as_tensor(self._envs.normalize_obs(obs.numpy()))
        return Independent(self._policy.get_distribution(normalized).distribution, 1)

    def mode(self, obs):
        """(..., obs_dim) raw float32 -> (..., action_dim) mean action, not clipped to the environment's bounds."""
        return self(obs).mean


class Harness(BaseCallback):
    """Evaluates a model in training as our runs are, and keeps what happened: `finished` (episodes), `updates`,
    `evaluations` and `timing`, the rows of the four tables of a run.

    Args:
        world: ControlWorld of the same environment id.
        seed: of the model's environments; the one of number i has seed + i.
        total: environment steps of the run.
        every: environment steps between evaluations, which come after the first update that reaches as many; 0 for one
            before and one after training.
        episodes: of an evaluation, greedy ones and as many sampled.
        advance: called with the number of environment steps, each time that some were made.
    """

    def __init__(self, world, seed, total, every, episodes, advance):
        super().__init__()
        self.world, self.seed, self.total, self.every = world, seed, total, every or total
        self.episodes, self.advance = episodes, advance
        self.finished, self.updates, self.evaluations, self.timing = [], [], [], []
        self._reported, self._seen, self._began, self._evaluating = 0, 0, time.perf_counter(), 0.0

    def evaluate(self):
        """Play greedy and sampled episodes, the same initial states every time, and note the means."""
        began, policy = time.perf_counter(), PeerPolicy(self.model)
        played = [self.world.evaluate(policy, self.episodes, EVALUATION_SEED, greedy) for greedy in (True, False)]
        numbers = [result[name] for result in played for name in ("return_mean", "length_mean")]
        self.evaluations.append(dict(zip(EVALUATION_COLUMNS, (self.num_timesteps, *numbers), strict=True)))
        self._evaluating += time.perf_counter() - began

    def after_update(self):
        """A row an update, and an evaluation if one is due."""
        steps, before, learned = self.num_timesteps, self._seen, self.model.logger.name_to_value
        if steps // self.every != before // self.every or steps >= self.total:
            self.evaluate()
        ended, self._reported = self.finished[self._reported :], len(self.finished)
        means = {name: sum(row[name] for row in ended) / len(ended) if ended else math.nan
                 for name in ("return", "length")}  # fmt: skip
        self.updates.append({
            "env_steps": steps, "episode_return": means["return"], "episode_length": means["length"],
            "explained_variance": float(learned["train/explained_variance"]),
            "value_loss": 0.5 * learned["train/value_loss"],  # SB3 reports the squared error, we half of it
        })  # fmt: skip
        seconds = time.perf_counter() - self._began
        self.timing.append({"env_steps": steps, "seconds": round(seconds, 3),
                            "evaluation_seconds": round(self._evaluating, 3)})  # fmt: skip
        self.advance(min(steps, self.total) - before)
        self._seen = steps

    def _on_rollout_start(self):
        if self.num_timesteps:
            self.after_update()
        else:
            self.evaluate()

    def _on_step(self):
        infos, dones = self.locals["infos"], self.locals["dones"]
        for row, (info, done) in enumerate(zip(infos, dones, strict=True)):
            if done:
                truncated = bool(info["TimeLimit.truncated"])  # SB3: by the time limit alone
                values = (self.num_timesteps, info["episode"]["r"], info["episode"]["l"], not truncated, truncated)
                self.finished.append(dict(zip(EPISODE_COLUMNS, (*values, self.seed + row), strict=True)))
        return True


@dataclass(frozen=True)
class PeerJob:
    """One run of a peer: a job for run_jobs, which leaves in `out` what our runs leave (see run_files), but for the
    checkpoint and summary.json, which says that a run is complete.

    The `seed` in episodes.csv is the one of the environment, whose generator runs on from one episode to the next.
    """

    algorithm: str
    """A key of PEERS."""
    env_id: str
    """Gymnasium id with its version."""
    size: int
    """Environment steps; rounded up to whole batches, as SB3 does."""
    out: Path
    """Folder."""
    seed: int = 0
    """Of everything random."""
    eval_every: int = 0
    """Environment steps between evaluations; 0 for one before and one after training."""
    eval_episodes: int = 10
    """Greedy episodes of an evaluation, and as many sampled; the same initial states as of our own runs."""
    overrides: dict = field(default_factory=dict)
    """Settings that replace those of PEERS, by SB3's names."""

    @property
    def title(self):
        """Its name for people."""
        return f"{self.algorithm} seed {self.seed}"

    def run(self, advance):
        """Train to the end and write the files; returns the last row of eval.csv."""
        if self.algorithm not in PEERS:
            raise ValueError(f"no peer {self.algorithm!r}; there are {', '.join(PEERS)}")
        kind, num_envs, settings = PEERS[self.algorithm]
        settings, out = settings | self.overrides, Path(self.out)
        model, world = make_peer(kind, self.env_id, num_envs, settings, self.seed), ControlWorld(self.env_id)
        write_config(out, {
            "algorithm": self.algorithm, "task": world.env_id, "config": settings, "num_envs": num_envs,
            "normalize": True, "env_steps": self.size, "seed": self.seed, "eval_every": self.eval_every,
            "eval_episodes": self.eval_episodes, "eval_seed": EVALUATION_SEED,
        })  # fmt: skip
        write_json(out / "versions.json", machine() | peer_versions())
        harness = Harness(world, self.seed, self.size, self.eval_every, self.eval_episodes, advance)
        try:
            model.learn(self.size, harness, log_interval=None)
            harness.after_update()
        finally:
            model.env.close()
            world.close()
        write_rows(out / "episodes.csv", harness.finished, EPISODE_COLUMNS)
        for name, rows in (("updates", harness.updates), ("eval", harness.evaluations), ("timing", harness.timing)):
            write_rows(out / f"{name}.csv", rows)
        return harness.evaluations[-1]
