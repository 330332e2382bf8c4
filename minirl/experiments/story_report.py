"""The figures and report.html of posttraining."""

import base64
from string import Template

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from minirl.checkpoint import replacing
from minirl.experiments.report import STYLE, html_table
from minirl.plotting import colour_of, dress, save_figure
from minirl.tracking import machine, read_rows
from minirl.worlds.reviews import Reviews

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minirl: post-training</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
$style</style></head><body>
<h1>minirl: post-training</h1>
<p>One tiny GPT, one fine-tuned model, and many ways on. The annotator who compared the texts is <b>simulated</b>:
every text has a true score that is known, so a reward model that learned from noisy comparisons can be held against
the truth, which nobody can do with real text. Nothing here says what people like.</p>
<h2>The reward model</h2>
$reward
<h2>Every method, judged by the truth</h2>
<div class="scroll">$results</div>
<p>Means over $judged completions of $prompts held-out prompts, sampled at temperature 1. Learned score: in deviations
of the fine-tuned model's scores. KL to the fine-tuned model: exact for every token, averaged over sampled completions,
nats per completion; for best of n the bound ln n − (n − 1)/n, which equal texts keep it below. Wins: against as many
texts of the other on the same prompts, ties half, 95 % Wilson interval (which takes comparisons on one prompt for
independent ones). $pairs preference pairs trained the reward model; nine tenths of them DPO and ORPO. One seed
($seed).</p>
<h2>Who beats whom</h2>
<div class="scroll">$wins</div>
<p>How often the method of the row beats that of the column.</p>
<h2>Over-optimisation</h2>
<img alt="Learned score and true score against KL to the fine-tuned model"
src="data:image/png;base64,$overoptimisation">
<h2>Reasoning from reward alone</h2>
<img alt="Accuracy, format, length of R1-Zero and of the same from a random model; outcome against process supervision"
src="data:image/png;base64,$reasoning">
<h2>What each method costs</h2>
<div class="scroll">$costs</div>
<p>An update collects its rows first, where the method acts (Q# learns from rows collected before). Peak memory: what
the process grew by from loading the models on; lines of code: of the algorithm's file and those of algorithms/ that it
imports, without comments and docstrings. One thread, after all other
runs.</p>
<h2>Texts</h2>
<div class="scroll">$samples</div>
<footer>minirl $version, torch $torch, python $python; $cpu, $cores cores. Made by
<code>python -m minirl posttraining$options</code>.</footer>
</body></html>
""")


def write_story(results):
    """Draw the figures and write OUT/report.html from what has been finished."""
    command, here = results.command, machine()
    out = command.out
    over_optimisation(results, out / "overoptimisation.png")
    reasoning(results, out / "reasoning.png")
    after = results.summaries["reward-model"]["after"]
    columns = ["true_score", "learned_score", "kl_to_sft", "response_length", "wins_against_sft", "seconds"]
    rows = sorted(results.rows(), key=lambda row: -row["true_score"])
    costs = results.others.get("costs", {"rows": []})["rows"]
    wins = results.matrix()
    names = list(wins[0])[1:] if wins else []
    page = PAGE.substitute(
        here, style=STYLE, version=here["minirl"], seed=command.seed, pairs=results.summaries["reward-model"]["pairs"],
        judged=len(results.methods["sft"]["true"]), prompts=len(Reviews().held_out()[0]),
        reward=html_table(["on held-out pairs and samples", ""], [[name.removeprefix("eval_").replace("_", " "),
                                                                   f"{value:.3f}"] for name, value in after.items()]),
        results=html_table(["method", *(column.replace("_", " ") for column in columns)],
                           [[row["method"], *(cell(row, column) for column in columns)] for row in rows]),
        wins=html_table(["", *names], [[row["method"], *(f"{row[name]:.0%}" for name in names)] for row in wins]),
        costs=html_table([name.replace("_", " ") for name in costs[0]],
                         [[show(value) for value in row.values()] for row in costs]) if costs else "",
        samples=samples_table(results), overoptimisation=encoded(out / "overoptimisation.png"),
        reasoning=encoded(out / "reasoning.png"),
        options="".join(f" --{name}" for name in ("quick", "ablation") if getattr(command, name))
        + (f" --seed {command.seed}" if command.seed else ""),
    )  # fmt: skip
    with replacing(out / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def cell(row, column):
    """A cell of the results for people."""
    if column == "wins_against_sft":
        return f"{row[column]:.0%} [{row['wins_low']:.0%}, {row['wins_high']:.0%}]"
    return show(row[column])


def show(value):
    """A number with as many digits as one reads."""
    if isinstance(value, str) or isinstance(value, int):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def encoded(path):
    """A file's bytes for a data URL."""
    return base64.b64encode(path.read_bytes()).decode("ascii")


def samples_table(results, count=6):
    """The first held-out prompts and what each method wrote."""
    prompts, _ = Reviews().held_out(count)
    rows = []
    for title, result in results.methods.items():
        if not title.startswith("tulu"):
            texts = [f"{text.strip()} ({score:+g})" for text, score in
                     zip(result["completions"][:count], result["true"], strict=False)]
            rows.append([title, *((text, "text") for text in texts)])
    return html_table(["true score in brackets", *prompts], rows)


def over_optimisation(results, path):
    """True and learned score against KL: PPO with and without the penalty, DPO over beta, best of n."""
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    learned, true = figure.subplots(1, 2)
    for title, style in (("ppo without KL", "-o"), ("ppo with KL", "--s")):
        path_of_run = results.command.out / title.replace(" ", "-") / "metrics.csv"
        if title in results.methods and path_of_run.is_file():
            rows = [row for row in read_rows(path_of_run) if "eval_true_score_sampled" in row]
            nats = [row["eval_kl_policy_ref"] for row in rows]
            for axis, name in ((learned, "score"), (true, "true_score")):
                axis.plot(nats, [row[f"eval_{name}_sampled"] for row in rows], style, color=colour_of("ppo"),
                          markersize=4, linewidth=1.2, label=title.replace("ppo", "PPO"))  # fmt: skip
    for family, colour, marker in (("dpo", colour_of("dpo"), "^"), ("best of", colour_of("rejection"), "D")):
        points = sorted((r["kl"], np.mean(r["learned"]), np.mean(r["true"]), title)
                        for title, r in results.methods.items() if title.startswith(family))
        label = "DPO over beta (0.03 to 1)" if family == "dpo" else "best of n, n growing"
        for axis, column in ((learned, 1), (true, 2)):
            axis.plot([p[0] for p in points], [p[column] for p in points], marker=marker, color=colour, linewidth=1.2,
                      label=label)  # fmt: skip
    dress(learned, "KL(policy ‖ SFT model), nats per completion", "deviations of the SFT model", "Learned score")
    dress(true, "KL(policy ‖ SFT model), nats per completion", "points", "True score")
    for axis in (learned, true):
        axis.set_xlim(-0.5, min(axis.get_xlim()[1], 40.0))  # what turns has turned by then; metrics.csv has the rest
    learned.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)


