"""The package against data/vectors: values and gradients that were derived without torch and without minirl."""

import dataclasses
import importlib
import inspect
import itertools
import json
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import torch
from torch.distributions import Categorical, Independent, Normal

import minirl.algorithms
import minirl.functional
from minirl.algorithms.grpo import GRPOConfig
from minirl.algorithms.optimize import Stateful
from minirl.algorithms.reinforce import EMABaseline
from minirl.algorithms.trpo import conjugate_gradient, fisher_vector_product, trust_region_step

FOLDER = Path(__file__).resolve().parent.parent / "data" / "vectors"
FILES = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.json"))}
ENTRIES = {entry["function"]: entry for file in FILES.values() for entry in file["functions"]}
CASES = [
    pytest.param(entry, case, id=f"{name.split('.')[-1]}-{case['name']}".replace(" ", "_"))
    for name, entry in ENTRIES.items()
    for case in entry["cases"]
]
FLAGS = ("mask", "terminated", "truncated", "step_ends")
WITHOUT_VECTORS = {
    "minirl.functional.masked.check_same_shape": "raises or does nothing; it has no value",
    "minirl.functional.masked.zero_outside": "first step of every loss with a mask; their vectors poison the outside",
    "minirl.algorithms.trpo.fisher_product": "fisher_vector_product is this map, applied once",
    "minirl.algorithms.q_sharp.switch_points": "draws at random",
    "minirl.algorithms.q_sharp.OutcomeModel": "a network; its loss and its value have vectors",
    "minirl.algorithms.q_sharp.GuidedPolicy": "two networks; guided_logits has vectors",
    "minirl.algorithms.critic": "value_loss's vectors stand under ppo, its public place; the rest runs the loops",
    "minirl.algorithms.rejection_sampling.best_of_group": "picks rows; tested by brute force",
    "minirl.algorithms.segment_reward.SegmentReward": "three networks and their labels; the loss has vectors",
    "minirl.algorithms.segment_reward.ensemble": "makes networks",
    "minirl.algorithms.segment_reward.disagreement": "a variance; tested by brute force",
    "minirl.algorithms.segment_reward.adapted_l2": "a rule of three lines, tested at its edges",
    "minirl.algorithms.reward_model.LearnedReward": "a network as a reward function; the loss has vectors",
    "minirl.algorithms.dpo.sequence_logprobs": "masked_sum of token_logprobs, which have vectors",
    "minirl.algorithms.optimize": "what surrounds a loss: optimiser steps, schedules, averages of stats",
    "minirl.algorithms.settings": "checks what a user asks for; no mathematics",
}


class LinearPolicy(torch.nn.Module):
    """obs -> Categorical of logits W·obs, or Normal of means W·obs and deviations exp(log_std)."""

    def __init__(self, distribution, weight, log_std=None):
        super().__init__()
        self.distribution = distribution
        self.weight = torch.nn.Parameter(tensor(weight))
        if log_std is not None:
            self.log_std = torch.nn.Parameter(tensor(log_std))

    def forward(self, obs):
        outputs = obs @ self.weight.T
        if self.distribution == "categorical":
            return Categorical(logits=outputs)
        return Independent(Normal(outputs, self.log_std.exp().expand_as(outputs)), 1)


def numbers(x):
    """A nested list with the strings that stand for NaN and the infinities turned into numbers."""
    return [numbers(part) for part in x] if isinstance(x, list) else float(x) if isinstance(x, str) else x


def tensor(x):
    """float64 where there is any float, int64 where there are only integers."""
    whole = torch.tensor(numbers(x)).dtype == torch.int64
    return torch.tensor(numbers(x), dtype=torch.int64 if whole else torch.float64)


def arguments(entry, case):
    """The case's inputs as the function takes them; everything that could carry a gradient asks for one."""
    out = {}
    for name, x in case["inputs"].items():
        out[name] = x if x is None or isinstance(x, (float, dict)) else tensor(x)
        if name in FLAGS and x is not None:
            out[name] = out[name].bool()
        elif name in entry["constants"] or name in case.get("gradients", {}):
            if x is not None:
                out[name].requires_grad_()
    return out


def ema_baseline(returns, decay):
    baseline, seen = EMABaseline(decay), []
    for value in returns:
        seen.append(baseline.value)
        baseline.update(value)
    return torch.tensor([*seen, baseline.value], dtype=torch.float64)


def linear_trust_region_step(policy, **arguments):
    policy = LinearPolicy(**policy)
    stats = trust_region_step(policy, **arguments)
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]), stats


CALLS = {  # where the vectors' form is not the call itself
    "minirl.algorithms.reinforce.EMABaseline": ema_baseline,
    "minirl.algorithms.trpo.conjugate_gradient": (
        lambda matrix, b, **options: conjugate_gradient(lambda vector: matrix @ vector, b, **options)
    ),
    "minirl.algorithms.trpo.fisher_vector_product": (
        lambda policy, **rest: fisher_vector_product(LinearPolicy(**policy), **rest)
    ),
    "minirl.algorithms.trpo.trust_region_step": linear_trust_region_step,
}


