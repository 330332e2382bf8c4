"""The command site: the book as web pages that need no server, with contents and a search.

A page for each notebook with its outputs, for notation.md and for evidence.md; index.html lists them. Formulas are
turned to MathML here, so the pages work without a network and without scripts; only the search is one.
"""

import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from minirl.algorithms.settings import Settings
from minirl.checkpoint import replacing
from minirl.experiments.notebooks import FOLDER, notebook_paths
from minirl.tracking import say

PARTS = {0: "Basics", 5: "Policy gradients", 12: "Preferences", 17: "Verifiable rewards", 21: "Going on"}
PAGE = Path(__file__).with_name("site.html")
_KEPT = re.compile(r"(```.*?```|`[^`\n]+`|\\\$)", re.DOTALL)  # code, where a dollar is a dollar
_MATH = re.compile(r"\$\$(.+?)\$\$|\$(?!\s)([^$\n]+?)(?<!\s)\$", re.DOTALL)


@dataclass(frozen=True)
class Site(Settings):
    """Render the notebooks to web pages with contents and a search."""

    out: Path = Path("site")
    """Folder for index.html and the other pages."""

    def run(self):
        """Write the pages; says where to look."""
        self.out.mkdir(parents=True, exist_ok=True)
        pages = [notebook_page(path) for path in notebook_paths()]
        pages += [text_page(path) for path in sorted(FOLDER.glob("*.md"))]
        found = [entry for page in pages for entry in page["sections"]]
        write(self.out / "search.js", f"const SECTIONS = {json.dumps(found, ensure_ascii=False)};\n")
        for page, before, after in zip(pages, [None, *pages], [*pages[1:], None], strict=False):
            links = [f'<a rel="{rel}" href="{to["file"]}">{arrow(rel, to["title"])}</a>'
                     for rel, to in (("prev", before), ("next", after)) if to]  # fmt: skip
            body = f'{page["body"]}<nav class="turn">{"".join(links)}</nav>'
            write(self.out / page["file"], framed(page["title"], body, pages, page["file"]))
        write(self.out / "index.html", framed("minirl: the book", index(pages), pages, "index.html"))
        say(f"{len(pages)} pages: open {self.out / 'index.html'} in a browser")


def arrow(rel, title):
    """The text of a link to a neighbour."""
    return f"← {html.escape(title)}" if rel == "prev" else f"{html.escape(title)} →"


def write(path, text):
    """Write a page in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def notebook_page(path):
    """dict file, title, body and sections of a notebook's page."""
    import nbformat
    from nbconvert import HTMLExporter

    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = with_mathml(cell.source)
    body, _ = HTMLExporter(template_name="basic", anchor_link_text="").from_notebook_node(notebook)
    return page_of(path, body)


def text_page(path):
    """The same of a Markdown file."""
    from nbconvert.filters.markdown import markdown2html

    return page_of(path, markdown2html(with_mathml(path.read_text(encoding="utf-8"))))


def page_of(path, body):
    """dict file, title, body and sections (for the search: file, anchor, heading, text)."""
    body = re.sub(r'href="([0-9a-z_]+)\.(ipynb|md)(#[^"]*)?"', r'href="\1.html\3"', body)
    file, sections = f"{path.stem}.html", []
    for part in re.split(r"(?=<h[1-3][ >])", body):
        heading = re.match(r"<h[1-3][^>]*>(.*?)</h[1-3]>", part, re.DOTALL)
        if heading:
            anchor = re.match(r'<h[1-3][^>]* id="([^"]*)"', part)
            text = plain(re.sub(r"<style.*?</style>|<svg.*?</svg>", " ", part, flags=re.DOTALL))
            sections.append({"file": file, "anchor": anchor[1] if anchor else "", "heading": plain(heading[1]),
                             "text": text})  # fmt: skip
    title = sections[0]["heading"] if sections else path.stem
    for section in sections:
        section["title"] = title
    return {"file": file, "title": title, "body": body, "sections": sections}


def plain(text):
    """HTML without its tags."""
    text = re.sub(r'<a class="anchor-link".*?</a>', "", text)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text))).strip()


def with_mathml(text):
    """Markdown whose formulas between dollars are MathML; one that cannot be converted stays as it is."""
    from latex2mathml.converter import convert

    def formula(match):
        display = match[1] is not None
        try:
            return convert((match[1] or match[2]).strip(), display="block" if display else "inline").replace("\n", " ")
        except Exception:  # its exceptions have no common base
            return match[0]

    parts = _KEPT.split(text)
    return "".join(part if index % 2 else _MATH.sub(formula, part) for index, part in enumerate(parts))


def contents(pages, current=""):
    """The list of all pages, in parts."""
    lines = []
    for page in pages:
        number = page["file"][:2]
        if number.isdigit() and int(number) in PARTS:
            lines.append(f'<li class="part">{PARTS[int(number)]}</li>')
        elif not number.isdigit() and 'class="part">Beside' not in "".join(lines):
            lines.append('<li class="part">Beside the notebooks</li>')
        here = ' aria-current="page"' if page["file"] == current else ""
        lines.append(f'<li><a href="{page["file"]}"{here}>{html.escape(page["title"])}</a></li>')
    return f"<ul>{''.join(lines)}</ul>"


def index(pages):
    """The body of index.html: each page with its question."""
    rows = []
    for page in pages:
        question = re.search(r"Question\.</strong>(.*?)</p>", page["body"], re.DOTALL)
        rows.append(f'<dt><a href="{page["file"]}">{html.escape(page["title"])}</a></dt>'
                    f"<dd>{plain(question[1]) if question else ''}</dd>")  # fmt: skip
    return ("<h1>minirl: the book</h1><p>Reinforcement learning for language models, from scratch, in notebooks that "
            f"you read here and run with <code>python -m minirl notebooks</code>.</p><dl>{''.join(rows)}</dl>")


def framed(title, body, pages, current):
    """A whole page."""
    return Template(PAGE.read_text(encoding="utf-8")).substitute(
        title=html.escape(title), contents=contents(pages, current), body=body, highlighting=highlighting()
    )


def highlighting():
    """The style sheet of coloured code."""
    from pygments.formatters import HtmlFormatter

    return HtmlFormatter(style="default").get_style_defs(".highlight")