def reasoning(results, path):
    """R1-Zero from a base and from a random model; outcome against process supervision."""
    figure = Figure(figsize=(14, 3.6), layout="constrained")
    axes = figure.subplots(1, 4)
    panels = (("eval_accuracy_sampled", "right"), ("eval_format_sampled", "in think tags"),
              ("eval_response_length", "tokens per answer"))  # fmt: skip
    for title, style in (("r1-zero", "-"), ("r1-zero from random", ":")):
        for axis, (name, label) in zip(axes, panels, strict=False):
            rows = [row for row in results.others.get(title, {"rows": []})["rows"] if row[name] != ""]
            axis.plot([row["update"] for row in rows], [row[name] for row in rows], style, color=colour_of("grpo"),
                      linewidth=2, label=title)  # fmt: skip
            dress(axis, "step", label, "R1-Zero")
    for kind, style in (("outcome", "--"), ("process", "-")):
        rows = [row for row in results.others.get("supervision", {"rows": []})["rows"] if row["run"] == kind]
        axes[3].plot([row["update"] for row in rows], [row["eval_accuracy_sampled"] for row in rows], style,
                     color=colour_of("grpo"), linewidth=2, label=f"{kind} supervision")  # fmt: skip
    dress(axes[3], "step", "right", "Reward for outcome or for steps")
    for axis in (axes[0], axes[1], axes[3]):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_ylim(-0.02, 1.02)
    for axis in (axes[0], axes[3]):
        axis.legend(frameon=False, fontsize=9)
    return save_figure(figure, path)
