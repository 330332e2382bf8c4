"""The page notebooks/evidence.md, and the fixture whose comparisons it lists."""

import ast
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "notebooks" / "evidence.md"
EXAMPLE = "an equation", "minirl.functional.masked.masked_sum", "a reference"


def public_functions(folder, ending=""):
    """module.function of what a folder of minirl defines, read from the files."""
    for path in sorted((ROOT / "minirl" / folder).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and node.name.endswith(ending):
                yield f"minirl.{folder}.{path.stem}", node.name


def test_the_page_has_every_function_of_mathematics_and_every_loss():
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", PAGE.read_text(encoding="utf-8"), re.M | re.S))
    wanted = {*public_functions("functional"), *public_functions("algorithms", "_loss")}
    wanted -= {("minirl.functional.masked", "check_same_shape")}  # it returns nothing
    assert len(wanted) > 20
    missing = [pair for pair in sorted(wanted) if f"| `{pair[1]}` |" not in sections.get(pair[0], "")]
    assert missing == [], "use the fixture `evidence` in a test of it, and write the page again"


def test_the_page_says_how_it_was_made_and_its_tests_exist():
    page = PAGE.read_text(encoding="utf-8")
    assert "python -m pytest" in page and "--evidence notebooks/evidence.md" in page and "torch" in page
    tests = set(re.findall(r"`((?:\w+/)*test_\w+\.py)::(\w+)` \|$", page, re.M))
    assert len(tests) > 45
    for file, name in sorted(tests):
        assert f"def {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), f"{file}::{name}"


def test_what_differs_is_refused(evidence):
    for got, expected in ((1.1, 1.0), ([1.0], [1.0, 1.0]), (float("nan"), 1.0), (float("inf"), 1.0)):
        with pytest.raises(AssertionError):
            evidence(*EXAMPLE, got, expected, 0.01)
    with pytest.raises(AssertionError, match="float32 against torch.float64"):
        evidence(*EXAMPLE, torch.ones(1), torch.ones(1).double(), 0.01)


def test_what_agrees_is_remembered(evidence, request):
    before = len(request.node.user_properties)
    evidence(*EXAMPLE, [1.0, float("nan"), float("inf")], [1.25, float("nan"), float("inf")], 0.25)
    evidence(*EXAMPLE, 103.0, 99.0, 0.04, relative=True)
    mine = [row for kind, row in request.node.user_properties[before:] if kind == "evidence"]
    assert [row[3:5] for row in mine] == [[0.25, 0.25], [0.04, 0.04]]
    assert mine[0][:3] == ["minirl.functional.masked.masked_sum", *EXAMPLE[::2]] and mine[0][5].endswith("remembered")
    del request.node.user_properties[before:]  # no evidence of anything
