"""report.html, summary.md and summary.tex of a comparison."""

import base64
import html
from pathlib import Path
from string import Template

from minirl.checkpoint import replacing
from minirl.experiments.report import STYLE

PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>minirl: $title</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
$style</style></head><body>
<h1>$title</h1>
<p><b>final</b> is the evaluation with the mean action, averaged over the last $last after training began (five where
there are as many); <b>speed</b> is the area under that curve (its mean height), and the steps to a return of
$threshold; <b>cost</b> is environment steps per second of training. Every run is one point; means with 95 % t intervals
over the seeds, the interquartile mean with a BCa bootstrap interval. All runs are evaluated from the same initial
states. Mean action and sampled policy can differ much: an untrained walker that acts on average stands still, and is
paid for every step that it stands.</p>
<h2>Results</h2>
<div class="scroll">$table</div>
$claims
$figures
<footer>Made by <code>$command</code>; all numbers are in summary.csv, and in the files of each run.</footer>
</body></html>
""")
VERDICTS = """<h2>Three claims</h2>
<p>A claim holds (yes) if the 95 % interval of the difference, Welch's, lies on its side of 0, fails (no) if it lies on
the other, and is undecided otherwise. Detectable: the difference that runs like these show in four of five studies of
this size.</p>"""


def as_html(headings, lines):
    """A table."""
    def row(kind, cells):
        return "<tr>" + "".join(f"<{kind}>{html.escape(text)}</{kind}>" for text in cells) + "</tr>"

    return "\n".join(["<table>", row("th", headings), *(row("td", line) for line in lines), "</table>"])


def as_markdown(headings, lines):
    """A table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [headings, ["---"] * len(headings), *lines])


def as_latex(headings, lines):
    """A tabular of the booktabs package."""
    def row(cells):
        plain = (text.replace("%", r"\%").replace("_", r"\_").replace("+/-", r"$\pm$").replace(">", "$>$")
                 for text in cells)  # fmt: skip
        return " & ".join(plain) + r" \\"

    columns = "l" + "r" * (len(headings) - 1)
    return "\n".join([rf"\begin{{tabular}}{{{columns}}}", r"\toprule", row(headings), r"\midrule",
                      *map(row, lines), r"\bottomrule", r"\end{tabular}"])  # fmt: skip


def write_page(out, found, figures):
    """Write report.html, summary.md and summary.tex.

    Args:
        out: folder, with the figures in it as PNG.
        found: comparison_report.Findings.
        figures: dict file name without ending -> alternative text.
    """
    headings, lines = found.table()
    claims = found.claims()
    tables = [(headings, lines)] + ([(list(claims[0]), [list(claim.values()) for claim in claims])] if claims else [])
    for ending, render in (("md", as_markdown), ("tex", as_latex)):
        text = "\n\n".join([f"{'%' if ending == 'tex' else '#'} {found.title}", *(render(*table) for table in tables)])
        write(out / f"summary.{ending}", text + "\n")
    pictures = "\n".join(
        f'<h2>{name.replace("-", " ").capitalize()}</h2><img alt="{html.escape(text)}" src="data:image/png;base64,'
        f'{base64.b64encode((Path(out) / f"{name}.png").read_bytes()).decode()}">' for name, text in figures.items()
    )
    write(out / "report.html", PAGE.substitute(
        title=html.escape(found.title), style=STYLE, threshold=f"{found.threshold:,.0f}", table=as_html(*tables[0]),
        last=min(5, found.rows[0]["evaluations"] - 1),
        claims=f"{VERDICTS}\n<div class='scroll'>{as_html(*tables[1])}</div>" if claims else found.without_verdict(),
        figures=pictures,
        command=html.escape(found.command),
    ))  # fmt: skip


def write(path, text):
    """Write a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
