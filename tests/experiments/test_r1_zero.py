"""r1-zero: where it starts, what its base has read, and that it looks before it leaps."""

from dataclasses import replace

import pytest
import torch

from minirl.experiments import r1_zero
from minirl.experiments.language import Pretrain
from minirl.experiments.models import load_model, save_model
from minirl.experiments.r1_zero import Base, R1Zero
from minirl.experiments.reasoning import curve
from minirl.experiments.settings import ArithmeticSettings, SumsSettings
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.tokenizer import default_tokenizer
from minirl.tracking import read_rows
from minirl.worlds.jsonl import write_jsonl

SUMS = ArithmeticSettings(terms=2, format="think", held_out=4)
WORLD = SumsSettings(
    init=None, arithmetic=SUMS, format_weight=0.2, group_size=2, prompts_per_batch=4, max_new_tokens=8,
)  # fmt: skip


@pytest.fixture
def make(tmp_path):
    """A run of two updates; changes of the world in a dict."""

    def make(world=None, **changes):
        few = {"updates": 2, "evaluate_every": 1, "quiet": True, "device": "cpu"}
        return R1Zero(out=tmp_path / "out", world=replace(WORLD, **(world or {})), **{**few, **changes})

    return make


@pytest.fixture
def no_pretraining(monkeypatch):
    monkeypatch.setattr(Pretrain, "run", lambda self: pytest.fail("a base is made"))


def test_an_untrained_start_has_the_size_of_a_base_and_the_curves_are_drawn(make, no_pretraining, monkeypatch):
    monkeypatch.setattr(r1_zero, "Pretrain", lambda: Pretrain(n_layer=1, n_embd=16, n_head=2))
    run = make(start="random")
    summary = run.run()
    config = load_model(run.out / "base")[0].config
    assert (config.n_layer, config.n_embd, config.n_head, config.block_size) == (1, 16, 2, Pretrain().block_size)
    assert (run.out / "r1_zero.png").read_bytes().startswith(b"\x89PNG") and load_model(run.out)[0].config == config
    rows = read_rows(run.out / "metrics.csv")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert {"reward_accuracy", "reward_format", "reward_off_vocabulary", "response_length"} <= rows[1].keys()
    points = curve("r1-zero", summary["history"])
    assert [point["update"] for point in points] == [0, 1, 2]
    assert points[0]["reward_off_vocabulary"] == "" and 0 < points[1]["reward_off_vocabulary"] <= 1
    assert curve("x", [{"step": 3, "score": 1.0}]) == []  # without an evaluation there is no point
    again = curve("r1-zero", rows)  # as posttraining --rejudge reads it
    assert [point["eval_accuracy_sampled"] for point in again] == [point["eval_accuracy_sampled"] for point in points]


def test_a_given_model_is_the_base(make, no_pretraining, tmp_path):
    torch.manual_seed(0)
    save_model(tmp_path / "given", GPT(GPTConfig(default_tokenizer().vocab_size, 48, 1, 2, 8)), default_tokenizer())
    run = make({"init": tmp_path / "given"})
    run.run()
    assert not (run.out / "base").exists() and load_model(run.out)[0].config.n_embd == 8


def test_sums_that_are_answered_at_once_have_fewer_panels(make, no_pretraining, tmp_path, monkeypatch):
    save_model(tmp_path / "given", GPT(GPTConfig(default_tokenizer().vocab_size, 48, 1, 2, 8)), default_tokenizer())
    drawn = []
    monkeypatch.setattr(r1_zero, "learning_curves", lambda series, panels, path: drawn.extend(panels))
    direct = {"init": tmp_path / "given", "arithmetic": replace(SUMS, format="direct"), "format_weight": 0.0}
    make(direct, updates=1).run()
    assert drawn == ["reward_accuracy", "response_length"]


def test_the_base_reads_what_base_says(make, monkeypatch):
    made = []
    monkeypatch.setattr(Pretrain, "run", lambda self: made.append(self))
    run = make(base=Base(thinking=0.4, random_answers=0.9, base_steps=7), seed=5)
    with pytest.raises(FileNotFoundError, match="no model in"):  # for the patched command writes none
        run.run()
    (base,) = made
    assert base.out == run.out / "base" and base.arithmetic == SUMS and base.seed == 5
    assert (base.thinking, base.random_answers, base.steps) == (0.4, 0.9, 7)
    assert (base.reviews, base.wrong, base.forgetful, base.wrong_thinking) == (0, 0, 0, 0)


def test_what_cannot_work_is_refused_before_a_base_is_made(make, no_pretraining, tmp_path):
    path = tmp_path / "mine.jsonl"
    write_jsonl(path, [{"prompt": f"{i}+1="} for i in range(4)])
    wrong = {
        "set --group-size to 2 or more": {"group_size": 1}, "--kl-coef puts into the rewards": {"kl_coef": 0.1},
        "a column gold": {"data": path},
    }  # fmt: skip
    for words, world in wrong.items():
        for start in ("base", "random"):
            with pytest.raises(ValueError, match=words):
                make(world, start=start).run()
    with pytest.raises(FileNotFoundError):
        make({"data": tmp_path / "missing"}).run()
    with pytest.raises(ValueError, match="--start random makes an untrained model"):
        make({"init": tmp_path}, start="random").run()
    assert not (tmp_path / "out").exists()


def test_own_sums(make, no_pretraining, tmp_path):
    path = tmp_path / "mine.jsonl"
    write_jsonl(path, [{"prompt": f"{i}+1=", "gold": i + 1} for i in range(9)])
    save_model(tmp_path / "given", GPT(GPTConfig(default_tokenizer().vocab_size, 48, 1, 2, 8)), default_tokenizer())
    run = make({"init": tmp_path / "given", "data": path}, updates=1)
    assert "eval_accuracy_sampled" in run.run()["after"]
