"""ControlWorld: any gymnasium environment with a flat observation, as a place where a policy gathers a Batch.

The state that really followed a step is written down before the next episode begins. Actions are stored as sampled and
clipped only on their way into the environment. Who steps the environments is said in worlds.environments.
"""

import warnings
from itertools import islice

import numpy as np
import torch
from gymnasium.spaces import Discrete

from minirl.models.normalizer import RewardScaler
from minirl.worlds.batch import Batch
from minirl.worlds.environments import Environments, make_env, make_envs  # noqa: F401 (make_env: public here)

_BLOCK = 2**30  # seeds of training, evaluation and warm-up lie in three blocks of this size, so they never meet


class _Episode:
    """The episode running in one environment: what it takes to report it and to replay it."""

    def __init__(self, seed):
        self.seed, self.actions, self.total, self.ended = seed, [], 0.0, False


class ControlWorld:
    """Environments that a policy acts in, as rollouts of fixed length or as whole episodes.

    Args:
        env_id: gymnasium id; without a version the newest is taken, and `.env_id` says which.
        num_envs: B, the rows of a batch.
        whole_episodes: False: T = `steps`, and episodes run on from one collect to the next. True: each collect plays
            one episode a row from beginning to end; shorter rows are padded and masked.
        steps: T, steps of each environment in a collect (PPO paper, table 3: 2048).
        group_size: neighbouring rows that start in one state (GRPO); more than 1 needs whole episodes.
        reward_scaling: divide `rewards` by the deviation of the discounted return; scores and returns stay raw.
        gamma: discount of that return.
        seed: of all episodes; each has one of its own, recorded in `finished`.
        warmup_steps: random actions in an environment apart, before the first collect, for a normaliser that has seen
            nothing yet; not counted in `env_steps`.
        normalizer: the ObservationNormalizer to feed; None: the policy's own, if it has one. It rests while a rollout
            is collected and learned from, and is fed its raw observations at the start of the next collect.
        device: where policy and batch live.
        backend: "auto" steps Walker2d without gymnasium's overhead, to the same bits; "gymnasium" steps all with it.
        threads: that step walkers on the fast path.
    Attributes:
        fast: whether that fast path is taken.
        obs_dim, action_dim, discrete: where discrete, action_dim is the number of actions.
        env_steps: training steps so far, all environments together.
        finished: dicts: end_step (env_steps then), return (raw), length, terminated, truncated, seed of each episode.
    Raises:
        ValueError: if the environment cannot be made or served, or a number does not fit.
    """

    def __init__(self, env_id, num_envs=1, whole_episodes=False, steps=2048, group_size=1, reward_scaling=False,
                 gamma=0.99, seed=0, warmup_steps=0, normalizer=None, device="cpu", backend="auto", threads=1):
        if min(num_envs, steps, group_size) < 1:
            raise ValueError(f"num_envs={num_envs}, steps={steps}, group_size={group_size}; each must be at least 1")
        if group_size > 1 and (not whole_episodes or num_envs % group_size):
            raise ValueError(f"group_size={group_size} needs whole_episodes and num_envs ({num_envs}) divisible by it")
        self.num_envs, self.whole_episodes, self.group_size, self.seed = num_envs, whole_episodes, group_size, seed
        self.warmup_steps, self.normalizer, self.device = warmup_steps, normalizer, torch.device(device)
        self._made_from, self._backend = env_id, backend
        env, self._envs = make_envs(env_id, num_envs, backend, threads)
        self.fast = not isinstance(self._envs, Environments)
        self.env_id, self.obs_dim, self._space = env.spec.id, env.observation_space.shape[0], env.action_space
        self.discrete = isinstance(self._space, Discrete)
        self.action_dim = int(self._space.n) if self.discrete else self._space.shape[0]
        self.max_length = env.spec.max_episode_steps if whole_episodes else steps
        self._scaler = RewardScaler(num_envs, gamma) if reward_scaling else None
        self._settings = {"env_id": self.env_id, "num_envs": num_envs, "whole_episodes": whole_episodes,
                          "reward_scaling": reward_scaling}
        self._episodes, self._obs = [None] * num_envs, np.zeros((num_envs, self.obs_dim), np.float32)
        self._pending = None  # the last rollout's observations, which the normaliser has not seen yet
        self.env_steps, self.finished, self._episodes_started, self._seed_block = 0, [], 0, 0

    def _next_seed(self):
        """Seeds follow each other within the block, from a place that depends on the world's seed."""
        first = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        self._episodes_started += 1
        return self._seed_block * _BLOCK + (first + self._episodes_started) % _BLOCK

    @torch.no_grad()
    def collect(self, policy, critic=None):
        """Act, and write down what happened.

        Args:
            policy: (N, obs_dim) or (B, T, obs_dim) raw float32 -> torch Distribution.
            critic: (B, T, obs_dim) -> (B, T) values; without one, `values` and `next_values` are None.
        Returns:
            Batch: observations raw, actions as sampled, log-probs recomputed in one pass. `scores` sums a row's raw
            rewards (where rows are whole episodes: the return). `metrics`: means over episodes that ended; env_steps.
        """
        normalizer = self.normalizer or getattr(policy, "normalizer", None)
        if normalizer is not None:
            self._feed(normalizer)
        before = len(self.finished)
        record = self._act(lambda obs: policy(obs).sample())
        self._pending = None if normalizer is None else record["obs"][record["mask"]]
        ended = self.finished[before:]
        metrics = {f"episode_{name}": float(np.mean([row[name] for row in ended])) if ended else float("nan")
                   for name in ("return", "length")}
        scores, rewards = record["rewards"].sum(1), record["rewards"]  # (B,), (B, T) float64
        if self._scaler is not None:
            rewards = self._scaler(rewards, record["terminated"] | record["truncated"], record["mask"])
        record |= {"rewards": rewards.float(), "scores": scores.float()}
        record = {name: column.to(self.device) for name, column in record.items()}
        obs, next_obs = record["obs"], record.pop("next_obs")
        return Batch(
            **record, logprobs=policy(obs).log_prob(record["actions"]),
            values=None if critic is None else critic(obs), next_values=None if critic is None else critic(next_obs),
            group_size=self.group_size, max_length=self.max_length,
            metrics=metrics | {"episodes": len(ended), "env_steps": self.env_steps},
        )  # fmt: skip

    def _feed(self, normalizer):
        """Show the normaliser the last rollout, or before the first one some steps with random actions."""
        if self._pending is not None:
            normalizer.update(self._pending)
            self._pending = None  # not twice, should the coming rollout be interrupted
        elif self.warmup_steps and int(normalizer.count) == 0:
            world = ControlWorld(self._made_from, steps=self.warmup_steps, seed=self.seed, backend=self._backend)
            world._seed_block = 2
            space, lowest = world._space, self._space.start if self.discrete else 0
            space.seed(self.seed)
            normalizer.update(world._act(lambda obs: torch.as_tensor(space.sample() - lowest).unsqueeze(0))["obs"])
            world.close()

    def _start(self, row, seed):
        self._episodes[row], self._obs[row] = _Episode(seed), self._envs.start(row, seed)

    def _step(self, rows, actions):
        """Let environments `rows` (N,) act; returns rewards, terminated, truncated, each (N,)."""
        obs, rewards, terminated, truncated = self._envs.step(rows, actions)
        self._obs[rows] = obs
        ended = terminated | truncated
        for row, action, reward, end in zip(rows, actions, rewards, ended, strict=True):
            episode = self._episodes[row]
            episode.actions.append(action)
            episode.total += float(reward)
            episode.ended = bool(end)
        return rewards, terminated, truncated

    def _act(self, choose):
        """The loop -> dict of CPU tensors (B, T, ...), zeros after the end of an episode that was not the longest."""
        if self.whole_episodes or not self._episodes_started:
            seeds = [self._next_seed() for _ in range(self.num_envs // self.group_size)]
            for row in range(self.num_envs):
                self._start(row, seeds[row // self.group_size])
        columns, steps, space = {}, 0, self._space
        while steps < self.max_length:
            rows = np.flatnonzero([not episode.ended for episode in self._episodes])
            if not len(rows):
                break
            obs = self._obs[rows]  # (N, obs_dim) float32
            chosen = choose(torch.from_numpy(obs).to(self.device)).cpu().numpy()
            if not np.isfinite(chosen).all():
                raise ValueError(f"the policy chose a non-finite action in {self.env_id}: its weights have diverged")
            actions = chosen + space.start if self.discrete else chosen.clip(space.low, space.high).astype(space.dtype)
            rewards, terminated, truncated = self._step(rows, actions)
            step = {"obs": obs, "actions": chosen, "rewards": rewards, "terminated": terminated,
                    "truncated": truncated, "next_obs": self._obs[rows], "mask": np.ones(len(rows), bool)}  # fmt: skip
            for name, values in step.items():
                if name not in columns:
                    columns[name] = np.zeros((self.num_envs, self.max_length, *values.shape[1:]), values.dtype)
                columns[name][rows, steps] = values
            for place, row in enumerate(rows):
                self.env_steps += 1
                if self._episodes[row].ended:
                    self._finish(row, terminated[place], truncated[place])
            steps += 1
        return {name: torch.from_numpy(column[:, :steps]) for name, column in columns.items()}

    def _finish(self, row, terminated, truncated):
        """Report the episode that ended, and where rollouts run on begin the next."""
        episode = self._episodes[row]
        self.finished.append({
            "end_step": self.env_steps, "return": episode.total, "length": len(episode.actions),
            "terminated": bool(terminated), "truncated": bool(truncated), "seed": episode.seed,
        })  # fmt: skip
        if not self.whole_episodes:
            self._start(row, self._next_seed())

    def evaluate(self, policy, episodes=5, seed=0, greedy=True):
        """Play whole episodes apart from training and leave no trace: random state, normaliser, counters stay.

        Args:
            policy: as in `collect`; greedy acts by `policy.mode(obs)`, otherwise actions are sampled.
            episodes: how many; at least 1.
            seed: of these episodes; one seed gives any policy the same initial states.
        Returns:
            dict: return_mean, return_std (population), length_mean, episodes, and the lists returns, lengths; all raw.
            (Only the metrics: TokenWorld's evaluate, which also has texts to show, returns metrics and samples.)
        """
        world = ControlWorld(self._made_from, episodes, True, seed=seed, device=self.device, backend=self._backend)
        world._seed_block = 1
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            world._act(policy.mode if greedy else lambda obs: policy(obs).sample())
        world.close()
        returns, lengths = zip(*((episode.total, len(episode.actions)) for episode in world._episodes), strict=True)
        return {"return_mean": float(np.mean(returns)), "return_std": float(np.std(returns)),
                "length_mean": float(np.mean(lengths)), "episodes": episodes,
                "returns": [*returns], "lengths": [*lengths]}

    def state_dict(self):
        """What a resumed run needs. No environment: an unfinished episode is its seed and the actions it has taken."""
        running = [] if self.whole_episodes or not self._episodes_started else self._episodes
        actions = [action for episode in running for action in episode.actions]
        return {
            "settings": self._settings, "seed": self.seed, "env_steps": self.env_steps,
            "episodes_started": self._episodes_started, "finished": [dict(row) for row in self.finished],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "running": [{"seed": episode.seed, "length": len(episode.actions)} for episode in running],
            "actions": torch.from_numpy(np.stack(actions)) if actions else torch.zeros(0),
            "obs": torch.from_numpy(self._obs.copy()) if running else torch.zeros(0),
            "pending_obs": torch.zeros(0) if self._pending is None else self._pending,
        }

    def load_state_dict(self, state):
        """Go on, to the bit on the same machine and versions, from a state of a world like this one (or ValueError)."""
        if state["settings"] != self._settings:
            raise ValueError(f"the saved world was made with {state['settings']}, this one with {self._settings}")
        self.seed, self.env_steps, self._episodes_started = state["seed"], state["env_steps"], state["episodes_started"]
        self.finished = [dict(row) for row in state["finished"]]
        self._pending = state["pending_obs"].cpu() if len(state["pending_obs"]) else None
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        past = iter(state["actions"].cpu().numpy())
        for row, (saved, obs) in enumerate(zip(state["running"], state["obs"].cpu().numpy(), strict=True)):
            self._start(row, saved["seed"])
            for action in islice(past, saved["length"]):
                if not self._episodes[row].ended:
                    self._step([row], action[None])
            if not np.array_equal(self._obs[row], obs):  # the bits differ between machines and versions
                warnings.warn(f"a saved episode of {self.env_id} replays differently here; it goes on so", stacklevel=2)
            if self._episodes[row].ended:
                self._start(row, self._next_seed())

    def close(self):
        """Free the environments."""
        self._envs.close()
