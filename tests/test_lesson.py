"""What the notebooks' cells share: judgements of answers, predictions, and the committed models."""

import math
import re

import pytest
import torch
from scipy.stats import spearmanr

from minirl import lesson
from minirl.algorithms.ppo import PPO
from minirl.worlds.reviews import Reviews


@pytest.fixture
def strict(monkeypatch):
    monkeypatch.setattr(lesson, "strict", True)


SLIPS = {"population deviation": math.sqrt(2 / 3)}  # of 1, 2, 3: sum of squares 2, by n = 3; the sample's is by n - 1


@pytest.mark.parametrize(
    "answer, verdict, words",
    [
        (None, None, "no answer yet"),
        (1.0, True, "deviation: right"),
        (math.sqrt(2 / 3), False, "slip: population deviation"),
        (1.5, False, "differs by up to 0.5"),
        ([1.0], False, "shape is (1,)"),
        (math.nan, False, "not finite"),
        ("one", False, "number, a list or a tensor"),
    ],
)
def test_check_judges_and_names_the_slip(capsys, answer, verdict, words):
    assert lesson.check("deviation", answer, torch.tensor([1.0, 2.0, 3.0]).std(), SLIPS) is verdict
    assert words in capsys.readouterr().out


def test_check_raises_when_strict(strict):
    assert lesson.check("deviation", 1.0, 1.0)
    for wrong in (None, 2.0):
        with pytest.raises(AssertionError, match="deviation"):
            lesson.check("deviation", wrong, 1.0)


@pytest.mark.parametrize("right, answer", [(math.log(512), 6.24), (2 / 3, 0.6667), ([0.5, 1 / 3], [0.5, 0.3333])])
def test_an_answer_may_be_rounded(right, answer):
    assert lesson.check("rounded", answer, right)
    assert not lesson.check("rounded", torch.as_tensor(answer) * 1.002, right)


def test_a_slip_that_gives_the_right_value_is_a_fault_of_the_notebook(strict):
    with pytest.raises(AssertionError, match="cannot be told from the right answer: doubled"):
        lesson.check("zero", 0.0, 0.0, {"doubled": 0.0})


def test_reveal_shows_both(capsys):
    lesson.reveal(None, [0.5, 0.25], "because")
    lesson.reveal(1, torch.tensor(0.123456), "so")
    first, second = capsys.readouterr().out.split("prediction")[1:]
    assert "none" in first and "[0.5, 0.25]" in first and "because" in first
    assert "  1\n" in second and "0.1235" in second


def test_show_samples_aligns_and_shortens(capsys):
    lesson.show_samples(["a", "bb"], before=["x" * 60, "y"], after_it=["1", "2\n3"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["prompt", "before", "after", "it"]
    assert "x" * 45 + "..." in lines[1] and lines[2].endswith("2 3")
    assert {line.index(word) for line, word in zip(lines, ("after", "1", "2 3"), strict=True)} == {10 + 48}


def test_begin_makes_the_numbers_repeat(capsys):
    lesson.begin(seed=3)
    first = torch.rand(3)
    lesson.begin(seed=3)
    assert torch.equal(first, torch.rand(3))
    assert "seed 3" in capsys.readouterr().out


@pytest.mark.parametrize("name", lesson.MODELS)
def test_committed_models_act(name):
    policy, reference, tokenizer = lesson.model(name)
    obs = torch.tensor([tokenizer.encode("3+4=")])
    assert torch.equal(policy(obs).logits, reference(obs).logits)
    assert not any(parameter.requires_grad for parameter in reference.parameters())


def test_committed_reward_model_ranks_as_the_truth_does():
    task = Reviews()
    prompts, texts = map(list, zip(*task.pretraining_texts(60, torch.Generator().manual_seed(0)), strict=True))
    assert spearmanr(lesson.reward_model()(prompts, texts), task.reward(prompts, texts)).statistic > 0.9


@pytest.mark.parametrize("task", ["arithmetic", "reviews", "Pendulum-v1"])
def test_setting_acts_and_learns(task):
    small = {"num_envs": 1, "steps": 20, "warmup_steps": 5} if task == "Pendulum-v1" else {"prompts_per_batch": 4}
    world, policy, critic, config = lesson.setting("ppo", task, **small)
    stats = PPO(policy, critic, config).update(world.collect(policy, critic))
    assert stats["kl_old_new"] >= 0


def test_what_is_not_there_is_named():
    with pytest.raises(ValueError, match="no model 'huge'"):
        lesson.model("huge")
    with pytest.raises(ValueError, match="no algorithm 'ppo2'; there are reinforce, trpo, ppo"):
        lesson.setting("ppo2")
    with pytest.raises(FileNotFoundError, match="nothing_like_it"):
        lesson.data("nothing_like_it")


@pytest.mark.parametrize("imports, printed", [("minirl.training", r"0\.\d+ \{'gold'"), ("load_model", r"\d+\n")])
def test_the_python_of_the_readme_runs(imports, printed, capsys, monkeypatch):
    """Where the README shows whole programs: they are run as they stand."""
    root = lesson.DATA.parent
    monkeypatch.chdir(root)
    blocks = re.findall(r"```python\n(.*?)```", (root / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (program,) = (block for block in blocks if f"from {imports} import" in block or f"import {imports}" in block)
    exec(program, {})
    assert re.match(printed, capsys.readouterr().out)
