"""The command report: what complete runs of a comparison say, as tables, figures and verdicts.

Declared beforehand:  final = greedy evaluation, mean of the last five;  speed = area under the greedy evaluation curve,
and steps to a threshold;  cost = environment steps per second of training, and seconds to the threshold. The evaluation
before training belongs to that curve, but is never a final, best or first passing one. Each run is a point. Runs of
different environment ids, Walker2d-v4 and -v5 say, never come into one table: their physics and rewards differ.
"""

import math
import shlex
import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tyro.conf import Positional

import minirl
from minirl.algorithms.settings import Settings
from minirl.experiments import comparison_figures as figures
from minirl.experiments.comparison_page import write_page
from minirl.experiments.overlay import overlays
from minirl.experiments.run_files import VERSIONS, RunFiles, complete_runs
from minirl.experiments.statistics import (
    area_under_curve,
    detectable_difference,
    difference,
    first_passing,
    iqm_interval,
    mean_interval,
    probability_of_improvement,
    verdict,
)  # fmt: skip
from minirl.plotting import save_figure
from minirl.tracking import say, write_rows

PUBLISHED = Path(minirl.__file__).parent.parent / "data" / "published" / "walker2d.csv"  # where this is a clone
CLAIMS = (  # of the original comparison: what TRPO or PPO is said to do better -> column, who has more of it, unit
    ("TRPO learns faster", "area_under_curve", "trpo", "return, mean over the run"),
    ("PPO ends better", "final_return", "ppo", "return"),
    ("PPO costs less", "env_steps_per_second", "ppo", "steps/s"),
)
TIMED = ("seconds", "env_steps_per_second", "seconds_to_threshold")  # of timing.csv; the rest repeats to the bit
HEADINGS = {  # columns of summary.csv that are averaged over seeds -> heading
    "final_return": "final return", "area_under_curve": "area under curve",
    "mean_return_all_episodes": "mean of training",
    "mean_return_last_20": "last 20", "max_return": "best episode", "max_evaluation_return": "best evaluation",
    "mean_length": "mean length", "env_steps_per_second": "steps/s",
}  # fmt: skip


@dataclass(frozen=True)
class Report(Settings):
    """Tables, figures and verdicts from the runs of one or several comparisons; trains nothing."""

    folders: Positional[tuple[Path, ...]] = ()
    """Folders of compare, or of single runs of it; all of one environment id."""
    out: Path | None = None
    """Where summary.csv, .md and .tex, the figures and report.html go. None: the first folder."""
    overlay: tuple[Path, ...] = ()
    """Runs of others to lay over ours: SB3's monitor.csv, CleanRL's TensorBoard folders."""
    threshold: float | None = None
    """Return whose first passing is timed. None: half of the best mean final return."""

    def run(self):
        """Write it all; returns (rows of summary.csv, {})."""
        if not self.folders:
            raise ValueError("name one or several folders of compare: python -m minirl report runs/compare")
        runs = [path for folder in self.folders for path in complete_runs(folder)]
        return report(runs, self.out or self.folders[0], self.threshold, self.overlay), {}


def summarise(run):
    """The row of summary.csv of one RunFiles, but for what depends on the threshold."""
    returns, lengths = (run.episodes.get(name, np.full(1, np.nan)) for name in ("return", "length"))
    evaluated, steps = run.eval["return_greedy"], run.eval["env_steps"]
    seconds = run.timing["seconds"][-1] - run.timing["evaluation_seconds"][-1]
    return {"label": run.label} | run.summary | {
        "final_return": run.final(), "final_return_sampled": run.final("return_sampled"),
        "area_under_curve": area_under_curve(steps, evaluated),
        "max_evaluation_return": float(evaluated[steps > 0].max()),
        "evaluations": len(steps), "env_steps_per_second": float(run.timing["env_steps"][-1] / seconds),
        "seconds": float(seconds), "episodes": len(returns), "mean_return_all_episodes": statistics.fmean(returns),
        "max_return": float(returns.max()), "mean_return_last_20": statistics.fmean(returns[-20:]),
        "mean_length": statistics.fmean(lengths), "max_length": int(lengths.max()) if run.episodes else lengths[0],
    }  # fmt: skip


