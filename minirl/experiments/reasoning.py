"""Two jobs of the story about sums that are thought through: R1-Zero and its ablation, and process supervision."""

import time
from dataclasses import dataclass, replace

from minirl.algorithms.grpo import GRPOConfig
from minirl.experiments.language import Pretrain
from minirl.experiments.methods import Method
from minirl.experiments.on_policy import Run
from minirl.experiments.r1_zero import R1Zero
from minirl.experiments.settings import ArithmeticSettings, RunSettings, SumsSettings
from minirl.tracking import read_rows


def curve(title, history):
    """Rows for the report: one for every evaluation of a run on sums."""
    return [{"run": title, "update": row["step"]} | {
        name: row.get(name, "") for name in (
            "eval_accuracy_greedy", "eval_accuracy_sampled", "eval_format_sampled", "eval_response_length", "score",
            "reward_off_vocabulary",
        )} for row in history if "eval_accuracy_greedy" in row]  # fmt: skip


@dataclass(frozen=True)
class Reasoning(Method):
    """R1-Zero from a base model, or from an untrained one."""

    start: str = "base"
    quick: bool = False

    def run(self, advance):
        """Train; returns the curve."""
        began = time.perf_counter()
        command = R1Zero(
            out=self.out, start=self.start, seed=self.story.seed, device=self.story.device, quiet=True,
            **({"updates": 2} if self.quick else {}),
        )  # fmt: skip
        if self.quick:
            command = replace(command, base=replace(command.base, base_steps=20))
        summary = command.run()
        advance(self.size)
        return {"rows": curve(self.title, summary["history"]), "seconds": time.perf_counter() - began}

    def again(self):
        """The curve of a run that is there."""
        rows = read_rows(self.out / "metrics.csv")
        return {"rows": curve(self.title, rows), "seconds": rows[-1]["seconds"]}


@dataclass(frozen=True)
class Supervision(Method):
    """GRPO rewarded for outcomes against GRPO rewarded for steps, from one base that slips in two steps of five."""

    quick: bool = False

    def run(self, advance):
        """Train the base and both; returns their curves."""
        began, rows = time.perf_counter(), []
        common = {"seed": self.story.seed, "device": self.story.device, "quiet": True}
        arithmetic = ArithmeticSettings(terms=4, format="think")
        base = Pretrain(
            out=self.out / "base", arithmetic=arithmetic, thinking=1.0, wrong_thinking=0.0, forgetful=0.0, wrong=0.0,
            careless=0.4, reviews=0, steps=20 if self.quick else 1_500, evaluate_every=0, **common,
        )  # fmt: skip
        base.run()
        for kind in ("outcome", "process"):
            world = SumsSettings(
                init=base.out, arithmetic=arithmetic, group_size=8, prompts_per_batch=32,
            )  # fmt: skip
            run = Run("grpo", "arithmetic", GRPOConfig(kl_beta=0.0, lr=5e-4, supervision=kind), world,
                      RunSettings(out=self.out / kind, updates=2 if self.quick else 60, evaluate_every=3, **common))
            rows += curve(kind, run.start(on_log=lambda row: advance(self.size / 122))["history"])
        return {"rows": rows, "seconds": time.perf_counter() - began}

    def again(self):
        """The curves of runs that are there."""
        found = {kind: read_rows(self.out / kind / "metrics.csv") for kind in ("outcome", "process")}
        rows = [row for kind, history in found.items() for row in curve(kind, history)]
        return {"rows": rows, "seconds": sum(history[-1]["seconds"] for history in found.values())}
