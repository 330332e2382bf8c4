"""What the tests share: one thread, a skip where there is no CUDA device, small models and worlds to act with.

And `evidence`, which compares a function of the package with an independent reference and remembers by how much the two
differ: `python -m pytest --evidence FILE` writes what was compared as a table.
"""

import itertools
import platform
from pathlib import Path

import pytest
import torch

from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import GaussianPolicy, TokenCritic, TokenPolicy, ValueNetwork
from minirl.worlds.batch import Batch
from minirl.worlds.text import TokenWorld, allowed_ids

torch.set_num_threads(1)  # tensors this small are slower on several threads, and other processes want the cores too


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_addoption(parser):
    parser.addoption("--evidence", metavar="FILE", help="write a table of equations and the tests that hold to them")


def pytest_configure(config):
    if config.getoption("--evidence") and not hasattr(config, "workerinput"):  # workers send their rows to this process
        config.pluginmanager.register(EvidenceTable(config), "evidence-table")


@pytest.fixture
def evidence(request):
    """A function of the package against an independent reference of the same equation.

    evidence(equation, function, reference, got, expected, tolerance, relative=False)

        equation: the paper and the number: "Schulman et al. 2017, eq. 7".
        function: of the package, or its full name.
        reference: how `expected` was found, in words.
        got, expected: numbers, lists or tensors of one shape (two tensors: of one dtype too).
        tolerance: largest |got - expected| that passes.
        relative: divide differences by 1 + |expected|.
    """

    def compare(equation, function, reference, got, expected, tolerance, relative=False):
        if isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor):
            assert got.dtype == expected.dtype, f"{got.dtype} against {expected.dtype}"
        got, expected = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (got, expected))
        assert got.shape == expected.shape, f"shape {tuple(got.shape)} against {tuple(expected.shape)}"
        same = (got == expected) | (got.isnan() & expected.isnan())  # infinities and NaN are equal to themselves
        difference = (got - expected).abs() / (1 + expected.abs() if relative else 1)
        error = float(difference.masked_fill(same, 0.0).max()) if got.numel() else 0.0
        name = function if isinstance(function, str) else f"{function.__module__}.{function.__qualname__}"
        test = request.node.nodeid.partition("[")[0]
        assert error <= tolerance, f"{name}: differs by {error:.3g} from {reference}\n{got}\n{expected}"
        request.node.user_properties.append(("evidence", [name, equation, reference, error, tolerance, test]))

    return compare


class EvidenceTable:
    """Gathers what `evidence` compared, in this process or in the workers of pytest-xdist, and writes the table."""

    def __init__(self, config):
        self.path, self.arguments = Path(config.getoption("--evidence")), config.invocation_params.args
        self.rows = {}  # (function, equation, reference, test) -> [largest error, largest tolerance, comparisons]

    def pytest_runtest_logreport(self, report):
        for kind, row in report.user_properties if report.when == "call" else ():
            if kind == "evidence":
                name, equation, reference, error, tolerance, test = row
                found = self.rows.setdefault((name, equation, reference, test), [0.0, 0.0, 0])
                found[:] = max(found[0], error), max(found[1], tolerance), found[2] + 1

    def pytest_sessionfinish(self, exitstatus):
        if exitstatus == 0 and self.rows:
            self.path.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")

    def pytest_terminal_summary(self, terminalreporter, exitstatus):
        done = f"{len(self.rows)} rows in {self.path}" if exitstatus == 0 else "a test failed, so no table was written"
        terminalreporter.write_line(f"evidence: {done}")

    def lines(self):
        """The page, as lines of Markdown."""
        yield "# Evidence: every equation, and the test that holds the code to it"
        yield ""
        yield "Generated, not written: each row is what a test compared, and with which result, in one run of"
        yield f"`python -m pytest {' '.join(map(str, self.arguments))}`,"
        yield f"under Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}, on an"
        yield f"{platform.machine()} processor. Elsewhere the errors have other digits; the tolerances hold."
        yield ""
        yield "*Reference* says how the expected value was found. Where that is another function of this package, its"
        yield "name stands there, and it has rows of its own. *Largest error*: of all numbers in *n* comparisons,"
        yield "some of them of inputs that each run draws anew; in rows marked † it is divided by 1 + |expected value|."
        yield "`data/vectors` was computed by plain Python, without torch or this package. `definition`: no paper"
        yield "is needed. `check_same_shape` has no row: it returns nothing, and a test of each function provokes its"
        yield "error."
        for module, rows in itertools.groupby(sorted(self.rows), key=lambda row: ".".join(row[0].split(".")[:3])):
            yield from ("", f"## {module}", "")
            yield "| equation | function | reference | largest error | tolerance | n | test |"
            yield "|---|---|---|---|---|---|---|"
            for name, equation, reference, test in sorted(rows, key=lambda row: (row[1], row[0], *row[2:])):
                error, tolerance, count = self.rows[name, equation, reference, test]
                sizes = (f"{size:.{digits}e}" if size else "0" for size, digits in ((error, 1), (tolerance, 0)))
                short = f"`{name.removeprefix(module + '.')}`"
                cells = equation, short, reference, *sizes, str(count), f"`{test.removeprefix('tests/')}`"
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


