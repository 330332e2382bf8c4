"""ControlWorld: any gymnasium environment with a flat observation, as a place where a policy gathers a Batch.

The environments are stepped one after the other in a plain loop. gymnasium's vector classes reset an environment behind
the caller's back, one step earlier or later by version and mode; here the state that really followed a step is written
down before the next episode begins. Actions are stored as sampled and clipped only on their way into the environment.
"""

import warnings
from itertools import islice

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete
from torch.nn.utils.rnn import pad_sequence

from minirl.models.normalizer import RewardScaler
from minirl.worlds.batch import Batch

_BLOCK = 2**30  # seeds of training, evaluation and warm-up lie in three blocks of this size, so they never meet
_LIMIT = 1000   # time limit of an environment that has none: the one of gymnasium's MuJoCo tasks
_STEP = ("obs", "actions", "rewards", "terminated", "truncated", "next_obs", "mask")  # what _Actor.step returns


def make_env(env_id):
    """A gymnasium environment with a time limit that ControlWorld can serve; otherwise a ValueError of one line."""
    try:
        with warnings.catch_warnings():
            # Older versions are asked for on purpose, to compare with published results; `env_id` names a missing one.
            warnings.filterwarnings("ignore", message=".*(is out of date|Using the latest versioned)")
            env = gymnasium.make(env_id, disable_env_checker=True)
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


