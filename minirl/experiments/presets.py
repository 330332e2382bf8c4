"""Settings of whole comparisons: those of a published one, and ours for a million steps."""

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from minirl.algorithms.ppo import PPOConfig
from minirl.algorithms.trpo import TRPOConfig
from minirl.experiments.settings import ControlSettings
from minirl.experiments.table import ALGORITHMS


class Preset(NamedTuple):
    """A comparison: an environment, its length, and each algorithm's config and world."""

    env: str
    env_steps: int
    eval_every: int
    threshold: float
    """Return whose first passing is timed."""
    algorithms: dict[str, tuple[Any, ControlSettings]]
    note: str


# CleanRL's ppo_continuous_action.py: one walker, 2,048 steps a batch, 10 epochs of 32 mini-batches, clipped values,
# Adam's 3e-4 falling to 0. Its TRPO was never merged (pull request 435: up to 20 steps a batch, a KL of 0.01 each).
# Ours takes one step on the whole batch, of up to 0.1: mean return 104, 124, 148 for 0.03, 0.06, 0.1, seeds 100-104.
_ONE_WALKER = ControlSettings(num_envs=1, steps=2048)
CLEANRL_50K = Preset(
    "Walker2d-v4", 50_000, 5_000, 200.0,
    {
        "ppo": (PPOConfig(value_clip=0.2), _ONE_WALKER),
        "trpo": (TRPOConfig(delta=0.1, critic_minibatches=32), _ONE_WALKER),
    },
    "one walker, batches of 2,048 steps, CleanRL's PPO settings; 50,000 steps as in a widely read comparison",
)  # fmt: skip

# The best of fourteen random settings, by the sum of both algorithms' mean final returns (TRPO 2,206, PPO 2,150) over
# three runs of 300,000 steps on seeds from 1000 on: data/walker2d/trials.csv.
_SHARED = {"gamma": 0.995, "gae_lambda": 0.97, "critic_lr": 3e-4, "critic_epochs": 20, "critic_minibatches": 16,
           "lr_decay": True}  # fmt: skip
_FOUR_WALKERS = ControlSettings(num_envs=4, steps=256)
MUJOCO_1M = Preset(
    "Walker2d-v5", 1_000_000, 50_000, 2000.0,
    {
        "ppo": (PPOConfig(lr=3e-4, clip=0.2, minibatches=16, **_SHARED), _FOUR_WALKERS),
        "trpo": (TRPOConfig(delta=0.04, delta_decay=True, cg_iterations=20, **_SHARED), _FOUR_WALKERS),
    },
    "four walkers, batches of 1,024 steps, settings from an equal search for both (data/walker2d/trials.csv)",
)  # fmt: skip

PRESETS = {"cleanrl-50k": CLEANRL_50K, "mujoco-1m": MUJOCO_1M}


def entry_of(name, preset=None):
    """(config, world settings) of an algorithm: the preset's, or else what the single commands use on control."""
    if preset and name in preset.algorithms:
        return preset.algorithms[name]
    return ALGORITHMS[name].control, ALGORITHMS[name].control_world


def apply_changes(entries, changes):
    """Settings changed by words such as "ppo.clip=0.1" (of one algorithm) or "num_envs=8" (of all that have it).

    Args:
        entries: dict name -> (config, world settings).
        changes: list of such words.
    Returns:
        A new dict.
    Raises:
        ValueError: one line that names the word, where nothing has that name or the value does not fit.
    """
    entries, changed = dict(entries), set()
    for change in changes:
        path, equals, text = change.partition("=")
        owner, dot, name = path.rpartition(".")
        name = name.replace("-", "_")
        if not equals or (dot and owner not in entries):
            raise ValueError(f"cannot read {change!r}; write ALGORITHM.SETTING=VALUE, of {', '.join(entries)}")
        owners = [owner] if dot else list(entries)
        known = [algorithm for algorithm in owners if any(name in names(part) for part in entries[algorithm])]
        if not known:
            there = {setting for algorithm in owners for part in entries[algorithm] for setting in names(part)}
            near = get_close_matches(name, sorted(there), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{change!r}: no setting {name} in {' or '.join(owners)}{hint}")
        if twice := changed.intersection((algorithm, name) for algorithm in known):
            raise ValueError(f"{change!r}: {name} of {min(twice)[0]} is set twice; a comparison has one value of each, "
                             "so compare them in two, and give both folders to report")
        changed.update((algorithm, name) for algorithm in known)
        for algorithm in known:
            entries[algorithm] = tuple(
                replace(part, **{name: parse_value(text, change)}) if name in names(part) else part
                for part in entries[algorithm]
            )
    return entries


def changes_of(name, entry, changes):
    """Those of the words that change this algorithm, in one text."""
    mine = []
    for change in changes:
        owner, dot, setting = change.partition("=")[0].rpartition(".")
        if owner == name if dot else any(setting.replace("-", "_") in names(part) for part in entry):
            mine.append(change)
    return " ".join(mine)


def names(settings):
    """Of a dataclass's fields."""
    return [field.name for field in fields(settings)]


def parse_value(text, change):
    """A number, true, false, none, or several with blanks between; any other text as it is, for the field to refuse."""
    words = {"true": True, "false": False, "none": None}
    parts = [words.get(part.lower(), part) for part in text.split()]
    for kind in (int, float):
        parts = [_number(part, kind) for part in parts]
    if not parts:
        raise ValueError(f"{change!r} gives no value")
    return parts[0] if len(parts) == 1 else tuple(parts)


def _number(part, kind):
    try:
        return kind(part) if isinstance(part, str) else part
    except ValueError:
        return part
