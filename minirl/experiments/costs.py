"""What each method costs: models in memory, peak memory, lines of code, seconds for an update. Measured by running."""

import ast
import inspect
import multiprocessing
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minirl.algorithms import critic, dpo, grpo, optimize, orpo, ppo, q_sharp, reinforce, rejection_sampling, trpo
from minirl.experiments.guided import QSharpRun
from minirl.experiments.methods import GuidedMethod, Method, OnPolicyMethod, PairsMethod
from minirl.experiments.preferences import DPORun, ORPORun

# Modules of an algorithm, and the models that are in memory while it trains against a reward model.
METHODS = {
    "trpo": ((trpo, critic, optimize), "policy, reference, critic, reward model"),
    "ppo": ((ppo, critic, optimize), "policy, reference, critic, reward model"),
    "grpo": ((grpo, optimize), "policy, reference, reward model"),
    "reinforce": ((reinforce, optimize), "policy, reference, reward model"),
    "rejection-sampling": ((rejection_sampling, optimize), "policy, reference, reward model"),
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


def measure(name, story, updates, connection):
    """Send (seconds per update, megabytes above what the process had before) of one method; runs in its own process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        common = {"title": str(Path(folder, name)), "story": story, "size": 1.0}
        if name in ("dpo", "orpo"):
            command = replace({"dpo": DPORun, "orpo": ORPORun}[name](), steps=updates, evaluate_every=0)
            method = PairsMethod(**common, command=command)
        elif name == "q-sharp":
            method = GuidedMethod(**common, command=replace(QSharpRun(), steps=updates, rollouts=256))
        else:
            method = OnPolicyMethod(**common, algorithm=name, updates=updates, evaluate_every=0)
        before = peak_megabytes()
        summary = method.train(lambda amount: None)
        after = peak_megabytes()
    steps = updates * (2 if name == "q-sharp" else 1)  # of both rounds
    connection.send((summary["seconds"] / steps, None if before is None else after - before))


@dataclass(frozen=True)
class Cost(Method):
    """The table: every method alone in a process of its own, one after the other."""

    updates: int = 3

    def run(self, advance):
        """Measure all; returns the rows."""
        began, rows, context = time.perf_counter(), [], multiprocessing.get_context("spawn")
        for name, (modules, models) in METHODS.items():
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(name, self.story, self.updates, sender))
            process.start()
            sender.close()  # else nobody would notice that the other end is gone
            try:
                seconds, megabytes = receiver.recv()
            except EOFError:
                raise RuntimeError(f"{name} failed in its own process; see its error above") from None
            process.join()
            advance(self.size / len(METHODS))
            rows.append({
                "method": name, "models_in_memory": models, "number_of_models": models.count(",") + 1,
                "peak_megabytes": "" if megabytes is None else megabytes,
                "lines_of_code": lines_of_code(*modules), "seconds_per_update": seconds,
            })  # fmt: skip
        return {"rows": rows, "seconds": time.perf_counter() - began}
