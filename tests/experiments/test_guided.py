"""Q#: whose actions count in its data, the grid of outcomes, and a run that leaves the reference as it was."""

import csv
from types import SimpleNamespace

import pytest
import torch

from minirl.algorithms.q_sharp import GuidedPolicy, Outcomes, QSharpConfig
from minirl.experiments.guided import QSharpRun, check_room, grid, joined, roll_outs
from minirl.experiments.models import load_guide, load_model, policy_and_reference
from minirl.experiments.settings import ReviewsSettings
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import FilePrompts, write_jsonl
from minirl.worlds.reviews import Reviews

A, B, END = 0, 1, 8  # ids of the letters' tokenizer


class Says:
    """Writes one letter again and again."""

    def __init__(self, letter):
        self.letter = letter

    def generate(self, ids, max_new_tokens, **_):
        return torch.cat([ids, torch.full((len(ids), max_new_tokens), self.letter)], dim=1)


def test_without_a_guide_every_action_is_the_references(make_text):
    world, *_ = make_text(prompts_per_batch=6, group_size=2, missing_end_penalty=0.5)
    found = roll_outs(world, None, Says(A), torch.Generator().manual_seed(0))
    assert len(found) == 12 and found.mask.sum(1).tolist() == [5] * 12 and (found.actions[found.mask] == A).all()
    assert found.outcomes.tolist() == [0.5] * 12  # all a, less the penalty for no end


def test_what_the_guide_wrote_is_read_but_does_not_count(make_text):
    world, *_ = make_text(prompts_per_batch=40, group_size=1)
    found = roll_outs(world, Says(B), Says(A), torch.Generator().manual_seed(0))
    assert (found.actions[found.mask] == A).all()
    counted = found.mask.sum(1)
    assert set(counted.tolist()) == {1, 2, 3, 4, 5}  # from the first to the last position
    # The reward sees the whole text: of its five letters those a that the reference wrote.
    torch.testing.assert_close(found.outcomes, counted / 5, rtol=0, atol=1e-6)
    for row in range(len(found)):
        begun = found.actions[row, : int(found.mask[row].long().argmax())]
        assert begun[begun.numel() - (5 - int(counted[row])) :].tolist() == [B] * (5 - int(counted[row]))


def test_a_guide_that_ends_at_once_leaves_the_end_to_the_reference(make_text):
    world, *_ = make_text(prompts_per_batch=6, group_size=1)
    found = roll_outs(world, Says(END), Says(END), torch.Generator().manual_seed(0))
    assert found.mask.sum(1).tolist() == [1] * 6 and (found.actions[found.mask] == END).all()


def test_joined_outcomes_are_as_wide_as_the_widest():
    ones = torch.ones(1, 2, dtype=torch.long)
    short = Outcomes(ones, ones, ones.bool(), torch.tensor([0.25]))
    wide = torch.full((2, 4), 3)
    both = joined([short, Outcomes(wide, wide, wide.bool(), torch.tensor([1.0, 2.0]))], pad_id=9)
    assert both.obs.tolist() == both.actions.tolist() == [[1, 1, 9, 9], [3] * 4, [3] * 4]
    assert both.mask.tolist() == [[True, True, False, False], [True] * 4, [True] * 4]
    assert both.outcomes.tolist() == [0.25, 1.0, 2.0]


def test_the_grid_reaches_beyond_the_best_unless_it_is_right_and_wrong():
    scores = torch.tensor([3.0, -1.0, 0.0])
    assert grid(scores, 2).tolist() == [-1.0, 3.0]
    torch.testing.assert_close(grid(scores, 5), torch.tensor([-1.0, 0.1, 1.2, 2.3, 3.4]))  # a tenth of 4 above 3
    with pytest.raises(ValueError, match="every one of the reference's completions earned 2"):
        grid(torch.full((3,), 2.0), 5)


