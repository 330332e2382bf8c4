"""The commands that learn from comparisons: whom the annotator prefers, what is kept, what is measured and saved."""

import csv
import math
from dataclasses import replace

import pytest
import torch

from minirl.experiments import preferences
from minirl.experiments.comparisons import Comparisons, compare_samples, packed, pick, rows_of, split_by_prompt
from minirl.experiments.models import load_model, load_reward_model, save_model
from minirl.experiments.preferences import DPORun, ORPORun, RewardModelRun, in_parts, margin_of
from minirl.models.gpt import GPT
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import PairTexts, read_pairs, write_jsonl
from minirl.worlds.reviews import Annotator, Reviews

KINDS = {"reward-model": RewardModelRun, "dpo": DPORun, "orpo": ORPORun}


@pytest.fixture
def own(tmp_path):
    """A file in which the better answer always is another one than the worse."""
    path = tmp_path / "own.jsonl"
    write_jsonl(path, [{"prompt": f"Say {i}:", "chosen": " good", "rejected": " bad"} for i in range(20)])
    return path


@pytest.fixture
def make(model, tmp_path):
    """A short run of one of the three; other settings by keyword, those of the comparisons in a dict."""

    def make(name, comparisons=None, **changes):
        where = Comparisons(**{"samples_from": model, "pairs": 24, "held_out_pairs": 30, **(comparisons or {})})
        few = {"steps": 3, "batch_size": 8, "evaluate_every": 0, "quiet": True, "device": "cpu"}
        return KINDS[name](out=tmp_path / name, init=model, comparisons=where, **{**few, **changes})

    return make


def rows_in(path):
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]


# ---- comparisons


def letters_of_the_prompt(prompts, completions, letter):
    """A truth that needs its column: how often a completion holds the first letter of its prompt."""
    assert letter == [prompt[0] for prompt in prompts], "columns do not belong to their prompts"
    return [float(text.count(wanted)) for text, wanted in zip(completions, letter, strict=True)]


def test_a_strong_annotator_always_prefers_the_better_text(make_text):
    world, policy, _ = make_text()
    generator = torch.Generator().manual_seed(0)
    prompts, _ = world.task.sample(60, generator)
    columns = {"letter": [prompt[0] for prompt in prompts]}
    pairs, ceiling = compare_samples(world, policy, Annotator(letters_of_the_prompt, 1e6, generator), prompts, columns)
    letters = [prompt[0] for prompt in pairs.prompts]
    chosen, rejected = (letters_of_the_prompt(pairs.prompts, s, letters) for s in (pairs.chosen, pairs.rejected))
    assert all(a >= b for a, b in zip(chosen, rejected, strict=True)) and sum(chosen) > sum(rejected)
    assert all(a != b for a, b in zip(pairs.chosen, pairs.rejected, strict=True))  # equal texts are no comparison
    ties = sum(a == b for a, b in zip(chosen, rejected, strict=True))
    assert ceiling == pytest.approx(1 - ties / len(chosen) / 2, abs=1e-12)  # a coin is right half the time


def test_an_annotator_without_judgement_tosses_coins(make_text):
    world, policy, _ = make_text()
    generator = torch.Generator().manual_seed(0)
    prompts, _ = world.task.sample(20, generator)
    columns = {"letter": [prompt[0] for prompt in prompts]}
    assert compare_samples(world, policy, Annotator(letters_of_the_prompt, 0.0, generator), prompts, columns)[1] == 0.5


def test_a_model_that_always_says_the_same_gives_no_comparisons():
    class Same:
        def complete(self, policy, prompts):
            return None, None, None, ["x"] * len(prompts), None

    with pytest.raises(ValueError, match="equal; there is nothing to compare"):
        compare_samples(Same(), None, None, ["a", "b"], {})


def test_rows_with_one_prompt_stay_on_one_side():
    prompts = [f"p{i % 25}" for i in range(100)]
    training, away = split_by_prompt(prompts)
    assert sorted(training + away) == list(range(100)) and len(away) == 2 * 4  # a tenth of 25 prompts, four rows each
    assert not {prompts[row] for row in training} & {prompts[row] for row in away}
    assert split_by_prompt(prompts) == (training, away)
    assert [len(side) for side in split_by_prompt(["a", "b", "b"])] in ([2, 1], [1, 2])  # one at least
    with pytest.raises(ValueError, match="one prompt only"):
        split_by_prompt(["a", "a"])


def test_margins_go_where_their_pairs_go(capsys):
    pairs = PairTexts(["a:", "b:", "c:"], ["1", "2" * 300, "3"], ["4", "5", "6"], [0.5, 1.5, 2.5], [])
    assert pick(pairs, [2, 0]).margins == [2.5, 0.5] and pick(pairs, [2, 0]).chosen == ["3", "1"]
    assert rows_of(pairs)[2] == {"prompt": "c:", "chosen": "3", "rejected": "6", "margin": 2.5}
    assert "margin" not in rows_of(pairs._replace(margins=None))[0]
    records = packed(pairs, default_tokenizer(), 64, "cpu")
    assert records.margin.tolist() == [0.5, 2.5]
    assert capsys.readouterr().out == "1 of 3 rows is longer than 64 tokens and was left out\n"


