"""The notebooks: one shape, one clean run in the repository, and each runs from top to bottom, twice, with one result.

What runs a kernel is marked `notebooks`; what only reads the files is not.
"""

import ast
import os
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

from minirl.experiments.notebooks import notebook_paths

ROOT = Path(__file__).resolve().parent.parent
PATHS = notebook_paths()
BOOK = {path.stem: nbformat.read(path, as_version=4) for path in PATHS}
HEADER = ("**Question.**", "**You will be able to**", "**Before this:**", "**Minutes:**")
FOOTER = ("## In three lines", "## Three questions", "## You can now read", "## References")
WALKED = {
    "GPT", "Tokenizer", "train_bpe", "TokenPolicy", "GaussianPolicy", "CategoricalPolicy", "TokenCritic",
    "ValueNetwork", "ObservationNormalizer", "SFT", "REINFORCE", "TRPO", "PPO", "PPOKL", "GRPO", "RewardModel",
    "SegmentReward", "DPO", "ORPO", "RejectionSampling", "QSharp",
}  # fmt: skip
SOLUTION = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.DOTALL)
SECONDS = re.compile(r"\b\d+(\.\d+)? (s|seconds|min|minutes)\b")

each_notebook = pytest.mark.parametrize("name", BOOK)


def tags_of(cell):
    return cell.metadata.get("tags", [])


def tagged(name, tag):
    """(index, cell) of the cells with a tag."""
    return [(index, cell) for index, cell in enumerate(BOOK[name].cells) if tag in tags_of(cell)]


def code_cells(name):
    return [cell for cell in BOOK[name].cells if cell.cell_type == "code"]


def test_the_book_is_whole():
    assert [int(name[:2]) for name in BOOK] == list(range(23))


@each_notebook
def test_header_and_footer(name):
    cells = BOOK[name].cells
    assert cells[0].cell_type == "markdown" and cells[0].source.startswith(f"# {name[:2]} · ")
    assert [word for word in HEADER if word not in cells[0].source] == []
    assert re.search(r"read \d+, run \d+", cells[0].source)
    text = "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")
    places = [text.index(heading) for heading in FOOTER]
    assert places == sorted(places)
    questions = text[places[1] : places[2]]
    assert questions.count("<details>") == questions.count("</details>") == 3


@each_notebook
def test_setup_is_the_same_everywhere(name):
    assert [index for index, _ in tagged(name, "setup")] == [1]
    first = next(iter(BOOK))
    assert BOOK[name].cells[1].source == BOOK[first].cells[1].source


@each_notebook
def test_predictions_are_asked_for_and_answered(name):
    asked = tagged(name, "predict")
    assert len(asked) >= 3
    for index, cell in asked:
        following = BOOK[name].cells[index + 1]
        assert re.search(r"^prediction = None$", cell.source, re.MULTILINE), f"cell {index}"
        assert "reveal" in tags_of(following), f"cell {index + 1}"
        assert re.search(r"reveal\(\s*prediction,", following.source), f"cell {index + 1}"


@each_notebook
def test_exercises_have_a_check_and_a_solution(name):
    exercises, cells = tagged(name, "exercise"), BOOK[name].cells
    assert len(exercises) >= 2
    for index, _ in exercises:
        before, check, solution = cells[index - 1], cells[index + 1], cells[index + 2]
        assert "### Exercise" in before.source and "<summary>Hint</summary>" in before.source, f"cell {index - 1}"
        assert "minutes" in before.source, f"cell {index - 1}"
        assert "check" in tags_of(check) and "check(" in check.source, f"cell {index + 1}"
        assert SOLUTION.search(solution.source), f"cell {index + 2}"
    assert len(tagged(name, "check")) == len(exercises)


@each_notebook
def test_something_is_broken_and_something_can_be_turned(name):
    assert len(tagged(name, "break")) >= 1
    assert len(tagged(name, "knobs")) == 1


@each_notebook
def test_myths_are_followed_by_a_proof(name):
    myths = [index for index, cell in enumerate(BOOK[name].cells) if "> **Myth.**" in cell.source]
    assert myths
    for index in myths:
        myth, proof = BOOK[name].cells[index : index + 2]
        assert "> **Fact.**" in myth.source, f"cell {index}"
        assert proof.cell_type == "code"
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(proof.source))), f"cell {index + 1}"


@each_notebook
def test_outputs_come_from_one_clean_run(name):
    cells = code_cells(name)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    path = ROOT / "notebooks" / f"{name}.ipynb"
    assert path.stat().st_size < 1_000_000
    for word in ("/home/", "/tmp/", "/work/", "/root/", "ipywidgets", "Warning:"):
        assert word not in path.read_text(encoding="utf-8"), word


@each_notebook
def test_cells_are_short(name):
    assert len(BOOK[name].cells) <= 80
    long = [index for index, cell in enumerate(BOOK[name].cells)
            if cell.cell_type == "code" and cell.source.count("\n") >= 40]
    assert long == []


@each_notebook
def test_links_lead_somewhere(name):
    text = "\n".join(cell.source for cell in BOOK[name].cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("http", "#")):
            assert (ROOT / "notebooks" / target.split("#")[0]).exists(), target


@each_notebook
def test_pictures_have_a_text(name):
    for index, cell in enumerate(BOOK[name].cells):
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                assert output.metadata.get("image/png", {}).get("alt") or output.metadata.get("alt"), f"cell {index}"


def test_every_algorithm_and_model_is_walked_through():
    shown = Counter()
    for name in BOOK:
        for cell in code_cells(name):
            for call in re.findall(r"show_source\(([^#]*?)\)\n?", cell.source + "\n"):
                shown.update(re.findall(r"\w+", call))
    assert sorted(name for name in WALKED if not shown[name]) == []


def texts_of(cell):
    """What a cell put out, but for what measures time; a kernel may cut one stream into several outputs."""
    streamed, others = "", []
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            streamed += output.text
        elif "image/png" in output.get("data", {}):
            others.append(output.data["image/png"])
        else:
            others.append(output.get("data", {}).get("text/plain", ""))
    return [SECONDS.sub("", part) for part in (streamed, *others)]


@pytest.mark.notebooks
@each_notebook
def test_runs_twice_in_one_kernel_and_its_solutions_are_right(name, tmp_path):
    from nbclient import NotebookClient

    environment = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
    environment.pop("DISPLAY", None)
    notebook = nbformat.from_dict(BOOK[name])
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", record_timing=False, resources=where)
    with client.setup_kernel(env=environment):
        first = []
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            first.append(texts_of(cell))
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
            if "timed" not in tags_of(cell):
                assert texts_of(cell) == first[index], f"cell {index} gives other numbers the second time"
        for index, cell in tagged(name, "check"):
            solution = SOLUTION.search(notebook.cells[index + 1].source)[1]
            strictly = f"{solution}\nimport minirl.lesson; minirl.lesson.strict = True\n{cell.source}"
            notebook.cells.append(nbformat.v4.new_code_cell(strictly))
            client.execute_cell(notebook.cells[-1], len(notebook.cells) - 1)
