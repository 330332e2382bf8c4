"""One algorithm in one world: the commands reinforce, trpo, ppo, ppo-kl and grpo.

What differs between algorithms and worlds is data, in the table ALGORITHMS: a class, and the settings that suit it on
text and on control. A new on-policy algorithm is one new file in algorithms/ and one new line in that table.
"""

import copy
import inspect
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from minirl.algorithms.grpo import GRPO, GRPOConfig
from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.algorithms.ppo_kl import PPOKL, PPOKLConfig
from minirl.algorithms.reinforce import REINFORCE, REINFORCEConfig
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.checkpoint import FILE_NAME, has_checkpoint, load_checkpoint, restore_rng_state, rng_state, save_checkpoint
from minirl.experiments.language import load_model, save_model, write_samples
from minirl.experiments.settings import ControlSettings, RunSettings, TextSettings  # noqa: F401
from minirl.models.normalizer import ObservationNormalizer
from minirl.models.policies import CategoricalPolicy, GaussianPolicy, TokenCritic, TokenPolicy, ValueNetwork
from minirl.tracking import Tracker, write_config, write_rows
from minirl.training import train
from minirl.worlds.text import TokenWorld, allowed_ids


class Entry(NamedTuple):
    """A line of the table: the class and its settings for either world."""

    algorithm: type
    text: Any
    text_world: TextSettings
    control: Any
    control_world: ControlSettings
    text_updates: int = 200
    control_updates: int = 50
    group: str = "Train"
    """Of the commands, in the help."""


# On text nothing is discounted (InstructGPT), and a reward that comes once, at the end, leaves lambda nothing to do.
_TEXT = {"gamma": 1.0, "gae_lambda": 1.0, "critic_lr": 1e-3, "critic_epochs": 2, "critic_minibatches": 2}
_EPISODES = ControlSettings(num_envs=16, whole_episodes=True, reward_scaling=False)
# TRPO and PPO on control, tuned on Walker2d-v4 with seeds 100-102: batches of 1,000 steps (PPO paper: 2,048; rl-zoo's
# Walker2d: 512) in mini-batches of about 64, as in the paper. TRPO's delta of 0.03 lies between the paper's 0.01 and
# the 0.06 that SB3-contrib's 0.01 comes to: it averages the KL over the 6 torques, and here they are summed.
# Mean return over 50,000 steps: TRPO 108, 124 and 158 for delta 0.01, 0.02 and 0.03;
# PPO 97 in batches of 2,000, 150 in these.
ALGORITHMS = {
    "reinforce": Entry(
        REINFORCE, REINFORCEConfig(baseline="leave-one-out", reduction="trajectory", lr=1e-3),
        TextSettings(group_size=4),
        REINFORCEConfig(baseline="learned", gamma=0.99, lr=3e-3), _EPISODES,
    ),
    "trpo": Entry(
        TRPO, TRPOConfig(delta=0.02, fisher_fraction=0.25, delta_decay=True, lr_decay=True, **_TEXT),
        TextSettings(prompts_per_batch=256),
        TRPOConfig(delta=0.03), ControlSettings(), text_updates=60,
    ),
    "ppo": Entry(
        PPO, PPOConfig(epochs=2, minibatches=2, lr=5e-4, **_TEXT), TextSettings(prompts_per_batch=256),
        PPOConfig(minibatches=16, critic_minibatches=16), ControlSettings(), text_updates=100,
    ),
    "ppo-kl": Entry(
        PPOKL, PPOKLConfig(epochs=2, minibatches=2, lr=5e-4, **_TEXT), TextSettings(prompts_per_batch=256),
        PPOKLConfig(minibatches=16, critic_minibatches=16), ControlSettings(), text_updates=100, group="Advanced",
    ),
    "grpo": Entry(
        GRPO, GRPOConfig(kl_beta=0.0, lr=1e-3), TextSettings(group_size=8, prompts_per_batch=32),
        GRPOConfig(kl_beta=0.0, lr=5e-3), replace(_EPISODES, group_size=8), text_updates=120,
    ),
}  # fmt: skip


