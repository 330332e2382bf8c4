"""The list of commands, and how the words after `python -m minirl` become settings.

A command is a frozen dataclass whose fields are its options and whose run() does the work. The on-policy algorithms
are not listed here: each line of the table in on_policy.py is a command.
"""

import difflib
import io
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import NamedTuple

import tyro

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
    "tour": Command("Learn", "tour.Tour", "See it all: pretrain, fine-tune, four algorithms on sums, two on a walker."),
    "pretrain": Command(
        "Train", "language.Pretrain", "Make a tiny language model that has read sums, right and wrong ones.",
    ),
    "sft": Command("Train", "language.Finetune", "Supervised fine-tuning: raise the likelihood of given answers."),
    "generate": Command("Train", "language.Generate", "Let a trained model complete prompts."),
    "compare": Command("Compare", "compare.Compare", "Several algorithms on one environment, over several seeds."),
}  # fmt: skip
ALIASES = {  # names that other libraries use -> ours, the first one that the command has
    "--env-id": ("--task", "--env"), "--total-timesteps": ("--env-steps",), "--output-dir": ("--out",),
    "--model-name-or-path": ("--init",), "--seed": ("--seed", "--seeds"),
}  # fmt: skip


def all_commands():
    """dict name -> Command, those of the on-policy algorithms included; what they are is their file's first line."""
    from minirl.experiments.on_policy import ALGORITHMS  # costs the import of torch

    learners = {}
    for name, entry in ALGORITHMS.items():
        summary = sys.modules[entry.algorithm.__module__].__doc__.splitlines()[0]
        learners[name] = Command(entry.group, "on_policy.OnPolicy", summary)
    # `generate` last of its group: it uses what the others made.
    return dict(sorted((COMMANDS | learners).items(), key=lambda item: item[0] == "generate"))


@dataclass(frozen=True)
class _Task:
    task: str = "arithmetic"


def defaults_of(name, words):
    """The settings of command `name` where `words` do not say otherwise; for an algorithm --task selects them."""
    place = COMMANDS[name].place if name in COMMANDS else "on_policy.OnPolicy"
    module, kind = place.split(".")
    kind = getattr(import_module(f"minirl.experiments.{module}"), kind)
    if name in COMMANDS:
        return kind, kind()
    words = [re.sub("^--env[-_]id", "--task", word) for word in words]
    choice, _ = tyro_cli(_Task, args=words, return_unknown_args=True, add_help=False)
    return kind.of(name, choice.task)


def next_command(name, settings):
    """What to try after a command, or None."""
    task = getattr(settings, "task", None)
    if task not in (None, "arithmetic"):
        return f"compare --env {task}"
    follows = {"pretrain": "sft", "sft": "ppo", "generate": None, "tour": None, "compare": None}
    following = follows.get(name, "generate")
    return following and f"{following} --init {settings.out}"


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
        raise ValueError(explain_unknown(unknown, known))
    return settings


def tyro_cli(kind, **more):
    """tyro.cli without boxes: help is printed plainly (then None is returned), an error becomes a ValueError."""
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
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            yield from options(value)
        elif field.name != "name":  # of the algorithm: the command itself
            yield option(field.name)


def option(name):
    """The option that sets a field: gae_lambda -> --gae-lambda."""
    return "--" + name.replace("_", "-")


def translate(word, known):
    """`word` with a name that other libraries use replaced by the one that this command has."""
    name, equals, value = word.partition("=")
    ours = [other for other in ALIASES.get(name.replace("_", "-"), ()) if other in known]
    return ours[0] + equals + value if ours else word


def explain(text):
    """One line from what tyro prints about an error: a title, rules, the message, a rule, and more."""
    parts = [part.split() for part in re.split(r"^\W*[-\u2500]{8,}\W*$", text, flags=re.MULTILINE)]
    message = " ".join(parts[1] if len(parts) > 1 else text.split())
    message = re.sub(r"^Error parsing (--\S+): ", r"\1: ", re.sub(r"^Error parsing [^-]\S*: ", "", message))
    message = re.sub(r"invalid literal for int\(\) with base 10: (.*)", r"\1 is not a whole number", message)
    message = re.sub(r"could not convert string to float: (.*)", r"\1 is not a number", message)
    return re.sub(r"^(\w+) is ", lambda match: f"{option(match[1])} is ", message)  # our own check: the field's name


def explain_unknown(words, known):
    """One line about words that no option takes."""
    name = next((word.split("=")[0] for word in words if word.startswith("-")), None)
    if name is None:
        switch = words[0].lower() in ("true", "false", "0", "1", "yes", "no", "on", "off")
        hint = "; a switch takes no value: --name turns it on, --no-name off" if switch else ""
        return f"{words[0]!r} belongs to no option{hint}"
    close = difflib.get_close_matches(name.replace("_", "-").replace("--no-", "--"), known, n=2)
    return f"no option {name}" + (f"; did you mean {' or '.join(close)}?" if close else "")