def time_to_threshold(run, threshold):
    """steps_to_threshold and seconds_to_threshold (of training) of one RunFiles; nan where it is never reached."""
    trained = run.eval["env_steps"] > 0
    steps = first_passing(run.eval["env_steps"][trained], run.eval["return_greedy"][trained], threshold)
    training = run.timing["seconds"] - run.timing["evaluation_seconds"]
    at = np.interp(steps, run.timing["env_steps"], training) if math.isfinite(steps) else math.nan
    return {"steps_to_threshold": steps, "seconds_to_threshold": float(at)}


def check_alike(runs):
    """ValueError where runs cannot be compared, or were evaluated a different number of times."""
    for name in ("env_id", "env_steps"):
        if len(found := sorted({str(run.summary[name]) for run in runs})) > 1:
            raise ValueError(f"runs with different {name} cannot be compared: {', '.join(found)}")
    if len(found := sorted({len(run.eval["env_steps"]) for run in runs})) > 1:
        raise ValueError(f"runs with different numbers of evaluations cannot be compared: {', '.join(map(str, found))}")


def report(folders, out, threshold=None, overlay=()):
    """Write summary.csv, .md, .tex, the figures and report.html to OUT and print the table.

    Args:
        folders: of complete runs.
        out: folder.
        threshold: a return; None for half of the best mean final return.
        overlay: paths of runs of others.
    Returns:
        The rows of summary.csv, a list of dicts.
    Raises:
        ValueError: with nothing written, where environment ids, steps or numbers of evaluations differ.
    """
    runs = sorted(map(RunFiles, folders), key=lambda run: (run.label, run.summary["seed"]))
    check_alike(runs)
    if not runs:
        write_rows(Path(out) / "summary.csv", [])
        return []
    others = overlays(overlay, runs[0].summary["env_id"])
    groups = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    rows = [summarise(run) for run in runs]
    if threshold is None:
        threshold = max(map(statistics.fmean, columns(rows, "final_return").values())) / 2
    rows = [row | time_to_threshold(run, threshold) for row, run in zip(rows, runs, strict=True)]
    write_rows(Path(out) / "summary.csv", [{k: v for k, v in row.items() if k not in TIMED} for row in rows])
    write_rows(Path(out) / "timing.csv", [{name: row[name] for name in ("label", "seed", *TIMED)} for row in rows])
    found = Findings(rows, threshold, [Path(folder).parent.parent for folder in folders])
    write_page(Path(out), found, draw(groups, rows, out, others))
    say(found.text())
    say(f"with figures and tables: {Path(out) / 'report.html'}")
    return rows


def columns(rows, name):
    """dict label -> the numbers of one column, in the order of the rows."""
    out = {}
    for row in rows:
        out.setdefault(row["label"], []).append(row[name])
    return out


def draw(groups, rows, out, others):
    """Save the figures as PNG and SVG; returns dict file name -> alternative text."""
    final, seeds = columns(rows, "final_return"), [row["seed"] for row in rows]
    made = {
        "seeds": (figures.all_seeds(groups), "Steps per second, explained variance, value loss, episode length and "
                  "return over the steps, means over seeds with bands"),
        "one-seed": (figures.one_seed(groups, min(seeds)), f"The same five panels for seed {min(seeds)} alone"),
        "evaluations": (figures.evaluations(groups), "Evaluation returns over the steps with bands; final returns"),
    }  # fmt: skip
    if len(groups) > 1 and min(map(len, final.values())) > 2:
        names = list(final)[:2]
        made["lottery"] = (figures.lottery(final[names[0]], final[names[1]], names),
                           "Differences of single seeds beside the interval of all; how often small studies err")
    if len(groups) > 2:
        made["variants"] = (figures.variants(groups), "Final returns of every variant")
    as_long = rows[0]["env_id"].startswith("Walker2d-") and rows[0]["env_steps"] >= 1_000_000  # as the published ones
    if as_long and PUBLISHED.is_file():
        made["published"] = figures.published(PUBLISHED, "Walker2d-"), "Walker2d returns that others published"
    if others:
        made["overlay"] = (figures.overlaid(groups, others), "Training returns with runs of others, dotted")
    made = {name: pair for name, pair in made.items() if pair[0] is not None}
    for name, (figure, _) in made.items():
        for ending in ("png", "svg"):
            save_figure(figure, Path(out) / f"{name}.{ending}")
    return {name: text for name, (_, text) in made.items()}