def build(algorithm, config, policy, make_critic):
    """The algorithm's object; a critic is made only for one that takes and uses it."""
    if "critic" not in inspect.signature(algorithm).parameters:
        return algorithm(policy, config)
    uses_critic = getattr(config, "baseline", "learned") == "learned"
    return algorithm(policy, make_critic() if uses_critic else None, config)


def text_setup(settings, seed, device):
    """(world, policy, make_critic): a TokenWorld on Arithmetic, and a policy that starts from `init`."""
    gpt, tokenizer = load_model(settings.init, device)
    task = settings.arithmetic.task()
    allowed = allowed_ids(tokenizer, device)
    policy = TokenPolicy(gpt, settings.temperature, allowed)
    reference = TokenPolicy(copy.deepcopy(gpt), settings.temperature, allowed).requires_grad_(False)
    world = TokenWorld(
        task, tokenizer, task.reward, task.max_new_tokens, reference=reference, kl_in_reward=settings.kl_coef,
        group_size=settings.group_size, prompts_per_batch=settings.prompts_per_batch,
        missing_end_penalty=settings.missing_end_penalty, seed=seed, device=device,
    )  # fmt: skip
    return world, policy, lambda: TokenCritic(copy.deepcopy(gpt)).to(device)


def control_setup(env_id, settings, seed, device, gamma):
    """(world, policy, make_critic): a ControlWorld, and fresh networks that fit its observations and actions."""
    from minirl.worlds.control import ControlWorld  # the text commands need no simulator

    world = ControlWorld(
        env_id, settings.num_envs, settings.whole_episodes, steps=settings.steps, group_size=settings.group_size,
        reward_scaling=settings.reward_scaling, gamma=gamma, seed=seed, warmup_steps=settings.warmup_steps,
        device=device,
    )  # fmt: skip
    normalizer = ObservationNormalizer((world.obs_dim,)) if settings.normalize_observations else None
    kind = CategoricalPolicy if world.discrete else GaussianPolicy
    policy = kind(world.obs_dim, world.action_dim, settings.hidden, normalizer).to(device)
    return world, policy, lambda: ValueNetwork(world.obs_dim, settings.hidden, policy.normalizer).to(device)