class Letters:
    """A tokenizer of eight letters, an end token and padding."""

    eos_id, pad_id, vocab_size = 8, 9, 10

    def encode(self, text):
        return ["abcdefgh".index(letter) for letter in text]

    def decode(self, ids):
        return "".join("abcdefgh."[index] for index in ids)


class LettersTask:
    """Prompts of one to three letters; the reward is the share of `a` among the letters of the completion."""

    prompts = ["a", "bc", "def", "gh", "cab", "f"]

    def sample(self, n, generator):
        return self._asked([self.prompts[i] for i in torch.randint(6, (n,), generator=generator, device="cpu")])

    def held_out(self, n=None):
        return self._asked(["bb", "e", "hag"][:n])

    def _asked(self, prompts):
        return prompts, {"first": [prompt[0] for prompt in prompts]}

    def reward(self, prompts, completions, first, **columns):
        assert [prompt[0] for prompt in prompts] == first, "columns do not belong to their prompts"
        return [completion.count("a") / max(1, len(completion)) for completion in completions]


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def make_gpt():
    """A small GPT with weights large enough to matter; other settings by keyword."""

    def make(dtype=torch.float64, seed=0, std=0.3, **changes):
        torch.manual_seed(seed)
        sizes = dict(vocab_size=10, block_size=12, n_layer=1, n_head=2, n_embd=8)
        gpt = GPT(GPTConfig(**{**sizes, **changes})).to(dtype)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter += std * torch.randn_like(parameter)
        return gpt

    return make


@pytest.fixture
def make_text(make_gpt):
    """(world, policy, critic) of the letters task; the world's reference is another policy."""

    def make(dtype=torch.float64, dropout=0.0, temperature=1.0, device="cpu", reference=True, seed=0, **world):
        allowed = allowed_ids(Letters(), device)
        policy = TokenPolicy(make_gpt(dtype, seed, dropout=dropout).to(device), temperature, allowed)
        frozen = TokenPolicy(make_gpt(dtype, seed + 1, dropout=dropout).to(device), temperature, allowed)
        critic = TokenCritic(make_gpt(dtype, seed + 2, dropout=dropout)).to(dtype).to(device)
        torch.nn.init.normal_(critic.head.weight)  # a fresh critic says 0 everywhere
        task = LettersTask()
        settings = dict(group_size=2, prompts_per_batch=4, device=device, reference=frozen if reference else None)
        return TokenWorld(task, Letters(), task.reward, 5, **{**settings, **world}), policy, critic

    return make


@pytest.fixture
def make_control():
    """(batch, policy, critic) as of four walkers with five steps each, and whole episodes of unequal length."""

    def make(dtype=torch.float64, device="cpu", seed=0, episodes=False):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        policy = GaussianPolicy(3, 2, hidden=(8,)).to(dtype).to(device)
        critic = ValueNetwork(3, hidden=(8,)).to(dtype).to(device)
        obs = torch.randn(4, 6, 3, generator=generator, dtype=dtype).to(device)
        rewards, scores = torch.randn(4, 5, generator=generator, dtype=dtype).to(device), torch.zeros(4, device=device)
        terminated = torch.zeros(4, 5, dtype=torch.bool, device=device)
        truncated, mask = terminated.clone(), ~terminated
        terminated[1, 2] = truncated[2, 4] = truncated[3, 1] = True
        if episodes:
            truncated[0, 4] = True
            mask[1, 3:] = mask[3, 2:] = False
            scores = torch.where(mask, rewards, 0).sum(1)
        with torch.no_grad():
            distribution = policy(obs[:, :5])
            actions = distribution.sample()
            batch = Batch(
                obs=obs[:, :5], actions=actions, logprobs=distribution.log_prob(actions), rewards=rewards,
                scores=scores, terminated=terminated, truncated=truncated, mask=mask,
                values=critic(obs[:, :5]), next_values=critic(obs[:, 1:]), max_length=5,
                group_size=2 if episodes else 1,
            )  # fmt: skip
        return batch, policy, critic

    return make


@pytest.fixture
def foreign_default_device():
    """New tensors land on no device: whoever forgets to say where a tensor belongs is found out on a CPU already."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
