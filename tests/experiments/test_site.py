"""The commands notebooks and site, on a small book of two notebooks made here."""

import json
import re
import subprocess

import nbformat
import pytest

from minirl.__main__ import main
from minirl.experiments import notebooks, site
from minirl.experiments.notebooks import Notebooks
from minirl.experiments.site import Site, with_mathml

FIRST = "# 00 · First\n\n**Question.** What is $\\alpha_1$?\n\n[next](01_second.ipynb#Part)\n\nCode: `a$b$c`"
SECOND = "# 01 · Second\n\n## Part\n\nA lantern, and $$x^2$$"


@pytest.fixture
def book(tmp_path, monkeypatch):
    """A folder with the notebooks 00_first and 01_second and a page notation.md."""
    folder = tmp_path / "book"
    folder.mkdir()
    for name, text in (("00_first", FIRST), ("01_second", SECOND)):
        code = nbformat.v4.new_code_cell(
            "print(1)", execution_count=1, outputs=[nbformat.v4.new_output("stream", text="one\n")]
        )
        cells = [nbformat.v4.new_markdown_cell(text), code]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / f"{name}.ipynb")
    (folder / "notation.md").write_text("# Notation\n\n| symbol |\n|---|\n| $\\pi$ |\n", encoding="utf-8")
    monkeypatch.setattr(notebooks, "FOLDER", folder)
    monkeypatch.setattr(notebooks, "notebook_paths", lambda: sorted(folder.glob("*.ipynb")))
    monkeypatch.setattr(site, "FOLDER", folder)
    monkeypatch.setattr(site, "notebook_paths", lambda: sorted(folder.glob("*.ipynb")))
    return folder


def outputs_in(path):
    return [output for cell in nbformat.read(path, 4).cells for output in cell.get("outputs", [])]


def test_copies_come_without_outputs_and_yours_stay(book, tmp_path, capsys):
    mine = tmp_path / "mine"
    Notebooks(out=mine, open=False).run()
    assert sorted(path.name for path in mine.iterdir()) == ["00_first.ipynb", "01_second.ipynb", "notation.md"]
    assert outputs_in(mine / "00_first.ipynb") == []
    (mine / "00_first.ipynb").write_text("my notes", encoding="utf-8")
    (mine / "01_second.ipynb").unlink()
    Notebooks(out=mine, open=False).run()
    assert "1 new notebooks, 1 of yours kept" in capsys.readouterr().out
    assert (mine / "00_first.ipynb").read_text(encoding="utf-8") == "my notes"
    Notebooks(out=mine, open=False, fresh=True, outputs=True).run()
    assert len(outputs_in(mine / "00_first.ipynb")) == 1
    assert len(outputs_in(book / "00_first.ipynb")) == 1, "the book itself changed"


def test_pages_of_data_that_are_linked_to_come_along(book, tmp_path):
    data = tmp_path / "data" / "archive"
    data.mkdir(parents=True)
    for name in ("README.md", "figure.png", "large.csv"):
        (data / name).write_text(name, encoding="utf-8")
    cells = [nbformat.v4.new_markdown_cell("See [it](../data/archive/README.md#Part), [next](01_second.ipynb).")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), book / "00_first.ipynb")
    mine = tmp_path / "elsewhere" / "mine"
    Notebooks(out=mine, open=False).run()
    (cell,) = nbformat.read(mine / "00_first.ipynb", 4).cells
    assert cell.source == "See [it](data/archive/README.md#Part), [next](01_second.ipynb)."
    assert {path.name for path in (mine / "data" / "archive").iterdir()} == {"README.md", "figure.png"}


@pytest.mark.parametrize("code", [0, 3])
def test_jupyters_exit_code_is_ours_and_a_failure_says_what_to_do(code, book, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(notebooks, "find_spec", lambda name: name)
    monkeypatch.setattr(notebooks.subprocess, "run", lambda words, check: subprocess.CompletedProcess(words, code))
    assert main(["notebooks", "--out", str(tmp_path / "mine")]) == code
    told = f"start it yourself: jupyter lab {tmp_path / 'mine' / '00_first.ipynb'} (as root with --allow-root)"
    assert (told in capsys.readouterr().out) == (code != 0)


def test_the_book_is_not_copied_onto_itself(book):
    with pytest.raises(ValueError, match="choose another folder"):
        Notebooks(out=book, open=False).run()


def test_site_has_pages_that_link_and_a_search(book, tmp_path, capsys):
    out = tmp_path / "site"
    Site(out=out).run()
    assert sorted(path.name for path in out.iterdir()) == [
        "00_first.html", "01_second.html", "index.html", "notation.html", "search.js",
    ]  # fmt: skip
    for path in out.glob("*.html"):
        page = path.read_text(encoding="utf-8")
        for target, anchor in re.findall(r'href="([^"#:]+\.html)(#[^"]*)?"', page):
            assert (out / target).is_file(), target
            if anchor:
                assert f'id="{anchor[1:]}"' in (out / target).read_text(encoding="utf-8")
        assert "$title" not in page and "http" not in re.sub(r'xmlns="[^"]*"', "", page)
    first = (out / "00_first.html").read_text(encoding="utf-8")
    assert "<math" in first and "a$b$c" in first and "one" in first
    assert "What is" in (out / "index.html").read_text(encoding="utf-8")
    script = (out / "search.js").read_text(encoding="utf-8")
    sections = json.loads(script.removeprefix("const SECTIONS = ").rstrip(";\n"))
    found = [section for section in sections if "lantern" in section["text"]]
    assert [(section["file"], section["anchor"]) for section in found] == [("01_second.html", "Part")]
    assert "3 pages" in capsys.readouterr().out


def test_formulas_become_mathml_and_code_does_not():
    made = with_mathml("$x$ costs \\$5 and `$y$`\n```\n$z$\n```\n$\\nonsense{$")
    assert made.count("<math") == 1
    assert "\\$5" in made and "`$y$`" in made and "\n$z$\n" in made and "$\\nonsense{$" in made
