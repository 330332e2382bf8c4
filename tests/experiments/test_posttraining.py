"""posttraining: its tables say what its texts say, its costs count what is code, and a model can be judged again."""

import csv
import inspect
import json
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import pytest
import torch

from minirl.__main__ import main
from minirl.algorithms import dpo, sft
from minirl.algorithms.reward_model import LearnedReward, RewardModel
from minirl.algorithms.trpo import TRPO
from minirl.experiments import costs, guided, language, methods, posttraining, preferences, r1_zero, reasoning
from minirl.experiments.costs import cost_table, lines_of_code, one_update
from minirl.experiments.judging import win_rate
from minirl.experiments.language import HeldOutTexts, own_texts
from minirl.experiments.methods import Story, best_of, judge_folder, seed_of
from minirl.experiments.models import load_reward_model, save_model, save_reward_model
from minirl.experiments.posttraining import COMPARED, PostTraining, Results
from minirl.experiments.settings import ArithmeticSettings, ReviewsSettings, SumsSettings
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import TokenCritic
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import write_jsonl
from minirl.worlds.reviews import Reviews

pytestmark = pytest.mark.slow


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
    reward, prompts = load_reward_model(story.reward_model), Reviews().held_out(30)[0]
    for result in found.values():  # the texts are those that earned it
        assert result["learned"] == pytest.approx(reward(prompts, result["completions"]), abs=1e-4)
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


def test_held_out_prompts_without_room_are_not_asked():
    texts = HeldOutTexts(["1+1=", "1+" * 60, "12="], ["2", "60", "12"])
    found, longest = texts.within(default_tokenizer(), 96)
    assert found.held_out() == (["1+1=", "12="], {"gold": ["2", "12"]})
    assert longest == max(len(default_tokenizer().encode(prompt)) for prompt in found.prompts)
    with pytest.raises(ValueError, match="no prompt kept for evaluation is shorter than the model's 2 tokens"):
        texts.within(default_tokenizer(), 2)


# ---- the whole story, with models, data and batches far smaller than --quick has

SUMS = ArithmeticSettings(terms=4, format="think", held_out=4)
COSTS = [{"method": "ppo", "lines_of_code": 9, "seconds_per_update": 0.5}]


def one_after_another(jobs, workers, label, quiet, finished):
    """run_jobs in this process, where the patches are."""
    failed = {}
    for job in jobs:
        try:
            finished(job, job.run(lambda amount: None))
        except RuntimeError as error:
            failed[job.title] = str(error)
    return failed


def shrink(patch):
    """Make every stage tiny, and TRPO fail."""
    def small(kind, **changes):
        return lambda **given: kind(**(given | changes))

    shape = {"documents": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "evaluate_every": 0, "batch_size": 8}
    table = {name: entry._replace(reviews_world=replace(entry.reviews_world, prompts_per_batch=4, evaluate_prompts=4))
             for name, entry in methods.ALGORITHMS.items()}  # fmt: skip
    tuned = language.Finetune.of("reviews")
    for module in (posttraining, reasoning, r1_zero):
        sums = {} if module is r1_zero else {"arithmetic": replace(SUMS, format="direct")}
        reviews = {"reviews": 64} if module is posttraining else {}
        patch.setattr(module, "Pretrain", small(language.Pretrain, **shape, **reviews, **sums))
    patch.setattr(posttraining.Finetune, "of", lambda task: replace(tuned, demonstrations=64, batch_size=8))
    for name in ("RewardModelRun", "DPORun", "ORPORun"):
        patch.setattr(posttraining, name, partial(getattr(preferences, name), batch_size=8, evaluate_every=0))
    patch.setattr(posttraining, "QSharpRun", partial(guided.QSharpRun, batch_size=8, world=ReviewsSettings(
        prompts_per_batch=128, evaluate_prompts=4)))  # fmt: skip
    patch.setattr(posttraining, "BETAS", (0.3,))
    patch.setattr(Reviews, "max_new_tokens", 12)
    patch.setattr(r1_zero, "learning_curves", lambda *_, **__: None)
    patch.setattr(reasoning, "R1Zero", small(r1_zero.R1Zero, world=SumsSettings(
        init=None, arithmetic=SUMS, format_weight=0.2, group_size=2, prompts_per_batch=4)))  # fmt: skip
    patch.setattr(reasoning, "SumsSettings", small(SumsSettings, arithmetic=SUMS, group_size=2, prompts_per_batch=4))
    patch.setattr(preferences, "SAMPLES", 16)
    patch.setattr(methods, "JUDGED", 30)
    patch.setattr(methods, "ALGORITHMS", table)
    patch.setattr(costs, "ALGORITHMS", table)
    patch.setattr(posttraining, "run_jobs", one_after_another)
    patch.setattr(posttraining, "cost_table", lambda story, updates: COSTS)
    patch.setattr(TRPO, "update", broken)


def broken(self, batch, progress=0.0):
    raise RuntimeError("no step was found")


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """(exit code, what was printed, folder) of a story in which TRPO failed."""
    out, printed = tmp_path_factory.mktemp("told"), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        shrink(patch)
        code = main(["posttraining", "--quick", "--quiet", "--out", str(out)])
    return code, printed.getvalue(), out


def table_in(path):
    with path.open(encoding="utf-8", newline="") as file:
        return {row["method"]: row for row in csv.DictReader(file)}