def test_a_prompt_a_beginning_and_a_completion_need_room(letters, tmp_path):
    write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": prompt} for prompt in ("a", "abc", "bca", "cab")])
    world = SimpleNamespace(tokenizer=letters, task=FilePrompts(tmp_path / "prompts.jsonl"), max_new_tokens=5)
    check_room(world, 3 + 4 + 5, rounds=2)
    check_room(world, 3 + 5, rounds=1)  # without beginnings
    for block_size, rounds in ((11, 2), (7, 1)):
        with pytest.raises(ValueError, match=f"max_new_tokens is 5; after a prompt of 3 tokens .* of {block_size}"):
            check_room(world, block_size, rounds)


# ---- the run


@pytest.fixture
def make(model, tmp_path, monkeypatch):
    """A short run, rewarded for letters e; world and other settings by keyword."""
    letters_e = lambda self, prompts, completions, **_: [float(text.count("e")) for text in completions]  # noqa: E731
    monkeypatch.setattr(Reviews, "reward", letters_e)  # also texts of an untrained model differ in it

    def make(world=None, **changes):
        small = {"init": model, "reward": "true", "prompts_per_batch": 8, "evaluate_prompts": 4, "max_new_tokens": 12}
        few = {"rollouts": 16, "steps": 2, "batch_size": 8, "quiet": True, "device": "cpu"}
        config = QSharpConfig(eta=0.2, bins=5, lr=3e-3)
        settings = {"algorithm": config, **few, **changes}
        return QSharpRun(out=tmp_path / "out", world=ReviewsSettings(**small | (world or {})), **settings)

    return make


def test_a_run_saves_its_guide_and_never_touches_the_reference(make, model):
    before = (model / "model" / "model.safetensors").read_bytes()
    run = make()
    summary = run.run()
    assert (model / "model" / "model.safetensors").read_bytes() == before and not (run.out / "model").exists()
    with (run.out / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4"]  # two rounds of two
    evaluated = [row["step"] for row in rows if row["eval_score_sampled"]]
    assert evaluated == ["0", "2", "4"]  # after each round
    # An untrained guide expects the same of every token and so changes nothing.
    assert summary["before"]["eval_kl_policy_ref"] == pytest.approx(0, abs=1e-5)
    guide, ids = load_guide(run.out), torch.tensor([[1, 2, 3]])
    _, reference = policy_and_reference(*load_model(model))
    found = GuidedPolicy(reference, guide, 0.2)(ids).logits
    torch.testing.assert_close(found, summary["guided"](ids).logits, rtol=0, atol=1e-6)
    assert not torch.allclose(found, reference(ids).logits, atol=1e-7)


def test_rollouts_are_whole_batches(make):
    world = SimpleNamespace(prompts_per_batch=8, group_size=2)
    assert [make(rollouts=n).batches(world) for n in (1, 16, 17, 32)] == [1, 1, 2, 2]


def test_what_has_no_room_is_refused_before_anything_is_written(make, tmp_path):
    with pytest.raises(ValueError, match="max_new_tokens is 60"):
        make({"max_new_tokens": 60}).run()
    with pytest.raises(ValueError, match="kl_coef has no meaning here"):
        make({"kl_coef": 0.1}).run()
    assert not (tmp_path / "out").exists()


def test_own_prompts_leave_room_for_beginnings(make, tmp_path, monkeypatch):
    path = tmp_path / "mine.jsonl"
    write_jsonl(path, [{"prompt": f"Say {i}:"} for i in range(9)])
    monkeypatch.setattr("minirl.experiments.tasks.load_reward_model", lambda path, device: None)
    found = []
    monkeypatch.setattr("minirl.experiments.guided.check_room", lambda world, *_: found.append(world.max_new_tokens))
    monkeypatch.setattr("minirl.experiments.guided.roll_outs", lambda *_: pytest.fail("this is far enough"))
    with pytest.raises(pytest.fail.Exception):
        make({"data": path, "reward": "learned", "max_new_tokens": None}).run()
    assert found == [(96 - len(default_tokenizer().encode("Say 0:"))) // 2]
