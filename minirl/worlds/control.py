"""ControlWorld: any gymnasium environment with a flat observation, as a place where a policy gathers a Batch.

The environments are stepped one after the other in a plain loop. gymnasium's vector classes reset an environment behind
the caller's back, one step earlier or later by version and mode; here the state that really followed a step is written
down, and then the next episode begins with a seed of its own. Actions are stored as sampled and clipped only on their
way into the environment. An environment registered without a time limit is given one.
"""

import warnings
from typing import NamedTuple

import gymnasium
import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from minirl.models.normalizer import RewardScaler
from minirl.worlds.batch import Batch

_BLOCK = 2**30  # seeds of training, evaluation and warm-up lie in three blocks of this size, so they never meet
_LIMIT = 1000   # time limit of an environment that has none: the one of gymnasium's MuJoCo tasks


def make_env(env_id):
    """A gymnasium environment with a time limit and with spaces that ControlWorld can serve.

    Raises:
        ValueError: in one line, if the id is unknown, a package is missing, or a space is of another kind.
    """
    try:
        with warnings.catch_warnings():
            # Older versions such as Walker2d-v4 are asked for on purpose: published results were measured on them.
            warnings.filterwarnings("ignore", message=".*is out of date", category=DeprecationWarning)
            env = gymnasium.make(env_id, disable_env_checker=True)
    except (gymnasium.error.Error, ImportError) as error:
        raise ValueError(f"cannot make environment {env_id!r}: {' '.join(str(error).split())}") from error
    seen, acted = env.observation_space, env.action_space
    flat = isinstance(seen, gymnasium.spaces.Box) and len(seen.shape) == 1
    torques = isinstance(acted, gymnasium.spaces.Box) and len(acted.shape) == 1 and acted.dtype.kind == "f"
    if not flat or not (torques or isinstance(acted, gymnasium.spaces.Discrete)):
        env.close()
        raise ValueError(f"{env_id} observes {seen} and acts in {acted}; ControlWorld needs a one-dimensional Box, and "
                         "a one-dimensional float Box or Discrete")
    return env if env.spec.max_episode_steps else gymnasium.wrappers.TimeLimit(env, _LIMIT)


class _Step(NamedTuple):
    """One step of one environment; names as in Batch."""

    obs: np.ndarray       # (obs_dim,) float32
    actions: np.ndarray   # as the policy chose it
    rewards: float
    terminated: bool
    truncated: bool
    next_obs: np.ndarray  # what really followed, before any reset
    mask: bool = True