def resolve(name):
    module, attribute = name.rsplit(".", 1)
    return CALLS.get(name) or getattr(importlib.import_module(module), attribute)


def check_text(entry, case):
    assert resolve(entry["function"])(**case["inputs"]) == case["value"]


def check(entry, case, evidence):
    def compare(ours, right, tolerance, what):
        got, expected = torch.as_tensor(ours, dtype=torch.float64), torch.as_tensor(numbers(right), dtype=torch.float64)
        reference = f"`data/vectors`, {'gradients' if what.startswith('gradient') else 'values'} †"
        evidence(entry["source"], entry["function"], reference, got, expected, tolerance, relative=True)

    given = arguments(entry, case)
    out = resolve(entry["function"])(**given, **case["options"])
    if isinstance(case["value"], dict):
        for name, ours in zip(case["value"], out, strict=True):
            compare(ours, case["value"][name], 1e-10, name)
        return
    value, stats = out if "stats" in case else (out, {})
    compare(value, case["value"], 1e-10, "value")
    for name, right in case.get("stats", {}).items():
        compare(stats[name], right, 1e-10, name)
    if "gradients" not in case:
        return
    (value * tensor(case["cotangent"]) if "cotangent" in case else value).sum().backward()
    for name, right in case["gradients"].items():
        compare(given[name].grad, right, 1e-9, f"gradient of {name}")
    for name in entry["constants"]:
        gradient = None if given[name] is None else given[name].grad
        assert gradient is None or not gradient.any(), f"{name} is a constant, but a gradient flows into it"


@pytest.mark.parametrize(("entry", "case"), CASES)
def test_ours_equals_the_vectors(entry, case, evidence):
    if ".verifiers." in entry["function"]:
        check_text(entry, case)
    else:
        check(entry, case, evidence)


def test_the_files_are_what_make_vectors_writes(tmp_path):
    """-S hides every installed package: neither torch nor numpy nor minirl can have had a part in the numbers."""
    command = [sys.executable, "-E", "-S", str(FOLDER / "make_vectors.py"), "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes(), f"{name} is stale: run make_vectors.py"


def test_the_example_in_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=FOLDER.parent.parent
    )
    assert done.returncode == 0 and "5 cases" in done.stdout, done.stdout + done.stderr


def public_functions(package):
    """(module, full name) of functions and of classes that are neither settings nor algorithms."""
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        for name, member in inspect.getmembers(module, lambda m: inspect.isfunction(m) or inspect.isclass(m)):
            own = member.__module__ == module.__name__ and not name.startswith("_")
            settings = dataclasses.is_dataclass(member)
            algorithm = inspect.isclass(member) and issubclass(member, Stateful)
            if own and not settings and not algorithm:
                yield module.__name__, f"{module.__name__}.{name}"


def test_every_public_function_has_vectors():
    public = [*public_functions(minirl.functional), *public_functions(minirl.algorithms)]
    names = {name for pair in public for name in pair}
    assert set(WITHOUT_VECTORS) <= names, "an exclusion names nothing"
    assert not set(WITHOUT_VECTORS) & set(ENTRIES), "both excluded and present"
    missing = [name for module, name in public if not {module, name} & {*WITHOUT_VECTORS, *ENTRIES}]
    assert not missing, "add formulas and cases to data/vectors/make_vectors.py, or a reason to WITHOUT_VECTORS"


def test_every_option_of_grpo_has_vectors():
    hints = get_type_hints(GRPOConfig)
    wanted = set(itertools.product(get_args(hints["reduction"]), get_args(hints["kl_estimator"]), (1, 2)))
    seen, without_kl = set(), set()
    for case in ENTRIES["minirl.algorithms.grpo.grpo_loss"]["cases"]:
        options, dimensions = case["options"], tensor(case["inputs"]["advantages"]).dim()
        reduction = options.get("reduction", "sequence")
        if options.get("beta", 0.0):
            seen.add((reduction, options.get("kl", "k3"), dimensions))
        else:
            without_kl.add((reduction, dimensions))
    assert wanted <= seen and set(itertools.product(get_args(hints["reduction"]), (1, 2))) <= without_kl


def test_every_loss_gives_gradients():
    for name, entry in ENTRIES.items():
        if name.endswith("_loss"):
            stats = name.endswith("kl_in_loss") or all("stats" in case for case in entry["cases"])
            assert stats and all("gradients" in case for case in entry["cases"]), name


def test_the_files_are_small_and_plain_json():
    assert sum(os.path.getsize(FOLDER / name) for name in FILES) < 500_000
    for name in FILES:
        json.loads(
            (FOLDER / name).read_text(encoding="utf-8"),
            parse_constant=lambda constant, name=name: pytest.fail(f"{name} holds {constant}, which is no JSON"),
        )
