"""One algorithm in one world: the commands reinforce, trpo, ppo, ppo-kl, grpo and rejection-sampling."""

import inspect
import time
from dataclasses import asdict, replace
from pathlib import Path

import torch

from minirl.checkpoint import FILE_NAME, has_checkpoint, load_checkpoint, restore_rng_state, rng_state, save_checkpoint
from minirl.experiments.models import save_model, write_samples
from minirl.experiments.run_files import read_json
from minirl.experiments.settings import TEXT_TASKS, ControlSettings, RunSettings, SumsSettings, by_name  # noqa: F401
from minirl.experiments.table import ALGORITHMS
from minirl.experiments.tasks import text_setup
from minirl.models.normalizer import ObservationNormalizer
from minirl.models.policies import CategoricalPolicy, GaussianPolicy, ValueNetwork
from minirl.tracking import Tracker, say, write_config, write_rows
from minirl.training import train

EVALUATION_SEED = 10_000  # of the initial states of every evaluation on control
TEACH_NOTHING = ("backend", "evaluate_prompts")  # settings of a world that may change in the middle of a run


def build(algorithm, config, policy, make_critic):
    """The algorithm's object; a critic is made only for one that takes and uses it."""
    if "critic" not in inspect.signature(algorithm).parameters:
        return algorithm(policy, config)
    uses_critic = getattr(config, "baseline", "learned") == "learned"
    return algorithm(policy, make_critic() if uses_critic else None, config)


def control_setup(env_id, settings, seed, device, gamma):
    """(world, policy, make_critic): a ControlWorld, and networks that fit its observations and actions.

    Raises:
        ValueError, FileNotFoundError: if settings.init holds no policy that fits.
    """
    from minirl.worlds.control import ControlWorld  # the text commands need no simulator

    world = ControlWorld(
        env_id, settings.num_envs, settings.whole_episodes, steps=settings.steps, group_size=settings.group_size,
        reward_scaling=settings.reward_scaling, gamma=gamma, seed=seed, warmup_steps=settings.warmup_steps,
        device=device, backend=settings.backend,
    )  # fmt: skip
    normalizer = ObservationNormalizer((world.obs_dim,)) if settings.normalize_observations else None
    kind = CategoricalPolicy if world.discrete else GaussianPolicy
    policy = kind(world.obs_dim, world.action_dim, settings.hidden, normalizer).to(device)
    if settings.init is not None:
        take_policy(policy, settings.init, world.env_id, device)
    return world, policy, lambda: ValueNetwork(world.obs_dim, settings.hidden, policy.normalizer).to(device)


def take_policy(policy, folder, env_id, device):
    """Give a policy the weights of the control run in a folder, with its normaliser; ValueError if they do not fit."""
    state = load_checkpoint(folder, device)
    made_for = state.get("world", {}).get("settings", {}).get("env_id")
    if made_for != env_id:
        raise ValueError(f"{folder}, given as init, is no run in {env_id} but in {made_for or 'another world'}")
    try:
        policy.load_state_dict(state["algorithm"]["policy"])
    except RuntimeError as error:
        wrong = " ".join(str(error).split())
        raise ValueError(f"{folder}, given as init, has another policy than these settings make ({wrong})") from None


