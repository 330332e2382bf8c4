"""The list of commands, and how the words after `python -m minirl` become settings.

A command is a frozen dataclass whose fields are its options and whose run() does the work. The on-policy algorithms
are not listed here: each line of the table in table.py is a command.
"""

import difflib
import io
import re
import shlex
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, get_type_hints

import tyro

from minirl.experiments.settings import TEXT_TASKS, RunSettings
from minirl.tracking import say

GROUPS = ("Learn", "Train", "Compare", "Advanced")
PROGRAM = "python -m minirl"


class Command(NamedTuple):
    """A line of the list."""

    group: str
    place: str
    """Module in experiments, and class."""
    summary: str


COMMANDS = {
    "tour": Command("Learn", "tour.Tour", "See it all: pretrain, fine-tune, algorithms on sums, reviews and a walker."),
    "notebooks": Command("Learn", "notebooks.Notebooks", "Copy the notebooks to a folder of your own; open Jupyter."),
    "pretrain": Command(
        "Train", "language.Pretrain", "Make a tiny language model that has read sums and reviews, good ones and bad.",
    ),
    "sft": Command("Train", "language.Finetune", "Supervised fine-tuning: raise the likelihood of given answers."),
    "reward-model": Command("Train", "preferences.RewardModelRun", "Learn to score answers from comparisons."),
    "dpo": Command("Train", "preferences.DPORun", "Direct preference optimisation: comparisons, no reward model."),
    "orpo": Command("Train", "preferences.ORPORun", "Comparisons in one stage, from the base model."),
    "q-sharp": Command("Train", "guided.QSharpRun", "Steer a frozen model by how its own texts tend to end."),
    "r1-zero": Command("Train", "r1_zero.R1Zero", "Reasoning from reward alone: GRPO straight from a base model."),
    "generate": Command("Train", "generating.Generate", "Let a trained model complete prompts."),
    "compare": Command("Compare", "compare.Compare", "Several algorithms on one environment, over several seeds."),
    "watch": Command("Compare", "watch.Watch", "A film of a walker that was trained, or of any control run."),
    "bench": Command("Advanced", "bench.Bench", "Time our PPO and TRPO beside Stable-Baselines3's, and the simulator."),
    "site": Command("Advanced", "site.Site", "The notebooks as web pages, with contents and a search."),
    "report": Command("Compare", "comparison_report.Report", "Tables, figures and verdicts from runs of compare."),
    "rlhf-2017": Command("Compare", "rlhf_2017.HumanPreferences",
                         "RLHF as in 2017: TRPO on a reward learned from a simulated labeller's comparisons."),
    "posttraining": Command("Compare", "posttraining.PostTraining",
                            "All ways from one SFT model to a better one, judged by the truth."),
}
ALIASES = {  # names that other libraries use -> ours, the first one that the command has
    "--env-id": ("--task", "--env"), "--total-timesteps": ("--env-steps",), "--output-dir": ("--out",),
    "--model-name-or-path": ("--init",), "--seed": ("--seed", "--seeds"), "--dataset-name": ("--data",),
}  # fmt: skip


def all_commands():
    """dict name -> Command, those of the on-policy algorithms included; what they are is their file's first line."""
    from minirl.experiments.table import ALGORITHMS  # costs the import of torch

    learners = {}
    for name, entry in ALGORITHMS.items():
        summary = sys.modules[entry.algorithm.__module__].__doc__.splitlines()[0]
        learners[name] = Command(entry.group, "commands.OnPolicy", summary)
    # `generate` last of its group: it uses what the others made.
    return dict(sorted((COMMANDS | learners).items(), key=lambda item: item[0] == "generate"))


Config, World = TypeVar("Config"), TypeVar("World")


@dataclass(frozen=True)
class OnPolicy(Generic[Config, World]):
    """The command of an algorithm: what its line of the table holds for one task."""

    name: tyro.conf.SuppressFixed[tyro.conf.Fixed[str]]
    task: str
    """arithmetic, reviews, or the id of a gymnasium environment (--env-id is the same); the defaults below are this
    task's."""
    algorithm: Config
    world: World
    training: RunSettings

    @classmethod
    def of(cls, name, task):
        """(type, defaults) of algorithm `name` on `task`."""
        from minirl.experiments.table import ALGORITHMS

        config, world, _ = ALGORITHMS[name].of(task)
        out = Path("runs", name if task == "arithmetic" else f"{name}-{re.sub('[^A-Za-z0-9._-]+', '-', task)}")
        return cls[type(config), type(world)], cls(name, task, config, world, RunSettings(out))

    @property
    def out(self):
        """The run's folder."""
        return self.training.out

    def run(self):
        """Train; returns the summary of Run.start."""
        from minirl.experiments.on_policy import Run

        return Run(self.name, self.task, self.algorithm, self.world, self.training).start()


@dataclass(frozen=True)
class TaskChoice:
    """What has to be known before an algorithm's options are."""

    task: str = "arithmetic"


def defaults_of(name, words):
    """(type, defaults) of command `name`; where they depend on the task, the --task among `words` selects them."""
    if name in COMMANDS:
        module, kind = COMMANDS[name].place.split(".")
        kind = getattr(import_module(f"minirl.experiments.{module}"), kind)
        return kind, kind.of(task_among(words)) if hasattr(kind, "of") else kind()
    task = task_among(words)
    if task not in TEXT_TASKS and (close := difflib.get_close_matches(task.lower(), TEXT_TASKS, n=1, cutoff=0.8)):
        raise ValueError(f"no task {task!r}; did you mean {close[0]}?")
    return OnPolicy.of(name, task)


