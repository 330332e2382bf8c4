"""posttraining: its tables say what its texts say, its costs count what is code, and a model can be judged again."""

import csv
import inspect

import pytest
import torch

from minirl.algorithms import sft
from minirl.algorithms.reward_model import LearnedReward, RewardModel
from minirl.experiments import posttraining
from minirl.experiments.costs import lines_of_code
from minirl.experiments.judging import win_rate
from minirl.experiments.language import own_texts
from minirl.experiments.methods import Story, best_of, judge_folder, seed_of
from minirl.experiments.models import save_model, save_reward_model
from minirl.experiments.posttraining import PostTraining, Results
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import TokenCritic
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import write_jsonl
from minirl.worlds.reviews import Reviews


@pytest.fixture(scope="module")
def story(tmp_path_factory):
    """A story whose models are untrained."""
    torch.manual_seed(0)
    story, tokenizer = Story(tmp_path_factory.mktemp("story"), seed=3), default_tokenizer()
    config = GPTConfig(tokenizer.vocab_size, 96, 1, 2, 16)
    save_model(story.sft, GPT(config), tokenizer)
    critic = TokenCritic(GPT(config))
    torch.nn.init.normal_(critic.head.weight)
    save_reward_model(story.reward_model, LearnedReward(RewardModel(critic), tokenizer))
    return story


def test_a_model_is_judged_the_same_again_and_against_itself_wins_half(story, monkeypatch):
    monkeypatch.setattr("minirl.experiments.methods.JUDGED", 30)
    first, again = (judge_folder(story, "sft", story.sft) for _ in range(2))
    assert first == again and first["kl"] == 0 and len(first["completions"]) == 30
    assert first["true"] == Reviews().reward(Reviews().held_out(30)[0], first["completions"])
    other = judge_folder(story, "the same by another name", story.sft)
    assert other["completions"] != first["completions"] and seed_of(story, "a") != seed_of(story, "b")
    assert win_rate(first["true"], first["true"])[0] == 0.5


def test_the_best_of_more_scores_more_and_starts_from_the_same_texts(story, monkeypatch):
    monkeypatch.setattr("minirl.experiments.methods.JUDGED", 30)
    found = best_of(story, (1, 2, 4))
    for fewer, more in ((1, 2), (2, 4)):
        assert all(a <= b for a, b in zip(found[fewer]["learned"], found[more]["learned"], strict=True))
    assert found[1]["kl"] == 0 and found[2]["kl"] == pytest.approx(0.6931471805599453 - 0.5)


def test_results_say_what_the_texts_say(tmp_path):
    results = Results(PostTraining(out=tmp_path))
    results.summaries = {"reward-model": {"after": {"eval_accuracy": 0.75}, "pairs": 7}}
    texts = {"completions": [" a."] * 4, "kl": 1.5, "length": 3.0}
    results.take("sft", texts | {"true": [0.0, 1.0, 2.0, 3.0], "learned": [0.0] * 4, "seconds": 1.0})
    results.take("ppo", texts | {"true": [1.0, 1.0, 1.0, 4.0], "learned": [1.0] * 4, "seconds": 2.0})
    results.take("costs", {"rows": [{"method": "ppo", "lines_of_code": 9, "seconds_per_update": 0.5}]})
    results.write()
    row = results.rows()[1]
    # Against sft: a win, a tie, a loss, a win.
    assert row["wins_against_sft"] == (1 + 0.5 + 0 + 1) / 4 and row["true_score"] == 1.75 and row["comparisons"] == 4
    with (tmp_path / "wins.csv").open(encoding="utf-8", newline="") as file:
        wins = {line["method"]: line for line in csv.DictReader(file)}
    assert float(wins["ppo"]["sft"]) == 0.625 and float(wins["sft"]["ppo"]) == 0.375
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "simulated" in page and "62%" in page and page.count("data:image/png;base64,") == 2
    assert {"results.csv", "costs.csv", "overoptimisation.png"} <= {path.name for path in tmp_path.iterdir()}
    assert "62%" in results.table()


def test_every_method_has_a_folder_of_its_own_and_the_longest_comes_first(story):
    jobs = PostTraining(out=story.out, ablation=True).jobs(story)
    assert len({job.out for job in jobs}) == len(jobs) and len({job.title for job in jobs}) == len(jobs)
    assert [job.size for job in jobs] == sorted((job.size for job in jobs), reverse=True)
    assert {f"dpo beta={beta}" for beta in posttraining.BETAS} <= {job.title for job in jobs}


def test_lines_of_code_leave_out_comments_and_docstrings(tmp_path):
    source = inspect.getsource(sft)
    code = lines_of_code(sft)
    assert 20 < code < source.count("\n") / 2 and lines_of_code(sft, sft) == 2 * code


def test_own_texts_are_split_by_prompt(tmp_path):
    path = tmp_path / "texts.jsonl"
    write_jsonl(path, [{"prompt": f"p{i % 20}", "completion": str(i)} for i in range(60)])
    training, held_out = own_texts(path)
    asked = {prompt for prompt, _ in training}
    assert len(asked) == 18 and not asked & set(held_out.prompts) and len(training) + len(held_out.prompts) == 60
