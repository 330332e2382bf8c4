"""The house stays in order: import arrows, sizes, file order, and nothing that must not be there.

Everything is read from the syntax trees of the files, so that a module breaks a rule by what it says, not by what
happens to run.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "minirl").rglob("*.py"))
LAYERS = ("functional", "models", "worlds", "algorithms", "loops", "experiments")  # each may import what is left of it
LOOPS = ("training", "checkpoint", "tracking", "plotting", "figures")
NAMED = {
    "reinforce", "trpo", "ppo", "ppo_kl", "grpo", "sft", "reward_model", "dpo", "orpo", "rejection_sampling", "q_sharp",
}
# What one of these took from another, and the only imports between them; an algorithm of your own may take from any.
STORY = {("grpo", "ppo"), ("orpo", "sft"), ("rejection_sampling", "sft")}
SHARED = ("critic", "optimize", "settings")  # files of algorithms/ that are none
TASKS = {"minirl.worlds.arithmetic", "minirl.worlds.reviews", "minirl.worlds.control", "minirl.worlds.walker2d"}
HEAVY = ("gymnasium", "mujoco", "matplotlib", "tiktoken", "tokenizers", "transformers", "tensorboard")


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree):
    """Full names of what is imported anywhere in a file, function bodies included; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ("." * node.level + f"{node.module or ''}.{alias.name}" for alias in node.names)


def layer_of(module):
    """Position of a module of minirl in LAYERS; -1 for the package itself."""
    parts = module.split(".")
    if len(parts) < 2 or parts[1] == "__version__":
        return -1
    name = "loops" if parts[1] in LOOPS else "experiments" if parts[1] in ("__main__", "lesson") else parts[1]
    assert name in LAYERS, f"{module} has no place in the design"
    return LAYERS.index(name)


def calls_of(tree):
    """(dotted name, node) of every call: `np.load(...)` gives "np.load", `open(...)` gives "open"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())


@each_file
def test_imports_follow_the_arrows(path):
    module = module_of(path)
    for name in imports_of(tree_of(path)):
        assert not name.startswith("."), f"{module} imports {name}; write the full name"
        if name.split(".")[0] == "minirl":
            assert layer_of(name) <= layer_of(module), f"{module} must not import {name}"


@each_file
def test_layers_import_only_what_they_may(path):
    module = module_of(path)
    layer = LAYERS[max(layer_of(module), 0)]
    names = list(imports_of(tree_of(path)))
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names) - {"minirl"}
    if module == "minirl":
        assert not names, "minirl/__init__.py imports nothing"
    elif layer == "functional":
        assert tops <= {"torch"}, f"{module} is mathematics: torch only, not {tops}"
    elif layer == "algorithms":
        assert not tops & set(HEAVY), f"{module} must not know {tops & set(HEAVY)}"
        for name in names:
            here = ".".join(name.split(".")[:3])
            assert here not in TASKS and here != "minirl.models.tokenizer", f"{module} must not know {here}"
            if here.startswith("minirl.algorithms.") and here.split(".")[2] not in SHARED:
                pair = (path.stem, here.split(".")[2])
                assert pair in STORY or pair[0] not in NAMED, f"{pair[0]} takes from {pair[1]}: add the pair to STORY?"
    if module != "minirl.plotting" and not module.startswith("minirl.figures") and layer != "experiments":
        assert "matplotlib" not in tops, f"{module} draws; only plotting and experiments do"
    if layer != "experiments":
        assert "tyro" not in tops, f"{module} makes a command line; only experiments and __main__ do"
    assert "transformers" not in tops, "transformers is for tests only"


def test_importing_is_light():
    names = [module_of(path) for path in FILES if "algorithms" in path.parts or "functional" in path.parts]
    code = f"""
import importlib, sys
heavy = {HEAVY}
import minirl
print([name for name in (*heavy, "torch", "numpy") if name in sys.modules])
for name in {names}:
    importlib.import_module(name)
print([name for name in heavy if name in sys.modules])
import minirl.plotting
print("matplotlib.pyplot" in sys.modules)  # its global state needs a display
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]", "False"]


@each_file
def test_modules_and_functions_stay_short(path):
    lines, limit = path.read_text(encoding="utf-8").count("\n"), 300 if path.name == "gpt.py" else 250
    assert lines <= limit, f"{path.name} has {lines} lines; at most {limit}"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
            length = node.end_lineno - start
            assert length <= 50, f"{path.name}: {node.name} has {length} lines below its docstring; at most 50"


def test_no_drawers_for_everything():
    names = {path.stem for path in FILES}
    assert not names & {"utils", "util", "losses", "helpers", "common", "misc"}


@each_file
def test_every_module_and_public_definition_has_a_docstring(path):
    tree = tree_of(path)
    if path.name == "__init__.py" and not tree.body:
        return  # a folder's empty marker
    assert ast.get_docstring(tree), f"{path.name} does not say what it is"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path.name}: {node.name} does not say what it does"


ALGORITHMS = [p for p in FILES if p.parent.name == "algorithms" and p.stem not in ("__init__", *SHARED)]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_algorithms_share_one_order(path):
    """Docstring, Config, functions, class, in that order in every file."""
    kinds = []
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef):
            kinds.append("C" if node.name.endswith("Config") else "A")
        elif isinstance(node, ast.FunctionDef):
            kinds.append("F")
    assert re.fullmatch("C+F+A+", "".join(kinds)), f"{path.name} is {kinds}; it should be Config, functions, class"


@each_file
def test_nothing_runs_text_or_unpickles(path):
    tree = tree_of(path)
    banned = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
    assert not banned & {name.split(".")[0] for name in imports_of(tree)}
    for name, node in calls_of(tree):
        assert name not in {"eval", "exec", "compile", "__import__"}, f"{path.name}:{node.lineno} runs text as code"
        assert name not in {"torch.load", "torch.save"}, f"{path.name}:{node.lineno} pickles"
        assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, f"{path.name}:{node.lineno} unpickles"


@each_file
def test_files_are_opened_as_utf8(path):
    for name, node in calls_of(tree_of(path)):
        keywords = {keyword.arg for keyword in node.keywords}
        last = name.rsplit(".", 1)[-1]
        texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        binary = any(re.fullmatch("[rwax+]*b[rwax+]*", text) for text in texts)
        if last in ("read_text", "write_text") or (last == "open" and name != "os.open" and not binary):
            assert "encoding" in keywords, f"{path.name}:{node.lineno}: {name} without encoding"


@each_file
def test_print_gets_ascii_only(path):
    for name, node in calls_of(tree_of(path)):
        if name == "print":  # `say` may hold Unicode: it falls back
            for part in ast.walk(node):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    assert part.value.isascii(), f"{path.name}:{part.lineno} prints {part.value!r}"


def test_nothing_points_outside_the_repository():
    private = re.compile(r"\.\./shar[e]d|/wor[k]/(main|shared)|/tm[p]/w/|(design|faults|facts|style)\.m[d]")
    kinds = {".py", ".md", ".toml", ".txt", ".ipynb", ".json"}
    skipped = {".git", ".venv", "venv", "runs", "build", "dist", ".ipynb_checkpoints"}
    for path in ROOT.rglob("*"):
        inside = path.relative_to(ROOT).parts
        if path.suffix in kinds and path.is_file() and not skipped & set(inside) and path.stat().st_size < 5_000_000:
            found = private.search(path.read_text(encoding="utf-8"))
            assert not found, f"{'/'.join(inside)} mentions {found.group()}"