def number_of_updates(entry, task, world_settings, settings):
    """Updates of a run, from --updates or --env-steps or the table."""
    if settings.updates is not None and settings.env_steps is not None:
        raise ValueError("give --updates or --env-steps, not both")
    if settings.env_steps is None:
        return entry.of(task)[-1] if settings.updates is None else settings.updates
    if task in TEXT_TASKS:
        raise ValueError("--env-steps needs an environment; use --updates here")
    smallest = 1 if world_settings.whole_episodes else world_settings.steps  # steps of a row; episodes end the run
    return -(-settings.env_steps // (world_settings.num_envs * smallest))


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
        if settings.resume and has_checkpoint(settings.out):
            self.check_resumed()
        self.device = device = settings.prepare()
        if task in TEXT_TASKS:
            self.world, policy, make_critic = text_setup(task, world_settings, settings.seed, device)
        else:
            gamma = getattr(config, "gamma", 0.99)
            self.world, policy, make_critic = control_setup(task, world_settings, settings.seed, device, gamma)
        self.policy = policy
        self.algorithm = build(entry.algorithm, config, policy, make_critic)
        if settings.compile:
            if name != "ppo":  # ppo-kl's changes with beta, and would be compiled again and again
                raise ValueError(f"--compile is for ppo, not for {name}")
            self.algorithm.loss = torch.compile(self.algorithm.loss)
        self.samples, self.evaluation_seconds, self._evaluations = [], 0.0, 0

    def check_resumed(self):
        """ValueError if the folder's run is of another kind, or has other settings that matter to what is learned.

        It may become longer: then a line says what that does to step sizes that fall.
        """
        folder, config, world = Path(self.settings.out), self.config, self.world_settings
        saved = read_json(folder / "config.json")["settings"]
        if saved["algorithm"] != self.name or not saved["task"].startswith(self.task):  # CartPole is CartPole-v1
            raise ValueError(f"{folder} holds a run of {saved['algorithm']} {saved['task']}; "
                             "give another --out, or leave out --resume")
        defaults = asdict(type(config)()) | asdict(type(world)())  # what an older run lacks, it had so
        made_with = by_name(defaults) | by_name(saved)
        here = by_name(asdict(config) | asdict(world) | {"seed": self.settings.seed})
        others = [f"{name} {made_with[name]}" for name, value in here.items()
                  if made_with[name] != value and name not in TEACH_NOTHING]
        if others:
            raise ValueError(f"the run in {folder} had other settings: {', '.join(others)}; give these, or another "
                             "--out, or leave out --resume to replace it")
        planned = saved["run"]["updates"]
        falling = getattr(config, "lr_decay", False) or getattr(config, "delta_decay", False)
        if falling and planned != self.updates and not self.settings.quiet:
            say(f"this run was to have {planned} updates and now has {self.updates}; from here on its step sizes fall "
                f"as in a run of {self.updates}")

    def start(self, on_log=None):
        """Train to the end.

        Args:
            on_log: called with each row that is logged.
        Returns:
            dict: before and after (metrics of evaluations; before: at the beginning of a run that was resumed, too),
            seconds, steps_per_second (tokens or environment steps), history (all rows).
        """
        settings, done = self.settings, 0
        if getattr(self.world, "fast", False) and not settings.quiet:
            say(f"{self.world.env_id} without gymnasium's overhead, to the same bits (off: --backend gymnasium)")
        if settings.resume and has_checkpoint(settings.out):
            done = self.load()
        if not done:
            before = self.evaluate(0)
            (Path(settings.out) / FILE_NAME).unlink(missing_ok=True)  # an earlier run's, which must not be resumed
            if self.samples:
                write_samples(settings.out, before=self.samples)
        self.evaluation_seconds = 0.0  # the clock starts below
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
                self.world, self.algorithm, self.updates, tracker, evaluate=self.evaluate_when_due,
                evaluate_every=1 if settings.eval_every else settings.evaluate_every, save=self.save,
                save_every=settings.save_every, start=done, progress=self.progress,
            )  # fmt: skip
            history = tracker.history
        seconds = time.perf_counter() - began
        if self.samples:
            path = Path(settings.out) / "samples.json"
            write_samples(settings.out, **(read_json(path) if path.is_file() else {}) | {"after": self.samples})
        before = {name: value for name, value in history[0].items() if name.startswith("eval_")}
        after = {name: history[-1].get(name) for name in before}
        steps = sum(row["count"] for row in history if row["step"] > done)
        return {"before": before, "after": after, "seconds": seconds, "steps_per_second": steps / seconds,
                "history": history}  # fmt: skip

    @property
    def progress(self):
        """None where every batch has as many steps; otherwise the share of --env-steps taken, as a function."""
        total = self.settings.env_steps
        if total is None or not self.world_settings.whole_episodes:
            return None
        return lambda: min(1.0, self.world.env_steps / total)

    def evaluate_when_due(self, update):
        """`evaluate`, or {} where --eval-every steps have not passed since the last time, nor the run is over."""
        every, total = self.settings.eval_every, self.settings.env_steps
        if every is None:
            return self.evaluate(update)
        over = update == self.updates or (total is not None and self.world.env_steps >= total)
        if self.world.env_steps // every == self._evaluations and not over:
            return {}
        self._evaluations = self.world.env_steps // every
        return self.evaluate(update)

    def evaluate(self, update):
        """Metrics of the policy as it is, and self.samples where it writes text; touches no training state.

        On control all runs, whatever their seed, are evaluated from the same initial states.
        """
        began = time.perf_counter()
        if self.task in TEXT_TASKS:
            count = getattr(self.world_settings, "evaluate_prompts", None)
            metrics, self.samples = self.world.evaluate(self.policy, count, seed=self.settings.seed)
        else:
            metrics = {}
            for kind, greedy in (("", True), ("_sampled", False)):
                found = self.world.evaluate(self.policy, self.settings.evaluate_episodes, EVALUATION_SEED, greedy)
                metrics |= {f"return{kind}": found["return_mean"], f"length{kind}": found["length_mean"]}
        self.evaluation_seconds += time.perf_counter() - began
        return {f"eval_{name}": value for name, value in metrics.items()}

    def save(self, update):
        """Write the whole state after `update`, and the model by itself where it writes text."""
        state = {"run": f"{self.name} {self.task}", "update": update, "rng": rng_state(),
                 "evaluations": self._evaluations,
                 "algorithm": self.algorithm.state_dict(), "world": self.world.state_dict()}  # fmt: skip
        save_checkpoint(self.settings.out, state)
        if self.task in TEXT_TASKS:
            save_model(self.settings.out, self.policy.gpt, self.world.tokenizer)
        else:
            write_rows(Path(self.settings.out) / "episodes.csv", self.world.finished)

    def load(self):
        """Take the state back; returns the number of updates already made."""
        folder = self.settings.out
        state = load_checkpoint(folder, self.device)
        try:
            self.algorithm.load_state_dict(state["algorithm"])
            self.world.load_state_dict(state["world"])
        except (KeyError, RuntimeError) as error:
            raise ValueError(f"the run in {folder} had other settings ({error}); see its config.json") from error
        restore_rng_state(state["rng"])
        self._evaluations = state["evaluations"]
        return state["update"]