class _Actor:
    """One environment and the episode running in it: what it takes to report that episode and to replay it."""

    def __init__(self, env):
        self.env = env

    def start(self, seed):
        """Begin an episode."""
        self.seed, self.actions, self.total, self.ended = seed, [], 0.0, False
        self.obs = np.array(self.env.reset(seed=seed)[0], dtype=np.float32)

    def step(self, chosen, action):
        """Take `action`, which is `chosen` as the environment wants it -> values for _STEP."""
        before = self.obs
        self.actions.append(action.copy())
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.obs = np.array(obs, dtype=np.float32)  # a copy: some environments go on writing into what they returned
        self.total, self.ended = self.total + float(reward), bool(terminated or truncated)
        return before, chosen, float(reward), bool(terminated), bool(truncated), self.obs, True


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
    Attributes:
        obs_dim, action_dim, discrete: where discrete, action_dim is the number of actions.
        env_steps: training steps so far, all environments together.
        finished: dicts: end_step (env_steps then), return (raw), length, terminated, truncated, seed of each episode.
    Raises:
        ValueError: if the environment cannot be made or served, or a number does not fit.
    """

    def __init__(self, env_id, num_envs=1, whole_episodes=False, steps=2048, group_size=1, reward_scaling=False,
                 gamma=0.99, seed=0, warmup_steps=0, normalizer=None, device="cpu"):
        if min(num_envs, steps, group_size) < 1:
            raise ValueError(f"num_envs={num_envs}, steps={steps}, group_size={group_size}; each must be at least 1")
        if group_size > 1 and (not whole_episodes or num_envs % group_size):
            raise ValueError(f"group_size={group_size} needs whole_episodes and num_envs ({num_envs}) divisible by it")
        self.num_envs, self.whole_episodes, self.group_size, self.seed = num_envs, whole_episodes, group_size, seed
        self.warmup_steps, self.normalizer, self.device = warmup_steps, normalizer, torch.device(device)
        self._made_from, self._actors = env_id, [_Actor(make_env(env_id)) for _ in range(num_envs)]
        env = self._actors[0].env
        self.env_id, self.obs_dim, self._space = env.spec.id, env.observation_space.shape[0], env.action_space
        self.discrete = isinstance(self._space, Discrete)
        self.action_dim = int(self._space.n) if self.discrete else self._space.shape[0]
        self.max_length = env.spec.max_episode_steps if whole_episodes else steps
        self._scaler = RewardScaler(num_envs, gamma) if reward_scaling else None
        self._settings = {"env_id": self.env_id, "num_envs": num_envs, "whole_episodes": whole_episodes,
                          "reward_scaling": reward_scaling}
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
            world = ControlWorld(self._made_from, steps=self.warmup_steps, seed=self.seed)
            world._seed_block = 2
            space, lowest = world._space, self._space.start if self.discrete else 0
            space.seed(self.seed)
            normalizer.update(world._act(lambda obs: torch.as_tensor(space.sample() - lowest).unsqueeze(0))["obs"])
            world.close()

    def _act(self, choose):
        """The loop -> dict of CPU tensors (B, T, ...), zeros after the end of an episode that was not the longest."""
        if self.whole_episodes or not self._episodes_started:
            seeds = [self._next_seed() for _ in range(self.num_envs // self.group_size)]
            for row, actor in enumerate(self._actors):
                actor.start(seeds[row // self.group_size])
        rows, space = [[] for _ in self._actors], self._space
        for _ in range(self.max_length):
            acting = [row for row, actor in enumerate(self._actors) if not actor.ended]
            if not acting:
                break
            obs = torch.from_numpy(np.stack([self._actors[row].obs for row in acting]))  # (N, obs_dim) float32
            chosen = choose(obs.to(self.device)).cpu().numpy()
            if not np.isfinite(chosen).all():
                raise ValueError(f"the policy chose a non-finite action in {self.env_id}: its weights have diverged")
            actions = chosen + space.start if self.discrete else chosen.clip(space.low, space.high).astype(space.dtype)
            for row, raw, action in zip(acting, chosen, actions, strict=True):
                actor = self._actors[row]
                rows[row].append(actor.step(raw, action))
                self.env_steps += 1
                if actor.ended:
                    self.finished.append({
                        "end_step": self.env_steps, "return": actor.total, "length": len(actor.actions),
                        "terminated": rows[row][-1][3], "truncated": rows[row][-1][4], "seed": actor.seed,
                    })
                    if not self.whole_episodes:
                        actor.start(self._next_seed())
        columns = [[torch.from_numpy(np.array(column)) for column in zip(*row, strict=True)] for row in rows]
        return {name: pad_sequence([row[i] for row in columns], batch_first=True) for i, name in enumerate(_STEP)}

    def evaluate(self, policy, episodes, seed, greedy=True):
        """Play whole episodes apart from training and leave no trace: random state, normaliser, counters stay.

        Args:
            policy: as in `collect`; greedy acts by `policy.mode(obs)`, otherwise actions are sampled.
            episodes: how many; at least 1.
            seed: of these episodes; one seed gives any policy the same initial states.
        Returns:
            dict: return_mean, return_std (population), length_mean, episodes, and the lists returns, lengths; all raw.
        """
        world = ControlWorld(self._made_from, episodes, whole_episodes=True, seed=seed, device=self.device)
        world._seed_block = 1
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            world._act(policy.mode if greedy else lambda obs: policy(obs).sample())
        world.close()
        returns, lengths = [actor.total for actor in world._actors], [len(actor.actions) for actor in world._actors]
        return {"return_mean": float(np.mean(returns)), "return_std": float(np.std(returns)),
                "length_mean": float(np.mean(lengths)), "episodes": episodes, "returns": returns, "lengths": lengths}

    def state_dict(self):
        """What a resumed run needs. No environment: an unfinished episode is its seed and the actions it has taken."""
        running = [] if self.whole_episodes or not self._episodes_started else self._actors
        actions = [action for actor in running for action in actor.actions]
        return {
            "settings": self._settings, "seed": self.seed, "env_steps": self.env_steps,
            "episodes_started": self._episodes_started, "finished": [dict(row) for row in self.finished],
            "scaler": None if self._scaler is None else self._scaler.state_dict(),
            "running": [{"seed": actor.seed, "length": len(actor.actions)} for actor in running],
            "actions": torch.from_numpy(np.stack(actions)) if actions else torch.zeros(0),
            "obs": torch.from_numpy(np.stack([actor.obs for actor in running])) if running else torch.zeros(0),
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
        for actor, episode, obs in zip(self._actors, state["running"], state["obs"].cpu().numpy(), strict=False):
            actor.start(episode["seed"])
            for action in islice(past, episode["length"]):
                if not actor.ended:
                    actor.step(action, action)
            if not np.array_equal(actor.obs, obs):  # the bits differ between machines and versions
                warnings.warn(f"a saved episode of {self.env_id} replays differently here; it goes on so", stacklevel=2)
            if actor.ended:
                actor.start(self._next_seed())

    def close(self):
        """Free the environments."""
        for actor in self._actors:
            actor.env.close()
