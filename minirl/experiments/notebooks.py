"""The command notebooks: a copy of the book for the reader to write in, and Jupyter open in front of it.

The notebooks in the repository keep the outputs of one clean run, for those who only read. The copies come without, so
that nothing is given away; what the reader changed in them is never overwritten.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minirl.algorithms.settings import Settings
from minirl.checkpoint import replacing
from minirl.tracking import say

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
LINKED = re.compile(r"\]\(\.\./(data/[^)#]+)")


@dataclass(frozen=True)
class Notebooks(Settings):
    """Copy the notebooks to a folder of your own, without their outputs, and open Jupyter there."""

    out: Path = Path("my-notebooks")
    """Your folder; a notebook that is in it already stays as it is."""
    outputs: bool = False
    """Keep the outputs of the run that the repository holds."""
    fresh: bool = False
    """Replace the notebooks that are in your folder: what you wrote in them is lost."""
    open: bool = True
    """Open Jupyter; --no-open only copies."""

    def run(self):
        """Copy, say what was done, and open Jupyter (until it is closed). Returns its exit code."""
        if self.out.resolve() == FOLDER:
            raise ValueError(f"out is {self.out}, where the notebooks come from; choose another folder")
        new, kept = copy_notebooks(self.out, self.outputs, self.fresh)
        say(f"{self.out}: {new} new notebooks" + (f", {kept} of yours kept as they were" if kept else ""))
        first = min(self.out.glob("*.ipynb"))
        if not self.open:
            say(f"start with: jupyter lab {first}")
        elif find_spec("jupyterlab") is None:
            say("JupyterLab is not installed here: pip install jupyterlab, or open the folder in VS Code or Colab")
        else:
            say("opening Jupyter; press Ctrl-C twice here to stop it")
            if code := subprocess.run([sys.executable, "-m", "jupyterlab", str(first)], check=False).returncode:
                say(f"Jupyter did not run; start it yourself: jupyter lab {first} (as root with --allow-root)")
            return code
        return 0


def notebook_paths(folder=FOLDER):
    """The notebooks in reading order.

    Raises:
        FileNotFoundError: if there are none, as in an installation without the repository.
    """
    paths = sorted(folder.glob("[0-9][0-9]_*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no notebooks in {folder}; install minirl from a clone of it: pip install -e .")
    return paths


def copy_notebooks(out, outputs=False, fresh=False):
    """Copy the book's notebooks and the pages beside them.

    Args:
        out: folder, made if it is missing.
        outputs: keep outputs.
        fresh: replace what is there.
    Returns:
        (new, kept): how many notebooks were written, and how many were there and stayed.
    """
    import nbformat

    out.mkdir(parents=True, exist_ok=True)
    new = kept = 0
    for path in notebook_paths():
        target = out / path.name
        if target.exists() and not fresh:
            kept += 1
            continue
        notebook = nbformat.read(path, as_version=4)
        copy_linked_pages(notebook, out)
        with replacing(target) as temporary:
            nbformat.write(notebook if outputs else stripped(notebook), temporary)
        new += 1
    for page in FOLDER.glob("*.md"):
        shutil.copyfile(page, out / page.name)
    return new, kept


def copy_linked_pages(notebook, out):
    """Copy the pages of data/ that a notebook links to, with their pictures, to out/data, and link there instead.

    Jupyter shows nothing from outside the folder that it was started on.
    """
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            for page in LINKED.findall(cell.source):
                (out / page).parent.mkdir(parents=True, exist_ok=True)
                for file in (FOLDER.parent / page).parent.iterdir():
                    if file.suffix in (".md", ".png"):
                        shutil.copyfile(file, (out / page).with_name(file.name))
            cell.source = LINKED.sub(r"](\1", cell.source)


def stripped(notebook):
    """The notebook (changed in place) without outputs and execution counts."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook
