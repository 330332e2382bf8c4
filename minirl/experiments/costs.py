"""What each method costs: models in memory, peak memory, lines of code, seconds for an update. Measured by running."""

import ast
import copy
import inspect
import multiprocessing
import sys
import time
from pathlib import Path

import torch

from minirl.algorithms import critic, dpo, grpo, optimize, orpo, ppo, q_sharp, reinforce, rejection_sampling, sft, trpo
from minirl.algorithms.optimize import descend
from minirl.algorithms.q_sharp import OutcomeModel, QSharp
from minirl.experiments.comparisons import Comparisons, packed
from minirl.experiments.guided import QSharpRun, grid, roll_outs
from minirl.experiments.models import load_model
from minirl.experiments.on_policy import build
from minirl.experiments.preferences import DPORun, ORPORun
from minirl.experiments.table import ALGORITHMS
from minirl.experiments.tasks import text_setup
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import read_pairs

# Modules of an algorithm, and the models that are in memory while it trains against a reward model.
METHODS = {
    "trpo": ((trpo, critic, optimize), "policy, reference, critic, reward model"),
    "ppo": ((ppo, critic, optimize), "policy, reference, critic, reward model"),
    "grpo": ((grpo, ppo, optimize), "policy, reference, reward model"),
    "reinforce": ((reinforce, optimize), "policy, reference, reward model"),
    "rejection-sampling": ((rejection_sampling, sft, optimize), "policy, reference, reward model"),
    "q-sharp": ((q_sharp, optimize), "reference, guide, reward model"),
    "dpo": ((dpo, optimize), "policy, reference"),
    "orpo": ((orpo, optimize), "policy"),
}


def lines_of_code(*modules):
    """Lines of modules that hold code: no blank lines, comments or docstrings."""
    total = 0
    for module in modules:
        source = inspect.getsource(module)
        kept = {number for number, line in enumerate(source.splitlines(), 1) if line.strip()[:1] not in ("", "#")}
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                kept -= set(range(node.lineno, node.end_lineno + 1))
        total += len(kept)
    return total


def peak_megabytes():
    """Most memory that this process has had, in megabytes; None where the system does not tell."""
    status = Path("/proc/self/status")  # Linux; getrusage there begins with what the parent process had
    if status.is_file():
        peak = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return None


def one_update(name, story):
    """A function that makes one update of a method on the story's models, and returns the rows that it learned from."""
    if name in ("dpo", "orpo"):
        command = {"dpo": DPORun, "orpo": ORPORun}[name](comparisons=Comparisons(samples_from=story.sft))
        pairs = packed(read_pairs(story.reward_model / "preferences.jsonl"), default_tokenizer(), 96, story.device)
        gpt, tokenizer = load_model(story.base if name == "orpo" else story.sft, story.device)
        algorithm, *_ = command.prepared(gpt, tokenizer, pairs, 0.0, story.device)
        part = pairs.rows(torch.arange(command.batch_size))
        return lambda: descend(algorithm.optimizer, [algorithm.loss(part)]) and 2 * len(part)
    if name == "q-sharp":
        command = QSharpRun()
        world, reference, _ = text_setup("reviews", story.world(command.world), story.seed, story.device)
        data = roll_outs(world, None, reference, torch.Generator().manual_seed(0))
        model = OutcomeModel(copy.deepcopy(reference.gpt), grid(data.outcomes, command.algorithm.bins))
        part, algorithm = data.rows(torch.arange(command.batch_size)), QSharp(model, command.algorithm)
        return lambda: descend(algorithm.optimizer, [algorithm.loss(part)]) and len(part)
    entry = ALGORITHMS[name]
    config, settings, _ = entry.of("reviews")
    world, policy, make_critic = text_setup("reviews", story.world(settings), story.seed, story.device)
    algorithm = build(entry.algorithm, config, policy, make_critic)

    def update():
        batch = world.collect(policy, getattr(algorithm, "critic", None))
        algorithm.update(batch)
        return len(batch.mask)

    return update


def measure(name, story, updates, connection):
    """Send (seconds per update, rows, megabytes that the process grew by) of one method; runs in its own process."""
    torch.set_num_threads(1)
    before = peak_megabytes()
    update = one_update(name, story)
    rows = update()  # the first one also pays for what is made once
    began = time.perf_counter()
    for _ in range(updates):
        update()
    seconds = (time.perf_counter() - began) / updates
    connection.send((seconds, rows, None if before is None else peak_megabytes() - before))


def cost_table(story, updates=3):
    """Rows for the report: every method alone in a process of its own, one after the other."""
    rows, context = [], multiprocessing.get_context("spawn")
    for name, (modules, models) in METHODS.items():
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=measure, args=(name, story, updates, sender))
        process.start()
        sender.close()  # else nobody would notice that the other end is gone
        try:
            seconds, count, megabytes = receiver.recv()
        except EOFError:
            raise RuntimeError(f"{name} failed in its own process; see its error above") from None
        process.join()
        rows.append({
            "method": name, "models_in_memory": models, "number_of_models": models.count(",") + 1,
            "peak_megabytes": "" if megabytes is None else megabytes, "lines_of_code": lines_of_code(*modules),
            "seconds_per_update": seconds, "rows_per_update": count, "seconds_per_1000_rows": 1000 * seconds / count,
        })  # fmt: skip
    return rows