def number_of_updates(entry, task, world_settings, settings):
    """Updates of a run, from --updates or --env-steps or the table."""
    if settings.updates is not None and settings.env_steps is not None:
        raise ValueError("give --updates or --env-steps, not both")
    if settings.env_steps is None:
        default = entry.text_updates if task == "arithmetic" else entry.control_updates
        return default if settings.updates is None else settings.updates
    if task == "arithmetic" or world_settings.whole_episodes:
        raise ValueError("--env-steps needs an environment and fixed rollouts; use --updates here")
    return -(-settings.env_steps // (world_settings.num_envs * world_settings.steps))


def check_groups(name, config, world_settings):
    """Refuse a world that the algorithm cannot learn in, before anything is trained or written."""
    grouped = getattr(ALGORITHMS[name].algorithm, "learns_from_groups", False)
    if (grouped or getattr(config, "baseline", "") == "leave-one-out") and world_settings.group_size < 2:
        raise ValueError(f"{name} compares rows of one group here; set --group-size to 2 or more")
    if grouped and getattr(world_settings, "kl_coef", 0.0):
        raise ValueError(f"{name} learns from scores, without the KL that --kl-coef puts into the rewards; leave it 0")


class Run:
    """One training run: a world, an algorithm and a folder. `Run(...).start()` trains and returns a summary."""

    def __init__(self, name, task, config, world_settings, settings):
        self.name, self.task, self.config = name, task, config
        self.world_settings, self.settings = world_settings, settings
        entry = ALGORITHMS[name]
        check_groups(name, config, world_settings)
        self.updates = number_of_updates(entry, task, world_settings, settings)
        self.device = device = settings.prepare()
        if task == "arithmetic":
            self.world, policy, make_critic = text_setup(world_settings, settings.seed, device)
        else:
            gamma = getattr(config, "gamma", 0.99)
            self.world, policy, make_critic = control_setup(task, world_settings, settings.seed, device, gamma)
        self.policy = policy
        self.algorithm = build(entry.algorithm, config, policy, make_critic)
        self.samples = []

    def start(self, on_log=None):
        """Train to the end.

        Args:
            on_log: called with each row that is logged.
        Returns:
            dict: before and after (metrics of evaluations), seconds, steps_per_second (tokens or environment steps),
            history (all rows).
        """
        settings, done = self.settings, 0
        if settings.resume and has_checkpoint(settings.out):
            done = self.load()
        before, first_samples = self.evaluate(0), self.samples
        if not done:
            (Path(settings.out) / FILE_NAME).unlink(missing_ok=True)  # an earlier run's, which must not be resumed
        write_config(settings.out, {
            "algorithm": self.name, "task": getattr(self.world, "env_id", self.task),
            "config": self.config, "world": self.world_settings,
            "run": replace(settings, updates=self.updates, device=self.device),
        })  # fmt: skip
        began = time.perf_counter()
        label = f"{self.name} {self.task}"
        with Tracker(
            settings.out, self.updates, label, quiet=settings.quiet, resume_from_step=done or None, on_log=on_log
        ) as tracker:
            if not done:
                tracker.log(0, before)
            train(
                self.world, self.algorithm, self.updates, tracker, evaluate=self.evaluate,
                evaluate_every=settings.evaluate_every, save=self.save, save_every=settings.save_every, start=done,
            )  # fmt: skip
            history = tracker.history
        seconds = time.perf_counter() - began
        if self.samples:
            write_samples(settings.out, before=first_samples, after=self.samples)
        after = {name: history[-1].get(name) for name in before}
        steps = sum(row["count"] for row in history if row["step"] > done)
        return {"before": before, "after": after, "seconds": seconds, "steps_per_second": steps / seconds,
                "history": history}  # fmt: skip

    def evaluate(self, update):
        """Metrics of the policy as it is, and self.samples where it writes text; touches no training state."""
        if self.task == "arithmetic":
            metrics, self.samples = self.world.evaluate(self.policy, seed=self.settings.seed)
            return {f"eval_{name}": value for name, value in metrics.items()}
        seed = 10_000 + self.settings.seed
        result = self.world.evaluate(self.policy, self.settings.evaluate_episodes, seed)
        return {"eval_return": result["return_mean"], "eval_length": result["length_mean"]}

    def save(self, update):
        """Write the whole state after `update`, and the model by itself where it writes text."""
        state = {"run": f"{self.name} {self.task}", "update": update, "rng": rng_state(),
                 "algorithm": self.algorithm.state_dict(), "world": self.world.state_dict()}  # fmt: skip
        save_checkpoint(self.settings.out, state)
        if self.task == "arithmetic":
            save_model(self.settings.out, self.policy.gpt, self.world.tokenizer)
        else:
            write_rows(Path(self.settings.out) / "episodes.csv", self.world.finished)

    def load(self):
        """Take the state back; returns the number of updates already made."""
        folder = self.settings.out
        state = load_checkpoint(folder, self.device)
        if state["run"] != f"{self.name} {self.task}":
            raise ValueError(f"{folder} holds a run of {state['run']}; give another --out, or leave out --resume")
        try:
            self.algorithm.load_state_dict(state["algorithm"])
            self.world.load_state_dict(state["world"])
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"the run in {folder} had other settings ({error}); see its config.json") from error
        restore_rng_state(state["rng"])
        return state["update"]