class Findings:
    """The rows of summary.csv, what they come to for each label, and the verdicts."""

    def __init__(self, rows, threshold, folders):
        self.rows, self.threshold, first = rows, threshold, rows[0]
        used = ", ".join(f"{name} {'/'.join(sorted({str(row[name]) for row in rows}))}" for name in VERSIONS)
        self.title = f"{first['env_id']}, {first['env_steps']:,} environment steps a run ({used})"
        self.command = "python -m minirl report " + shlex.join(dict.fromkeys(map(str, folders)))

    def table(self):
        """(headings, lines): a line a label, mean over seeds +/- half the width of its 95 % t interval."""
        lines = []
        for label in columns(self.rows, "seed"):
            mine = [row for row in self.rows if row["label"] == label]
            final = [row["final_return"] for row in mine]
            reached = [row["steps_to_threshold"] for row in mine if math.isfinite(row["steps_to_threshold"])]
            when = f"{statistics.median(reached):,.0f}" if reached else "-"
            lines.append([label, str(len(mine)), *(cell([row[name] for row in mine]) for name in HEADINGS),
                          interval_text(iqm_interval(final)), f"{when} ({len(reached)}/{len(mine)})"])  # fmt: skip
        return ["algorithm", "runs", *HEADINGS.values(), "final, IQM [BCa]", f"steps to {self.threshold:,.0f}"], lines

    def claims(self):
        """A dict for each claim of the original comparison, where TRPO and PPO were both run, in one variant each."""
        labels, out = self.labels(), []
        for claim, name, better, unit in CLAIMS if all(len(mine) == 1 for mine in labels.values()) else ():
            values = columns(self.rows, name)
            mine, other = (values[labels[who][0]] for who in (better, "ppo" if better == "trpo" else "trpo"))
            (gap, low, high), least = difference(mine, other), detectable_difference(mine, other)
            out.append({"claim": claim, "measured by": f"{name.replace('_', ' ')} ({unit})",
                        "difference": interval_text((gap, low, high)),
                        "P(run of one > run of the other)": f"{probability_of_improvement(mine, other):.2f}",
                        "detectable": f"{least:,.0f}" if math.isfinite(least) else "from two seeds on",
                        "verdict": verdict(low, high)})
        return out

    def labels(self):
        """The variants of TRPO and of PPO: dict algorithm -> list of labels."""
        return {who: sorted({row["label"] for row in self.rows if row["algorithm"] == who}) for who in ("trpo", "ppo")}

    def without_verdict(self):
        """Why there are no claims to judge, in a sentence; empty where there are."""
        several = [name for name, mine in self.labels().items() if len(mine) > 1]
        return f"No verdict: there are several variants of {' and of '.join(several)}." if several else ""

    def text(self):
        """Both, as lines of plain characters."""
        headings, lines = self.table()
        widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
        out = [self.title, "mean over the seeds +/- half the width of its 95 % t interval"]
        for line in [headings, *lines]:
            out.append("  ".join(text.ljust(w) if i == 0 else text.rjust(w)
                                 for i, (text, w) in enumerate(zip(line, widths, strict=True))))  # fmt: skip
        for claim in self.claims():
            out.append(f"{claim['claim']}: {claim['verdict']} (by {claim['measured by']}: difference "
                       f"{claim['difference']}; detectable {claim['detectable']})")
        return "\n".join([*out, self.without_verdict()]).rstrip()


def cell(values):
    """Text: the mean of independent values, and from two on half the width of its 95 % t interval."""
    mean, low, high = mean_interval(values)
    return f"{mean:,.1f}" if len(values) < 2 else f"{mean:,.1f} +/- {(high - low) / 2:,.1f}"


def interval_text(triple):
    """1,234 [1,000, 1,500]."""
    found, low, high = triple
    return f"{found:,.0f} [{low:,.0f}, {high:,.0f}]" if math.isfinite(low) else f"{found:,.0f}"