def task_among(words):
    """What --task says."""
    words = [translate(word, ["--task"]) for word in words]
    return tyro_cli(TaskChoice, args=words, return_unknown_args=True, add_help=False)[0].task


def next_command(name, settings):
    """What to try after a command, or None."""
    task = getattr(settings, "task", None)
    if task not in (None, *TEXT_TASKS):
        return f"compare --env {task}"
    follows = {
        "pretrain": "sft", "sft": "reward-model" if task == "reviews" else "ppo", "reward-model": "ppo --task reviews",
        **dict.fromkeys(("generate", "tour", "notebooks", "site", "compare", "report", "watch", "bench", "rlhf-2017",
                        "posttraining", "q-sharp")),
    }  # fmt: skip
    following, out = follows.get(name, "generate"), shlex.quote(str(getattr(settings, "out", "")))
    if name == "reward-model":
        return f"{following} --init {shlex.quote(str(settings.init))} --reward-model {out}"
    more = f" --samples-from {out}" if following == "reward-model" else ""
    return following and f"{following} --init {out}{more}"


def parse(name, words):
    """Settings from the command line.

    Args:
        name: a command.
        words: what follows it, list of strings.
    Returns:
        The command's dataclass, or None if help was asked for and printed.
    Raises:
        ValueError: one line, for what cannot be understood or is out of range.
    """
    kind, default = defaults_of(name, words)
    known = sorted(options(default))
    words = [translate(word, known) for word in words]
    parsed = tyro_cli(
        kind, prog=f"{PROGRAM} {name}", description=all_commands()[name].summary, args=words, default=default,
        return_unknown_args=True, config=(tyro.conf.OmitArgPrefixes,),
    )  # fmt: skip
    if parsed is None:
        return None
    settings, unknown = parsed
    if unknown:
        where = f" with --task {settings.task}" if hasattr(settings, "task") else ""
        raise ValueError(explain_unknown(unknown, known, where))
    return settings


def tyro_cli(kind, **more):
    """tyro.cli without boxes: help is printed plainly (then None is returned), an error becomes a ValueError."""
    if hasattr(tyro, "_strings"):  # tyro takes an indented line of a docstring for a line of its own; this joins them
        tyro._strings.remove_single_line_breaks = lambda text: " ".join(text.split())
    out, err = io.StringIO(), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            return tyro.cli(kind, **more)
    except SystemExit as stop:
        if stop.code:
            raise ValueError(explain(err.getvalue())) from None
        say("\n".join(line.rstrip() for line in out.getvalue().splitlines()))
        return None


def options(settings):
    """Every option of a command, `--like-this`."""
    hints = get_type_hints(type(settings), include_extras=True)
    for field in fields(settings):
        value = getattr(settings, field.name)
        positional = tyro.conf.Positional in getattr(hints.get(field.name), "__metadata__", ())
        if is_dataclass(value):
            yield from options(value)
        elif field.name != "name" and not positional:  # name: of the algorithm, the command itself
            yield option(field.name)


def option(name):
    """The option that sets a field: gae_lambda -> --gae-lambda."""
    return "--" + name.replace("_", "-")


def translate(word, known):
    """`word` with a name that other libraries use replaced by the one that this command has."""
    name, equals, value = word.partition("=")
    ours = [other for other in ALIASES.get(name.replace("_", "-"), ()) if other in known]
    return ours[0] + equals + value if ours else word


PLAINER = (  # what tyro and Python say -> what a reader understands; applied in this order
    (r"^Error parsing [^-]\S*: ", ""),
    (r"^Error parsing (--\S+): ", r"\1: "),
    (r"(?:Could not find valid parse for arguments:|no type matching .*? could be instantiated from) \[(.*?)\].*",
     r"\1 does not fit"),
    (r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number"),
    (r"could not convert string to float: (.*)", r"\1 is not a number"),
    (r"^\w+(?= is )", lambda field: option(field[0])),  # our own checks name the field
)  # fmt: skip


def explain(text):
    """One line from what tyro prints about an error: a title, rules, the message, a rule, and more."""
    parts = [part.split() for part in re.split(r"^\W*[-\u2500]{8,}\W*$", text, flags=re.MULTILINE)]
    message = " ".join(parts[1] if len(parts) > 1 else text.split())
    for pattern, plainer in PLAINER:
        message = re.sub(pattern, plainer, message)
    return message


def explain_unknown(words, known, where=""):
    """One line about words that no option takes; `where` says when `known` are the options."""
    name = next((word.split("=")[0].replace("_", "-") for word in words if word.startswith("-")), None)
    if name is None:
        switch = words[0].lower() in ("true", "false", "0", "1", "yes", "no", "on", "off")
        hint = "; a switch takes no value: --name turns it on, --no-name off" if switch else ""
        return f"{words[0]!r} belongs to no option{hint}"
    no = "--no-" if name.startswith("--no-") else "--"
    close = difflib.get_close_matches("--" + name.removeprefix(no), known, n=1)
    return f"no option {name}{where}" + (f"; did you mean {close[0].replace('--', no, 1)}?" if close else "")