class _Actor:
    """One environment and the episode running in it: what it takes to report that episode and to replay it."""

    def __init__(self, env):
        self.env = env

    def start(self, seed):
        """Begin an episode."""
        self.seed, self.actions, self.total, self.ended = seed, [], 0.0, False
        self.obs = np.array(self.env.reset(seed=seed)[0], dtype=np.float32)

    def step(self, chosen, action):
        """Take `action`, which is `chosen` as the environment wants it -> _Step."""
        before = self.obs
        self.actions.append(action.copy())
        obs, reward, terminated, truncated, _ = self.env.step(action)
        self.obs = np.array(obs, dtype=np.float32)  # a copy: some environments go on writing into what they returned
        self.total += float(reward)
        self.ended = bool(terminated or truncated)
        return _Step(before, chosen, float(reward), bool(terminated), bool(truncated), self.obs)


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
        finished: a dict for each finished training episode: end_step (env_steps when it ended), return (raw), length,
            terminated, truncated, seed.
    Raises:
        ValueError: if the environment cannot be made or served, or a number does not fit.
    """

    _seed_block = 0

    def __init__(self, env_id, num_envs=1, whole_episodes=False, steps=2048, group_size=1, reward_scaling=False,
                 gamma=0.99, seed=0, warmup_steps=0, normalizer=None, device="cpu"):
        if min(num_envs, steps, group_size) < 1:
            raise ValueError(f"num_envs={num_envs}, steps={steps}, group_size={group_size}; each must be at least 1")
        if group_size > 1 and (not whole_episodes or num_envs % group_size):
            raise ValueError(f"group_size={group_size} needs whole_episodes and num_envs ({num_envs}) divisible by it")
        self.num_envs, self.whole_episodes, self.steps, self.group_size = num_envs, whole_episodes, steps, group_size
        self.seed, self.warmup_steps, self.normalizer = seed, warmup_steps, normalizer
        self.device, self._made_from = torch.device(device), env_id
        self._actors = [_Actor(make_env(env_id)) for _ in range(num_envs)]
        env = self._actors[0].env
        self.env_id, self._space = env.spec.id, env.action_space
        self.discrete = isinstance(self._space, gymnasium.spaces.Discrete)
        self.obs_dim = env.observation_space.shape[0]
        self.action_dim = int(self._space.n) if self.discrete else self._space.shape[0]
        self.max_length = env.spec.max_episode_steps if whole_episodes else steps
        self._scaler = RewardScaler(num_envs, gamma) if reward_scaling else None
        self._settings = dict(env_id=self.env_id, num_envs=num_envs, whole_episodes=whole_episodes,
                              reward_scaling=reward_scaling)
        self._pending = None  # the last rollout's observations, which the normaliser has not seen yet
        self.env_steps, self.finished, self._episodes_started = 0, [], 0
        if not whole_episodes:
            for actor in self._actors:
                actor.start(self._next_seed())

    def _next_seed(self):
        """Seeds follow each other within the block, from a place that depends on the world's seed."""
        first = int(np.random.SeedSequence(self.seed).generate_state(1)[0])
        self._episodes_started += 1
        return self._seed_block * _BLOCK + (first + self._episodes_started) % _BLOCK

    def collect(self, policy, critic=None):
        """Act, and write down what happened.

        Args:
            policy: (N, obs_dim) or (B, T, obs_dim) raw float32 -> torch Distribution.
            critic: (B, T, obs_dim) -> (B, T) values; without one, `values` and `next_values` are None.
        Returns:
            Batch: observations raw, actions as sampled, log-probs recomputed in one pass. `scores` sums a row's raw
            rewards (where rows are whole episodes: the return). `metrics` are means over the episodes that ended.
        """
        normalizer = self.normalizer or getattr(policy, "normalizer", None)
        if normalizer is not None:
            self._feed(normalizer)
        before = len(self.finished)
        with torch.no_grad():
            record = self._act(lambda obs: policy(obs).sample())
            batch = self._to_batch(record, policy, critic)
        self._pending = None if normalizer is None else record["obs"][record["mask"]]
        ended = self.finished[before:]
        metrics = {f"episode_{name}": float(np.mean([row[name] for row in ended])) if ended else float("nan")
                   for name in ("return", "length")}
        return batch.with_(metrics={**metrics, "episodes": len(ended)})

    def _feed(self, normalizer):
        """Show the normaliser the last rollout, or before the first one some steps with random actions."""
        if self._pending is not None:
            normalizer.update(self._pending)
        elif self.warmup_steps and int(normalizer.count) == 0:
            world = _WarmupWorld(self._made_from, steps=self.warmup_steps, seed=self.seed)
            world._space.seed(self.seed)
            lowest = self._space.start if self.discrete else 0
            record = world._act(lambda obs: torch.as_tensor(world._space.sample() - lowest).unsqueeze(0))
            normalizer.update(record["obs"])
            world.close()

    def _act(self, choose):
        """The loop -> dict of CPU tensors (B, T, ...), zeros after the end of an episode that was not the longest."""
        if self.whole_episodes:
            seeds = [self._next_seed() for _ in range(self.num_envs // self.group_size)]
            for row, actor in enumerate(self._actors):
                actor.start(seeds[row // self.group_size])
        rows = [[] for _ in self._actors]
        for _ in range(self.max_length):
            acting = [row for row, actor in enumerate(self._actors) if not actor.ended]
            if not acting:
                break
            chosen, actions = self._choose(choose, np.stack([self._actors[row].obs for row in acting]))
            for i, row in enumerate(acting):
                actor = self._actors[row]
                rows[row].append(actor.step(chosen[i], actions[i]))
                self.env_steps += 1
                if actor.ended:
                    self._finish(actor, rows[row][-1])
        columns = {name: [np.array([getattr(step, name) for step in row]) for row in rows] for name in _Step._fields}
        return {name: pad_sequence([torch.from_numpy(row) for row in column], True) for name, column in columns.items()}

    def _choose(self, choose, obs):
        """(N, obs_dim) float32 -> N actions as the policy chose them, and N as the environments take them."""
        chosen = choose(torch.from_numpy(obs).to(self.device)).cpu().numpy()
        if not np.isfinite(chosen).all():
            raise ValueError(f"the policy chose an action that is not finite in {self.env_id}: its weights diverged")
        if self.discrete:
            return chosen, chosen + self._space.start
        return chosen, np.clip(chosen, self._space.low, self._space.high).astype(self._space.dtype)

    def _finish(self, actor, last):
        """Report an ended episode and, where episodes run on, begin the next."""
        self.finished.append({"end_step": self.env_steps, "return": actor.total, "length": len(actor.actions),
                              "terminated": last.terminated, "truncated": last.truncated, "seed": actor.seed})
        if not self.whole_episodes:
            actor.start(self._next_seed())

    def _to_batch(self, record, policy, critic):
        """Log-probs and values of the whole rollout in one pass each; everything moves to the device."""
        raw, rewards = record["rewards"], record["rewards"]  # (B, T) float64
        if self._scaler is not None:
            rewards = self._scaler(raw, record["terminated"] | record["truncated"], record["mask"])
        record = {**record, "rewards": rewards.float(), "scores": raw.sum(1).float()}
        record = {name: column.to(self.device) for name, column in record.items()}
        obs, next_obs = record["obs"], record.pop("next_obs")
        return Batch(
            **record,
            logprobs=policy(obs).log_prob(record["actions"]),
            values=None if critic is None else critic(obs),
            next_values=None if critic is None else critic(next_obs),
            group_size=self.group_size,
            max_length=self.max_length,
        )

    def evaluate(self, policy, episodes, seed, greedy=True):
        """Play whole episodes apart from training and leave no trace: random state, normaliser, counters stay.

        Args:
            policy: as in `collect`; greedy acts by `policy.mode(obs)`, otherwise actions are sampled.
            episodes: how many; at least 1.
            seed: of these episodes; one seed gives any policy the same initial states.
        Returns:
            dict: return_mean, return_std (population), length_mean, episodes, and the lists returns, lengths; all raw.
        """
        world = _EvaluationWorld(self._made_from, episodes, whole_episodes=True, seed=seed, device=self.device)
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []), torch.no_grad():
            torch.manual_seed(seed)
            world._act(policy.mode if greedy else lambda obs: policy(obs).sample())
        world.close()
        returns, lengths = [actor.total for actor in world._actors], [len(actor.actions) for actor in world._actors]
        return {"return_mean": float(np.mean(returns)), "return_std": float(np.std(returns)),
                "length_mean": float(np.mean(lengths)), "episodes": episodes, "returns": returns, "lengths": lengths}

    def state_dict(self):
        """What a resumed run needs: tensors at the top, all else numbers, strings, lists and dicts of them.

        No environment is stored: an unfinished episode is its seed and the actions it has taken so far.
        """
        running = [] if self.whole_episodes else self._actors
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
        """Go on from what `state_dict` gave, to the bit on the same machine and versions.

        Raises:
            ValueError: if that world was made with other settings.
        """
        if state["settings"] != self._settings:
            raise ValueError(f"the saved world was made with {state['settings']}, this one with {self._settings}")
        self.seed, self.env_steps, self._episodes_started = state["seed"], state["env_steps"], state["episodes_started"]
        self.finished = [dict(row) for row in state["finished"]]
        self._pending = state["pending_obs"].cpu() if len(state["pending_obs"]) else None
        if self._scaler is not None:
            self._scaler.load_state_dict(state["scaler"])
        past = iter(state["actions"].cpu().numpy())
        for row, episode in enumerate(state["running"]):
            actions = [next(past) for _ in range(episode["length"])]
            self._replay(self._actors[row], episode["seed"], actions, state["obs"][row].cpu().numpy())

    def _replay(self, actor, seed, actions, obs):
        """Bring an environment to where it was; another machine or version may bring it somewhere else."""
        actor.start(seed)
        for action in actions:
            if not actor.ended:
                actor.step(action, action)
        if not np.array_equal(actor.obs, obs):
            warnings.warn(f"a saved episode of {self.env_id} replays differently here; it goes on so", stacklevel=3)
        if actor.ended:
            actor.start(self._next_seed())

    def close(self):
        """Free the environments."""
        for actor in self._actors:
            actor.env.close()


class _EvaluationWorld(ControlWorld):
    _seed_block = 1


class _WarmupWorld(ControlWorld):
    _seed_block = 2
