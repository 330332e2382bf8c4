"""The page notebooks/notation.md: what it names exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_every_name_on_the_page_is_in_the_code_and_in_the_file_beside_it():
    files = {path: path.read_text(encoding="utf-8") for path in (ROOT / "minirl").rglob("*.py")}
    code = "\n".join(files.values())
    page = (ROOT / "notebooks" / "notation.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 80
    for row in rows:
        names = re.findall(r"`([^`]+)`", row)
        paths = [name for name in names if name.endswith(".py")]
        for path in paths:
            assert (ROOT / "minirl" / path).is_file(), path
        beside = "\n".join(files[ROOT / "minirl" / path] for path in paths)
        words = {word for name in names if name not in paths for word in re.findall(r"[A-Za-z_]\w+", name)}
        missing = [word for word in words - {"True"} if not re.search(rf"\b{word}\b", code)]
        assert missing == [], row
        if paths:
            assert any(re.search(rf"\b{word}\b", beside) for word in words) or not words, row