def test_comparisons_never_ask_held_out_prompts_in_training(model):
    made = Comparisons(samples_from=model, pairs=40, held_out_pairs=20)
    training, held_out, ceiling = made.training_and_held_out(0, "cpu")
    away = set(Reviews().held_out()[0])
    assert not away & set(training.prompts) and set(held_out.prompts) <= away
    assert len(training.prompts) <= 40 and len(held_out.prompts) >= 20 and 0.5 <= ceiling <= 1


# ---- what is learned, measured and saved


@pytest.mark.parametrize("name", KINDS)
def test_what_is_always_preferred_is_learned(name, make, own):
    run = make(name, {"data": own}, steps=30, batch_size=16)
    summary = run.run()
    metric = "eval_accuracy" if name == "reward-model" else "eval_pair_accuracy"
    assert summary["after"][metric] == 1 and summary["pairs"] == 18
    history = rows_in(run.out / "metrics.csv")
    assert [row["step"] for row in history] == list(range(31)) and history[-1]["loss"] < history[1]["loss"]
    kept, given = read_pairs(run.out / "preferences.jsonl"), read_pairs(own)
    assert len(kept.prompts) == 18 and set(kept.prompts) < set(given.prompts)


def test_dpo_starts_at_the_reference_and_leaves_it(make, own):
    run = make("dpo", {"data": own})
    assert run.run()["before"]["eval_pair_accuracy"] == 0.5  # margins of exactly 0
    assert rows_in(run.out / "metrics.csv")[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_preferences_with_a_known_truth_are_judged_by_it(make):
    summary = make("dpo").run()
    assert summary["before"]["eval_kl_policy_ref"] == 0 < summary["after"]["eval_kl_policy_ref"]
    assert {"eval_true_score_sampled", "eval_true_score_greedy", "eval_pair_accuracy"} <= summary["after"].keys()
    sums = make("dpo", {"task": "arithmetic"}).run()
    assert "eval_accuracy_greedy" in sums["after"]


def test_orpo_tells_its_distance_from_the_model_whose_texts_were_compared(make, model, tmp_path):
    torch.manual_seed(1)
    base = tmp_path / "base"
    gpt = GPT(load_model(model)[0].config)
    save_model(base, gpt, default_tokenizer())
    run = replace(make("orpo"), init=base)
    assert run.run()["before"]["eval_kl_policy_ref"] > 0
    saved, ids = load_model(run.out)[0], torch.tensor([[1, 2, 3]])
    assert not torch.equal(saved(ids), gpt(ids)) and torch.equal(load_model(base)[0](ids), gpt.eval()(ids))


def test_a_reward_model_against_the_truth(make, monkeypatch):
    monkeypatch.setattr(preferences, "SAMPLES", 16)  # else 64
    run = make("reward-model")
    after = run.run()["after"]
    rows = rows_in(run.out / "best_of.csv")
    assert [row["k"] for row in rows] == [1, 2, 4, 8, 16]
    by_truth = [row["true_score_by_truth"] for row in rows]
    assert by_truth == sorted(by_truth) and rows[0]["true_score_by_model"] == pytest.approx(by_truth[0], abs=1e-9)
    kept = (rows[-1]["true_score_by_model"] - by_truth[0]) / (by_truth[-1] - by_truth[0])
    assert after["eval_best_of_16_gain_kept"] == pytest.approx(kept, abs=1e-6) and kept <= 1
    assert 0 <= after["eval_accuracy"] <= 1 and 0.5 <= after["eval_accuracy_of_the_truth"] <= 1
    learned = [row["learned_score_by_model"] for row in rows]
    assert learned == sorted(learned) and learned[0] == pytest.approx(0, abs=1e-5)  # deviations from the mean


def test_a_reward_model_of_own_data_is_calibrated_on_held_out_answers(make, own):
    run = make("reward-model", {"data": own}, steps=10)
    run.run()
    reward, pairs = load_reward_model(run.out), read_pairs(own)
    _, away = split_by_prompt(pairs.prompts)
    held_out = pick(pairs, away)
    scores = reward(held_out.prompts, held_out.chosen)
    assert sum(scores) == pytest.approx(0, abs=1e-4) and not (run.out / "best_of.csv").exists()


def test_parts_are_the_whole(make, own, model):
    algorithm, *_ = make("reward-model", {"data": own}).prepared(*load_model(model), None, 0.0, "cpu")
    torch.nn.init.normal_(algorithm.critic.head.weight)
    records = packed(read_pairs(own), default_tokenizer(), 96, "cpu")
    whole = in_parts(lambda part: margin_of(algorithm, part), records)
    assert whole.shape == (20,) and whole.std() > 0
    torch.testing.assert_close(in_parts(lambda part: margin_of(algorithm, part), records, 7), whole, rtol=0, atol=1e-5)


# ---- what is refused


def test_the_file_that_is_read_is_never_replaced(make, own):
    run = make("dpo", {"data": own})
    run.out.mkdir()
    mine = run.out / "preferences.jsonl"
    mine.write_bytes(own.read_bytes())
    with pytest.raises(ValueError, match="which this run would replace; give another --out"):
        make("dpo", {"data": mine}).run()
    assert mine.read_bytes() == own.read_bytes() and list(run.out.iterdir()) == [mine]


def test_ties_are_left_out_and_said(make, own, capsys):
    text = own.read_text(encoding="utf-8") + '{"prompt": "Say x:", "chosen": "a", "rejected": "a"}\n'
    own.write_text(text, encoding="utf-8")
    make("reward-model", {"data": own}, steps=1).run()
    assert f"1 rows of {own} have chosen equal to rejected" in capsys.readouterr().out
