"""The tour's report.html: one file that any browser opens, with the table, the figure and sample completions in it."""

import base64
import html
import json
from pathlib import Path
from string import Template

from minirl.checkpoint import replacing
from minirl.experiments.language import Finetune
from minirl.experiments.table import ALGORITHMS
from minirl.tracking import machine, read_rows

REVIEWS = {"reward-model": "a reward model", "dpo": "DPO", "orpo": "ORPO"}  # stage -> its name in a sentence

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
th { border-bottom: 2px solid #888; font-weight: 600 }
td.text { text-align: left; font-family: ui-monospace, monospace }
.right { color: #00664a } .wrong { color: #a33b00 }
img { width: 100%; height: auto }
footer { color: #666; font-size: .85rem; margin-top: 3rem }
.scroll { overflow-x: auto }
"""
PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minirl: the tour</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
$style</style></head><body>
<h1>minirl: the tour</h1>
<p>$story</p>
<h2>Results</h2>
<div class="scroll">$table</div>
<p>$explained</p>
<h2>Curves</h2>
<img alt="Learning curves: accuracy on held-out sums per update; accuracy against KL to the SFT model; return of the
walker per environment step" src="data:image/png;base64,$figure">
<h2>Samples, before and after</h2>
<p>The first held-out prompts and the most probable answer to each; sums right or wrong, reviews with a true score above
or below 0.</p>
<div class="scroll">$samples</div>
<footer>minirl $version, torch $torch, gymnasium $gymnasium, mujoco $mujoco, python $python; $cpu, $cores cores. Made by
<code>python -m minirl tour$options</code>. All numbers are in results.csv and in each run's metrics.csv.</footer>
</body></html>
""")


def write_report(progress, samples=10):
    """Write OUT/report.html from the stages finished so far.

    Args:
        progress: tour.Progress.
        samples: held-out prompts to show.
    """
    tour, here = progress.tour, machine()
    out = Path(tour.out)
    tables, held_out = sample_tables(progress.folders, samples)
    page = PAGE.substitute(
        here, style=STYLE, version=here["minirl"], story=story(progress.folders, tour.env),
        explained=explanation(progress.folders, tour, held_out),
        table=html_table(*progress.cells()), samples="".join(html_table(*table) for table in tables),
        figure=base64.b64encode((out / "tour.png").read_bytes()).decode("ascii"),
        options=(" --quick" if tour.quick else "") + (f" --seed {tour.seed}" if tour.seed else ""),
    )  # fmt: skip
    with replacing(out / "report.html") as temporary:
        temporary.write_text(page, encoding="utf-8")


def story(folders, env):
    """What the stages finished so far did, in sentences; folders: stage -> folder."""
    learners = [name.upper() for name in folders if name in ALGORITHMS]
    walkers = [name.split()[0].upper() for name in folders if name.endswith(f" {env}")]
    reviews = [words for name, words in REVIEWS.items() if name in folders]
    text = ("Writing text and walking are the same decision process. A tiny GPT was trained on sums of mixed quality "
            f"(<i>pretrain</i>){fine_tuning(folders['sft']) if 'sft' in folders else ''}.")  # fmt: skip
    if learners:
        text += f" From there {listed(learners)} learned from nothing but a rule that says right or wrong."
    if walkers:
        text += f" {listed(walkers)}, by the same code, learned to walk in {html.escape(env)}."
    if reviews:
        text += f" From comparisons of reviews, by a simulated annotator, came {listed(reviews)}, in short versions."
    return text


def fine_tuning(folder):
    """How far supervised fine-tuning went, for `story`."""
    rows, stop_at = read_rows(folder / "metrics.csv"), Finetune().stop_at
    text = f" and, for {rows[-1]['step']} steps, on right answers (<i>sft</i>, which stops at {stop_at:.0%} right"
    return text + (": it was past that from the start)" if rows[0]["eval_accuracy_greedy"] >= stop_at else ")")


def listed(names):
    """a, b and c."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def explanation(folders, tour, held_out):
    """What the columns of the table mean, of those that something is in."""
    text = (f'Accuracy is on {held_out} held-out sums that never occur in training; "after" is the mean of the last '
            "three evaluations, of <i>pretrain</i> and <i>sft</i> the last one.")  # fmt: skip
    if any(name in folders for name in (*ALGORITHMS, *REVIEWS)):
        text += " KL is from the policy to the SFT model of its task, in nats per answer."
    if any(name in folders for name in REVIEWS):
        text += " Pairs right: of held-out comparisons. True score: of sampled reviews, in points."
    if any(name.endswith(f" {tour.env}") for name in folders):
        text += " Return: of the greedy policy; the figure shows that of training, where actions are sampled."
    return (f"{text} steps/s counts optimiser steps, tokens, or environment steps. One seed ({tour.seed}): the order "
            "of the algorithms may be another one for yours.")  # fmt: skip


def html_table(headings, rows):
    """A table; a cell is a text, or (text, class)."""
    head = "".join(f"<th>{html.escape(heading)}</th>" for heading in headings)
    lines = []
    for row in rows:
        cells = [(cell, "") if isinstance(cell, str) else cell for cell in row]
        lines.append("<tr>" + "".join(f'<td class="{kind}">{html.escape(text)}</td>' for text, kind in cells) + "</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def sample_tables(folders, count):
    """The first `count` held-out prompts with each stage's answer after training, good and bad ones marked.

    Returns:
        (tables, number of held-out sums): (headings, rows) for the stages that were asked the same prompts.
    """
    asked, held_out = {}, 0
    for name, folder in folders.items():
        path = folder / "samples.json"
        after = json.loads(path.read_text(encoding="utf-8"))["after"] if path.is_file() else []
        if after:
            held_out = held_out or len(after)
            asked.setdefault(tuple(sample["prompt"] for sample in after[:count]), {})[name] = after[:count]
    tables = []
    for prompts, stages in asked.items():
        rows = [[(prompt, "text")] for prompt in prompts]
        for answers in stages.values():
            for row, answer in zip(rows, answers, strict=True):
                row.append((answer["completion"], "text right" if answer["score"] > 0 else "text wrong"))
        tables.append((["prompt", *stages], rows))
    return tables, held_out