def test_a_story_judges_every_method_and_says_which_failed(told):
    code, printed, out = told
    assert code == 1 and "1 of the methods failed: trpo" in printed
    titles = {job.title for job in PostTraining(out=out).jobs(Story(out, 0))}
    others = {"r1-zero", "r1-zero from random", "supervision"}
    rows = table_in(out / "results.csv")
    unmade = others | {"trpo"} | {f"dpo beta={beta}" for beta in posttraining.BETAS if beta != 0.3}
    assert set(rows) == titles - unmade | {"sft", "best of 2", "best of 4"}
    for title, row in rows.items():
        assert 0 <= float(row["wins_low"]) <= float(row["wins_against_sft"]) <= float(row["wins_high"]) <= 1
        assert row["comparisons"] == "30" and float(row["kl_to_sft"]) >= 0, title
        assert f"\n{title} " in printed
    assert float(rows["sft"]["wins_against_sft"]) == 0.5 and float(rows["sft"]["kl_to_sft"]) == 0
    learned = [float(rows[title]["learned_score"]) for title in ("sft", "best of 2", "best of 4")]
    assert learned[1] <= learned[2] and float(rows["orpo"]["kl_to_sft"]) > 0


def test_a_storys_methods_start_where_they_should(told):
    """Orpo from the base, the others from the fine-tuned model; the comparisons are those of the reward model."""
    out, kept = told[2], ("reward-model", "preferences.jsonl")
    for title, start in (("orpo", "pretrain"), ("dpo-beta-0.3", "sft-reviews"), ("ppo", "sft-reviews"),
                         ("q-sharp", "sft-reviews")):  # fmt: skip
        settings = json.loads((out / title / "config.json").read_text(encoding="utf-8"))["settings"]
        assert Path(settings.get("world", settings)["init"]) == out / start, title
        if "comparisons" in settings:
            assert Path(settings["comparisons"]["data"]) == out.joinpath(*kept)


def test_a_storys_wins_are_symmetric(told):
    wins = table_in(told[2] / "wins.csv")
    assert list(wins) == [name for name in COMPARED if name != "trpo"]
    for first, row in wins.items():
        for second in wins:
            assert float(row[second]) + float(wins[second][first]) == pytest.approx(1, abs=1e-12)
    assert float(wins["ppo"]["sft"]) == float(table_in(told[2] / "results.csv")["ppo"]["wins_against_sft"])


def test_a_storys_report_and_figures(told):
    _, printed, out = told
    for name in ("overoptimisation.png", "reasoning.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2
    assert "accuracy of the truth" in page and "dpo beta=0.3" in page and "posttraining --quick" in page
    assert f"open {out / 'report.html'} in a browser" in printed
    for name in ("r1-zero.csv", "r1-zero-from-random.csv", "supervision.csv", "costs.csv"):
        assert (out / name).stat().st_size > 0
    with (out / "supervision.csv").open(encoding="utf-8", newline="") as file:
        assert {row["run"] for row in csv.DictReader(file)} == {"outcome", "process"}
    assert {"config.json", "pretrain", "sft-reviews", "reward-model"} <= {path.name for path in out.iterdir()}


def test_a_story_can_be_judged_again_and_survives_without_its_costs(told, monkeypatch, capsys):
    def no_costs(story, updates):
        raise RuntimeError("dpo failed in its own process")

    out = told[2]
    before, config = table_in(out / "results.csv"), (out / "config.json").read_bytes()
    shrink(monkeypatch)
    monkeypatch.setattr(posttraining, "cost_table", no_costs)
    monkeypatch.setattr(language, "imitate", lambda *_, **__: pytest.fail("something is trained"))
    story, command = Story(out, 0), PostTraining(out=out, quick=True, rejudge=True, quiet=True)
    jobs = [job for job in command.jobs(story) if job.title in ("ppo", "q-sharp", "r1-zero", "dpo beta=0.3")]
    monkeypatch.setattr(PostTraining, "jobs", lambda self, story: jobs)
    rows, failed = command.run()
    after = {row["method"]: row for row in rows}
    assert failed == {"costs": "dpo failed in its own process"} and "methods failed: costs" in capsys.readouterr().out
    for title in ("sft", "ppo", "q-sharp", "dpo beta=0.3", "best of 4"):
        assert after[title]["true_score"] == float(before[title]["true_score"]), title
        assert after[title]["learned_score"] == pytest.approx(float(before[title]["learned_score"]), abs=1e-9)
    assert (out / "config.json").read_bytes() == config


def test_judging_again_what_was_never_there(tmp_path, capsys):
    assert main(["posttraining", "--rejudge", "--out", str(tmp_path / "nowhere")]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1 and "nowhere" in text and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", costs.METHODS)
def test_an_update_is_measured_with_the_rows_it_learned_from(name, told, monkeypatch):
    shrink(monkeypatch)
    monkeypatch.undo() if name in ("dpo", "orpo") else monkeypatch.setattr(TRPO, "update", lambda self, batch: {})
    update = one_update(name, Story(told[2], 0))
    world = methods.ALGORITHMS[name].reviews_world if name in methods.ALGORITHMS else None
    rows = 128 if name in ("dpo", "orpo") else 64 if name == "q-sharp" else 4 * world.group_size
    assert update() == rows


def test_costs_are_measured_in_a_process_of_their_own(told, monkeypatch):
    monkeypatch.setattr(costs, "METHODS", {"dpo": ((dpo,), "policy, reference")})
    (row,) = cost_table(Story(told[2], 0), updates=1)
    assert row["method"] == "dpo" and row["number_of_models"] == 2 and row["rows_per_update"] == 128
    assert row["lines_of_code"] == lines_of_code(dpo) and row["seconds_per_update"] > 0
    assert row["seconds_per_1000_rows"] == pytest.approx(1000 * row["seconds_per_update"] / 128)
    assert row["peak_megabytes"] == "" or 0 < row["peak_megabytes"] < 1000
