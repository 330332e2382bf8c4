"""What the cells of the notebooks share: a reproducible beginning, predictions, self-checks, and models to start from.

The notebooks predict, run and explain: `reveal` sets a reader's prediction beside the truth. They set exercises, which
`check` judges, saying why a value is wrong where it recognises the slip. `model`, `reward_model` and `data` find what
is committed in data/, wherever the reader keeps the notebook.
"""

import platform
from dataclasses import replace
from pathlib import Path

import torch

from minirl.experiments.models import load_model, load_reward_model, policy_and_reference
from minirl.experiments.on_policy import control_setup
from minirl.experiments.settings import TEXT_TASKS
from minirl.experiments.table import ALGORITHMS
from minirl.experiments.tasks import text_setup
from minirl.tracking import say
from minirl.training import seed_everything

DATA = Path(__file__).resolve().parents[1] / "data"
MODELS = ("pretrain", "sft", "sft-reviews", "thinker")
NOT_YET = "no answer yet: replace None above, then run both cells again"
strict = False  # True: `check` raises where it would only tell; so the tests run the solutions


def begin(seed=0, threads=1):
    """Seed everything, fix the number of threads (one suits models this small), and print what the numbers depend on.

    Running all cells a second time in the same kernel gives the same numbers, because this cell comes first.
    """
    seed_everything(seed)
    torch.set_num_threads(threads)
    say(f"python {platform.python_version()}, torch {torch.__version__}, seed {seed}, threads {threads}")


def data(*names):
    """The path of something in data/.

    Raises:
        FileNotFoundError: if it is not there.
    """
    path = DATA.joinpath(*names)
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; the notebooks need the repository's data folder, so install "
                                "minirl from a clone with pip install -e .")
    return path


def model(name="sft"):
    """One of the committed models, ready to act.

    Args:
        name: `pretrain` has read sums and reviews, good and bad; `sft` was fine-tuned on right sums and
            stopped early, and `sft-reviews` on good reviews; `thinker` has read sums of four terms, some of them
            thought through.
    Returns:
        (policy, reference, tokenizer): a TokenPolicy to train, and a frozen copy of it as it is now.
    Raises:
        ValueError: if there is no model of this name.
    """
    if name not in MODELS:
        raise ValueError(f"no model {name!r} in data/models; there are {', '.join(MODELS)}")
    gpt, tokenizer = load_model(data("models", name))
    return *policy_and_reference(gpt, tokenizer), tokenizer


def reward_model():
    """The committed reward model of reviews: a LearnedReward, `reward(prompts, completions) -> list of floats`."""
    return load_reward_model(data("models", "reward-model"))


def setting(name, task="arithmetic", start=None, seed=0, **world):
    """What `python -m minirl NAME --task TASK` acts and learns with, from a committed model.

    Args:
        name: an on-policy algorithm, as the command is called: "ppo".
        task: arithmetic, reviews, or a gymnasium id.
        start: the committed model that text starts from; None for `sft` on sums and `sft-reviews` on reviews.
        seed: of the world; the global generator makes fresh networks.
        world: other settings of the world, by name: `prompts_per_batch=32`.
    Returns:
        (world, policy, critic, config): a TokenWorld or ControlWorld, and what the algorithm's class takes.
    Raises:
        ValueError: if there is no algorithm of this name.
    """
    if name not in ALGORITHMS:
        raise ValueError(f"no algorithm {name!r}; there are {', '.join(ALGORITHMS)}")
    config, settings, _ = ALGORITHMS[name].of(task)
    if task in TEXT_TASKS:
        init = data("models", start or ("sft" if task == "arithmetic" else "sft-reviews"))
        learned = {"reward_model": data("models", "reward-model")} if task == "reviews" else {}
        made, policy, make_critic = text_setup(task, replace(settings, init=init, **learned, **world), seed, "cpu")
    else:
        gamma = getattr(config, "gamma", 0.99)
        made, policy, make_critic = control_setup(task, replace(settings, **world), seed, "cpu", gamma)
    return made, policy, make_critic(), config


def reveal(prediction, truth, why):
    """Set the reader's prediction beside the truth.

    Args:
        prediction: whatever the reader wrote, or None.
        truth: a number or a text, computed by the notebook.
        why: the explanation, one or two sentences.
    """
    shown = "none (write one above: a guess makes the answer stick)" if prediction is None else _shown(prediction)
    say(f"prediction  {shown}\ntruth       {_shown(truth)}\nwhy         {why}")


def check(name, answer, right, slips=None, tolerance=1e-5):
    """Judge the reader's answer to an exercise, and say what may have gone wrong.

    Args:
        name: what is checked, for the message.
        answer: number, list or tensor; None where nothing was done yet.
        right: what it should be.
        slips: dict explanation -> the value that this slip gives.
        tolerance: largest absolute difference that counts as equal; so does a thousandth of each number, for an answer
            may be written with a few digits.
    Returns:
        True, False, or None where there is no answer yet.
    Raises:
        AssertionError: if lesson.strict is set, instead of False or None, and if a slip gives the right value.
    """
    verdict, message = _judge(name, answer, right, slips or {}, tolerance)
    assert verdict or not strict, message
    say(message)
    return verdict


def _judge(name, answer, right, slips, tolerance):
    if answer is None:
        return None, f"{name}: {NOT_YET}"
    try:
        answer, right = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (answer, right))
    except (TypeError, ValueError, RuntimeError):
        return False, f"{name}: not yet. A number, a list or a tensor is wanted, not {type(answer).__name__}"
    if answer.shape != right.shape:
        return False, f"{name}: not yet. Its shape is {tuple(answer.shape)}; {tuple(right.shape)} is wanted"
    slips = {why: torch.as_tensor(value, dtype=torch.float64).detach() for why, value in slips.items()}
    slips = {why: value for why, value in slips.items() if value.shape == right.shape}
    same = [why for why, value in slips.items() if _close(value, right, tolerance)]
    assert not (strict and same), f"{name}: this slip cannot be told from the right answer: {same[0]}"
    if _close(answer, right, tolerance):
        return True, f"{name}: right"
    for explanation, value in slips.items():
        if _close(answer, value, tolerance):
            return False, f"{name}: not yet. This is the value one gets by this slip: {explanation}"
    if not answer.isfinite().all():
        return False, f"{name}: not yet. It is not finite"
    return False, f"{name}: not yet. It differs by up to {float((answer - right).abs().max()):.3g}"


def _close(first, second, tolerance):
    return torch.allclose(first, second, rtol=1e-3, atol=tolerance)


def show_samples(prompts, **columns):
    """Print completions side by side, one prompt a line.

    Args:
        prompts: list of strings.
        columns: heading -> list of strings, one for each prompt; `before=..., after=...`.
    """
    texts = {"prompt": prompts} | {heading.replace("_", " "): column for heading, column in columns.items()}
    lists = [[heading, *map(str, column)] for heading, column in texts.items()]
    widths = [min(48, max(map(len, column))) for column in lists]
    for row in zip(*lists, strict=True):
        say("  ".join(f"{_cut(text, width):<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())


def _cut(text, width):
    text = text.replace("\n", " ")
    return text if len(text) <= width else text[: width - 3] + "..."


def _shown(value):
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
