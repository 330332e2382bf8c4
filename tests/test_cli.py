"""The command line: help, settings, errors, interruptions, and the same numbers for the same seed."""

import csv
import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from minirl.__main__ import main
from minirl.algorithms.ppo import PPO
from minirl.checkpoint import load_checkpoint
from minirl.experiments.commands import GROUPS, all_commands, defaults_of, options, parse
from minirl.experiments.table import ALGORITHMS
from minirl.tracking import Tracker

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = [
    "tour", "pretrain", "sft", "reward-model", "dpo", "orpo", "q-sharp", "r1-zero", "reinforce", "trpo", "ppo",
    "ppo-kl", "grpo", "rejection-sampling", "compare", "report", "watch", "bench", "rlhf-2017",
    "posttraining", "generate",
]  # fmt: skip
TINY = "--held-out 8 --prompts-per-batch 4 --group-size 2 --updates 3 --quiet"
TINY_TEXT = f"--init {{model}} {TINY}"
SHORT = {"ppo": " --epochs 2 --minibatches 2", "ppo-kl": " --epochs 2 --minibatches 2", "trpo": " --critic-epochs 2"}
TINY_CONTROL = "--task CartPole-v1 --num-envs 2 --warmup-steps 8 --evaluate-episodes 1 --updates 3 --quiet"


def run(line, **paths):
    """main on a command line; {name} in it is replaced by a path."""
    return main([word.format(**paths) for word in shlex.split(line)])


@pytest.fixture(scope="module", autouse=True)
def few_samples():
    """Reward models are measured on 16 completions of a prompt instead of 64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("minirl.experiments.preferences.SAMPLES", 16)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run folder with a language model that has seen two batches."""
    folder = tmp_path_factory.mktemp("model")
    line = "pretrain --steps 2 --documents 64 --reviews 64 --n-layer 1 --n-embd 16 --held-out 8 --quiet --out {out}"
    assert run(line, out=folder) == 0
    return folder


def settings_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["settings"]


def rows_of(folder):
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [{name: cell for name, cell in row.items() if name != "seconds"} for row in csv.DictReader(file)]


def state_of(folder):
    """The checkpoint as text and bytes. (Its file may differ: safetensors writes the header's entries in any order.)"""
    with safe_open(folder / "checkpoint.safetensors", framework="pt") as file:
        return file.metadata()["state"], {name: file.get_tensor(name).numpy().tobytes() for name in file.keys()}


def one_line(capsys):
    """What was printed on standard error: one line, without a traceback."""
    text = capsys.readouterr().err
    assert text.startswith("minirl: ") and text.count("\n") == 1 and "Traceback" not in text, text
    return text


# Help


def test_the_overview_lists_every_command_once_in_its_group(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == text
    assert re.findall(r"^(\w+)$", text, flags=re.MULTILINE) == list(GROUPS)
    assert sorted(re.findall(r"^  ([a-z0-9-]+) ", text, flags=re.MULTILINE)) == sorted(all_commands())
    assert set(COMMANDS) <= set(all_commands())


def test_a_new_line_in_the_table_is_a_new_command(monkeypatch, capsys):
    monkeypatch.setitem(ALGORITHMS, "gspo", ALGORITHMS["grpo"])
    assert main([]) == 0 and "\n  gspo " in capsys.readouterr().out
    assert main(["gspo", "--help"]) == 0 and "runs/gspo" in capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_shows_each_option_once_and_without_prefix(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    shown = re.findall(r"^ +(--[a-z][\w.-]*)", text, flags=re.MULTILINE)
    assert sorted(shown) == sorted(options(defaults_of(name, [])[1]))
    assert len(set(shown)) == len(shown) and "." not in "".join(shown)
    if name != "report":  # it computes nothing
        assert {"--seeds" if name in ("compare", "rlhf-2017") else "--seed", "--device", "--out"} <= set(shown)
    assert text.isascii() or name in ("ppo-kl",)  # one summary holds a beta, which `say` replaces where it must


def test_the_task_selects_the_defaults_that_help_shows(capsys):
    assert run("ppo --help") == 0
    text = capsys.readouterr().out
    assert run("ppo --env-id Walker2d-v5 --help") == 0
    control = capsys.readouterr().out
    assert "--prompts-per-batch" in text and "--num-envs" not in text and "(default: runs/ppo)" in text
    assert "--num-envs" in control and "--prompts-per-batch" not in control and "runs/ppo-Walker2d-v5" in control
    assert "(default: runs/sft)" in text and "Run in the same environment whose policy" in control  # --init
    assert "GAE (PPO paper, table 3: 0.95). (default: 1.0)" in text
    assert "GAE (PPO paper, table 3: 0.95). (default: 0.95)" in control


def test_a_paragraph_of_help_fills_its_lines(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "90")
    assert run("sft --help") == 0
    about_threads = capsys.readouterr().out.partition("CPU threads")[2].partition("(default")[0]
    lines = [line.strip() for line in about_threads.splitlines()]
    following = [line.split()[0] for line in lines[1:]]
    assert len(lines) > 2 and about_threads.split()[-1] == "are."
    assert all(len(line) + len(word) + 1 > 60 for line, word in zip(lines[1:], following[1:], strict=False)), lines


# Settings


@pytest.mark.parametrize("name", list(ALGORITHMS))
@pytest.mark.parametrize("task", ["arithmetic", "reviews", "Walker2d-v5", "ALE/Pong-v5"])
def test_an_algorithm_takes_the_settings_of_its_line_in_the_table(name, task):
    entry, settings = ALGORITHMS[name], parse(name, ["--task", task])
    assert settings.task == task and settings.name == name
    if task == "arithmetic":
        assert (settings.algorithm, settings.world, settings.out) == (entry.text, entry.text_world, Path("runs", name))
    elif task == "reviews":
        assert (settings.algorithm, settings.world) == (entry.reviews, entry.reviews_world)
        assert settings.out == Path("runs", f"{name}-reviews")
    else:
        assert (settings.algorithm, settings.world) == (entry.control, entry.control_world)
        assert settings.out == Path("runs", f"{name}-{task.replace('/', '-')}")


def test_what_is_given_is_set_wherever_it_belongs_and_the_rest_stays():
    line = "--task=CartPole-v1 --lr 0.5 --hidden 8 8 8 --env-steps 100 --seed 7 --value-clip 0.3 --out here"
    settings, before = parse("ppo", line.split()), defaults_of("ppo", ["--task", "CartPole-v1"])[1]
    assert settings.algorithm == dataclasses.replace(before.algorithm, lr=0.5, value_clip=0.3)
    assert settings.world == dataclasses.replace(before.world, hidden=(8, 8, 8))
    assert settings.training == dataclasses.replace(before.training, env_steps=100, seed=7, out=Path("here"))


def test_names_from_other_libraries_mean_ours():
    line = "--env_id CartPole-v1 --total-timesteps 64 --output_dir there"
    assert parse("ppo", line.split()) == parse("ppo", "--task CartPole-v1 --env-steps 64 --out there".split())
    assert parse("sft", ["--model_name_or_path=a"]) == parse("sft", ["--init", "a"])
    assert parse("compare", "--env-id A --total_timesteps 9 --seed 3".split()) == parse(
        "compare", "--env A --env-steps 9 --seeds 3".split()
    )


def switches(settings):
    """(option, path of attributes) of every boolean."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            yield from ((option, [field.name, *path]) for option, path in switches(value))
        elif isinstance(value, bool):
            yield "--" + field.name.replace("_", "-"), [field.name]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("task", [[], ["--task", "CartPole-v1"]], ids=["text", "control"])
def test_every_switch_can_be_turned_off_and_on(name, task):
    if task and name not in ALGORITHMS:
        return
    for option, path in switches(defaults_of(name, task)[1]):
        off = option.replace("--", "--no-")
        for spelled, right in ((option, True), (off, False), ("--" + off[2:].replace("-", "_"), False)):
            value = parse(name, [*task, spelled])
            for part in path:
                value = getattr(value, part)
            assert value is right, (spelled, value)


@pytest.mark.parametrize("words", ["--lr-decay False", "--lr-decay=False", "--lr-decay false", "--no-quiet 0"])
def test_a_value_after_a_switch_is_refused_and_not_swallowed(words):
    with pytest.raises(ValueError, match="a switch takes no value: --name turns it on, --no-name off"):
        parse("ppo", words.split())


def test_config_json_holds_what_was_resolved(model, tmp_path):
    out = tmp_path / "text"
    assert run(f"ppo --init {{model}} --no-lr-decay --lr 0.25 --seed 5 --threads 1 {TINY} --out {{out}}",
               model=model, out=out) == 0  # fmt: skip
    given = parse("ppo", f"--init {model} --no-lr-decay --lr 0.25 --seed 5 {TINY} --out {out}".split())
    found = settings_of(out)
    assert found["config"] == dataclasses.asdict(given.algorithm)
    assert found["config"]["lr_decay"] is False and found["config"]["lr"] == 0.25
    assert found["world"] == json.loads(json.dumps(dataclasses.asdict(given.world), default=str))
    training = dataclasses.asdict(given.training) | {"device": "cuda" if torch.cuda.is_available() else "cpu"}
    assert found["run"] == json.loads(json.dumps(training, default=str))
    assert (found["algorithm"], found["task"], found["run"]["threads"]) == ("ppo", "arithmetic", 1)


def test_lengths_left_open_and_newest_versions_are_resolved_in_config_json(tmp_path):
    line = "ppo --task CartPole --env-steps 30 --num-envs 2 --steps 8 --warmup-steps 0 --evaluate-episodes 1 --quiet"
    assert run(line + " --no-normalize-observations --out {out}", out=tmp_path) == 0
    found = settings_of(tmp_path)
    assert found["run"]["updates"] == 2  # 30 steps in batches of 16
    assert found["task"] == "CartPole-v1" and found["world"]["normalize_observations"] is False


# Bad input

WRONG = {  # command line -> words of the message
    "ppo --lrr 3": "no option --lrr with --task arithmetic; did you mean --lr?",
    "ppo --gea-lambda 1": "did you mean --gae-lambda?",
    "ppo --no-lr-decey": "did you mean --no-lr-decay?",
    "ppo --hidden 8": "no option --hidden with --task arithmetic",
    "ppo --lr -1": "--lr is -1.0; it must be a number >= 0",
    "ppo --lr=nan": "--lr is nan; it must be a number >= 0",
    "ppo --lr abc": "--lr: 'abc' is not a number",
    "ppo --lr": "Missing value for argument '--lr'",
    "ppo --task": "Missing value for argument '--task'",
    "ppo --updates 0": "--updates is 0; it must be a whole number >= 1",
    "ppo --updates 1.5": "--updates: '1.5' does not fit",
    "ppo --updates none": "--updates: 'none' does not fit",
    "ppo --seed abc": "--seed: 'abc' is not a whole number",
    "ppo --seed -1": "--seed is -1; it must be a whole number >= 0 and <= 999999999",
    "ppo --threads 0": "--threads is 0; it must be a whole number >= 1",
    "ppo --format words": "'words'",
    "ppo 3": "'3' belongs to no option",
    "ppo --env-steps 100": "--env-steps needs an environment",
    "ppo --task CartPole-v1 --env-steps 100 --updates 1": "--updates or --env-steps, not both",
    "ppo --task CartPole-v1 --hidden 8 x": "--hidden: '8', 'x' does not fit",
    "ppo --task CartPole-v1 --hidden 8 0": "--hidden is 0; it must be a whole number >= 1",
    "ppo --task CartPole-v1 --num-envs 0": "--num-envs is 0",
    "ppo --task CartPol-v1": "CartPol",
    "ppo --task arithmetics": "no task 'arithmetics'; did you mean arithmetic?",
    "ppo --task Blackjack-v1": "Blackjack-v1 observes",
    "ppo --task CartPole-v1 --group-size 2": "group_size=2 needs whole_episodes",
    "ppo --task reveiws": "no task 'reveiws'; did you mean reviews?",
    "ppo --task reviews --init {model}": "make one with python -m minirl reward-model",
    "ppo --init {model} --data {missing}": "missing",
    "q-sharp --kl-coef 0.1": "kl_coef has no meaning here: eta weighs the KL",
    "r1-zero --start random --init {model}": "--start random makes an untrained model",
    "dpo --micro-batches 3": "micro_batches is 3; it must divide batch_size",
    "dpo --samples-from {missing} --init {model}": "make one with python -m minirl pretrain",
    "reward-model --pairs 0": "--pairs is 0",
    "reward-model --init {model} --data {missing}": "missing",
    "reward-model --micro-batches 0": "--micro-batches is 0",
    "reward-model --annotator-strength -1": "--annotator-strength is -1.0",
    "dpo --dpo-beta 0": "--dpo-beta is 0.0; it must be a number > 0",
    "dpo --beta 0.1": "did you mean --dpo-beta?",
    "dpo --init {model} --samples-from {model} --task sums": "--task",
    "dpo --init {missing}": "make one with python -m minirl pretrain",
    "orpo --orpo-lambda -1": "--orpo-lambda is -1.0",
    "orpo --init {model} --data {missing}": "missing",
    "rejection-sampling --init {model} --group-size 1": "set --group-size to 2 or more",
    "rejection-sampling --keep 0": "--keep is 0",
    "q-sharp --bins 1": "--bins is 1; it must be a whole number >= 2",
    "q-sharp --eta 0": "--eta is 0.0",
    "q-sharp --init {model} --reward rules --max-new-tokens 60": "has room for",
    "q-sharp --init {model} --reward-model {missing}": "make one with python -m minirl reward-model",
    "r1-zero --start nowhere": "--start",
    "r1-zero --group-size 1": "set --group-size to 2 or more",
    "r1-zero --data {missing}": "missing",
    "r1-zero --init {missing}": "make one with python -m minirl pretrain",
    "r1-zero --device cuda": "device 'cuda' is not available here",
    "posttraining --device cuda": "device 'cuda' is not available here",
    "posttraining --workers -1": "--workers is -1",
    "posttraining --rejudge": "no story to judge again",
    "posttraining --fast": "no option --fast",
    "sft --task reveiws": "'reveiws'",
    "sft --init {model} --data {missing}": "missing",
    "ppo --init {missing}": "make one with python -m minirl pretrain",
    "ppo --device cuda --init {model}": "device 'cuda' is not available here; use --device cpu, or auto",
    "ppo --device tpu3 --init {model}": "device 'tpu3' is not available here; use --device cpu, or auto",
    "grpo --init {model} --group-size 1": "set --group-size to 2 or more",
    "grpo --init {model} --kl-coef 0.1": "without the KL that --kl-coef puts into the rewards",
    "reinforce --init {model} --group-size 1": "set --group-size to 2 or more",
    "trpo --init {model} --delta 0": "--delta is 0.0; it must be a number > 0",
    "sft --init {missing}": "make one with python -m minirl pretrain",
    "sft --steps 0": "--steps is 0",
    "pretrain --device cuda": "device 'cuda' is not available here",
    "pretrain --n-embd 10": "n_embd is 10, not a multiple of n_head, which is 4",
    "pretrain --held-out 100000": "held_out is 100000",
    "generate --init {missing}": "make one with python -m minirl pretrain",
    "generate --init {model} --top-p 2": "--top-p is 2.0; it must be a number > 0 and <= 1",
    "compare --env Nowhere-v1": "Nowhere",
    "compare --algorithms ppo sac": "--algorithms",
    "compare --env-steps 0": "--env-steps is 0",
    "compare --device cuda": "device 'cuda' is not available here",
    "tour --device cuda": "device 'cuda' is not available here",
    "tour --env Nowhere-v1": "Nowhere",
    "tour --workers -1": "--workers is -1",
}


@pytest.mark.parametrize("line", WRONG)
def test_bad_input_is_one_readable_line_exit_code_2_and_nothing_written(line, model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)  # where a run without --out would write
    out = tmp_path / "out"
    assert run(line + ("" if line.endswith(("--task", "--lr")) else " --out {out}"),
               out=out, model=model, missing=tmp_path / "missing") == 2  # fmt: skip
    assert WRONG[line] in one_line(capsys)
    assert not list(tmp_path.iterdir())


def test_unknown_commands_get_the_closest_one(capsys):
    assert main(["pppo"]) == 2
    assert "no command 'pppo'; did you mean ppo?" in one_line(capsys)
    assert main(["--seed", "3", "ppo"]) == 2
    assert "no command '--seed'" in one_line(capsys)


def test_a_folder_that_cannot_be_written_is_named(model, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    assert run(f"ppo --init {{model}} {TINY} --out {{out}}", model=model, out=tmp_path / "file" / "run") == 2
    assert str(tmp_path / "file") in one_line(capsys)


def test_a_prompt_that_does_not_fit_is_named(model, capsys):
    assert run(f"generate --init {{model}} --prompts {'1+' * 80}", model=model) == 2
    assert f"prompt '{'1+' * 18}1...' has 160 tokens; the model takes 1 to 95" in one_line(capsys)


def test_the_traceback_is_there_for_who_asks(model, monkeypatch):
    monkeypatch.setenv("MINIRL_DEBUG", "1")
    with pytest.raises(ValueError, match="--group-size"):
        run("grpo --group-size 1 --init {model}", model=model)


# Runs


@pytest.mark.parametrize("task", [TINY_TEXT, TINY_CONTROL], ids=["text", "control"])
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_one_seed_gives_one_result_and_another_seed_another(name, task, model, tmp_path):
    """Metric rows but for the wall clock, and all parameters to the bit."""
    if task is TINY_CONTROL:
        task += " --group-size 2" if ALGORITHMS[name].control_world.whole_episodes else " --steps 16" + SHORT[name]
    for out, seed in (("a", 3), ("b", 3), ("c", 4)):
        line = f"{name} {task} --seed {seed} --evaluate-every 2 --out {{out}}"
        assert run(line, model=model, out=tmp_path / out) == 0
    a, b, c = (rows_of(tmp_path / out) for out in "abc")
    assert a == b and [row["step"] for row in a] == ["0", "1", "2", "3"]
    assert a[1] != c[1]
    assert state_of(tmp_path / "a") == state_of(tmp_path / "b") != state_of(tmp_path / "c")


def test_a_run_ends_with_what_changed_where_it_is_and_what_to_try_next(model, tmp_path, capsys):
    line = "sft --init {model} --steps 2 --held-out 8 --stop-at 2 --quiet --out {out}"
    assert run(line, model=model, out=tmp_path) == 0
    text = capsys.readouterr().out
    assert re.search(r"before +after\neval_accuracy_greedy +[\d.]+ +[\d.]+\n", text)
    assert re.search(r"\d seconds; everything is in " + re.escape(str(tmp_path)), text)
    assert text.endswith(f"next: python -m minirl ppo --init {tmp_path}\n")
    assert {"model", "metrics.csv", "config.json", "samples.json"} <= {path.name for path in tmp_path.iterdir()}


def test_generate_prints_completions_and_writes_them(model, tmp_path, capsys):
    line = "generate --init {model} --prompts 1+2= 3+4= --samples 2 --seed 1 --out {out}"
    assert run(line, model=model, out=tmp_path) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))["generated"]
    assert [sample["prompt"] for sample in found] == ["1+2=", "1+2=", "3+4=", "3+4="]
    assert run(line, model=model, out=tmp_path) == 0
    assert capsys.readouterr().out == printed


def test_a_comparison_in_which_runs_failed_exits_with_1(monkeypatch):
    monkeypatch.setattr("minirl.experiments.compare.Compare.run", lambda self: ([], {"ppo seed 1": "OSError: full"}))
    assert main(["compare"]) == 1
    monkeypatch.setattr("minirl.experiments.compare.Compare.run", lambda self: ([], {}))
    assert main(["compare"]) == 0


def test_a_diverged_run_stops_with_code_1_and_saves_the_last_good_state(model, tmp_path, capsys, monkeypatch):
    update, calls = PPO.update, []

    def broken(self, batch, progress=0.0):
        calls.append(batch)
        stats = update(self, batch, progress)
        return stats if len(calls) < 3 else stats | {"value_loss": torch.tensor(float("nan"))}

    monkeypatch.setattr(PPO, "update", broken)
    assert run(f"ppo --init {{model}} {TINY} --out {{out}}", model=model, out=tmp_path) == 1
    text = one_line(capsys)
    assert "step 3: value_loss is nan" in text and "lower its learning rate" in text and str(tmp_path) in text
    assert load_checkpoint(tmp_path)["update"] == 2


def press_at(monkeypatch, steps):
    """Press Ctrl-C whenever one of these steps is logged."""
    log = Tracker.log

    def press(self, step, *args, **more):
        row = log(self, step, *args, **more)
        if step in steps:
            signal.raise_signal(signal.SIGINT)
        return row

    monkeypatch.setattr(Tracker, "log", press)


@pytest.mark.parametrize("task", [TINY_TEXT, f"{TINY_CONTROL} --steps 16 {SHORT['ppo']}"], ids=["text", "control"])
def test_an_interrupted_run_goes_on_where_it_was_as_if_nothing_had_been(task, model, tmp_path, capsys, monkeypatch):
    line, paths = f"ppo {task} --out {{out}}", {"model": model, "out": tmp_path / "interrupted run"}
    with monkeypatch.context() as patch:
        press_at(patch, [2])
        handler = signal.getsignal(signal.SIGINT)
        assert run(line.replace("{out}", "'{out}'"), **paths) == 130
        assert signal.getsignal(signal.SIGINT) is handler
    text = one_line(capsys)
    assert load_checkpoint(paths["out"])["update"] == 2 and len(rows_of(paths["out"])) == 3
    told = shlex.split(text.split("Go on with: python -m minirl ")[1])
    assert told[-1] == "--resume" and main(told) == 0
    whole = tmp_path / "whole"
    assert run(line, model=model, out=whole) == 0
    assert rows_of(paths["out"]) == rows_of(whole)
    assert state_of(paths["out"]) == state_of(whole)


def test_an_interrupted_pretraining_keeps_its_model(tmp_path, capsys, monkeypatch):
    press_at(monkeypatch, [1])
    line = "pretrain --documents 64 --reviews 64 --n-layer 1 --n-embd 16 --held-out 8 --quiet --out {out}"
    assert run(line, out=tmp_path) == 130
    assert one_line(capsys) == f"minirl: interrupted; what was done so far is in {tmp_path}\n"
    assert (tmp_path / "model" / "model.safetensors").is_file() and len(rows_of(tmp_path)) == 2


def test_pressing_twice_stops_at_once_and_leaves_no_checkpoint_of_an_earlier_run(model, tmp_path, capsys, monkeypatch):
    line = f"ppo --init {{model}} {TINY} --out {{out}}"
    assert run(line, model=model, out=tmp_path) == 0
    assert (tmp_path / "checkpoint.safetensors").is_file()
    reached = []

    def press_twice(*_batch, **_progress):
        for _ in range(2):
            reached.append(signal.raise_signal(signal.SIGINT))

    monkeypatch.setattr(PPO, "update", press_twice)
    assert run(line, model=model, out=tmp_path) == 130 and len(reached) == 1
    assert not (tmp_path / "checkpoint.safetensors").exists() and len(rows_of(tmp_path)) == 1
    one_line(capsys)


def test_resume_refuses_a_run_of_another_kind_or_size(model, tmp_path, capsys):
    assert run(f"ppo {TINY_CONTROL} --steps 16 {SHORT['ppo']} --out {{out}}", out=tmp_path) == 0
    capsys.readouterr()
    assert run(f"trpo {TINY_CONTROL} --steps 16 --resume --out {{out}}", out=tmp_path) == 2
    assert "holds a run of ppo CartPole-v1" in one_line(capsys)
    assert run(f"ppo {TINY_CONTROL} --steps 16 {SHORT['ppo']} --hidden 8 --resume --out {{out}}", out=tmp_path) == 2
    assert "had other settings: hidden [64, 64]; give these" in one_line(capsys)


def test_resume_refuses_other_settings_and_names_what_to_give(model, tmp_path, capsys, monkeypatch):
    """Of the algorithm, the world, a group within it, and the seed; before the model to start from is looked for."""
    out = tmp_path / "run"
    line = f"ppo --init {{model}} {TINY} --seed 3 --out {{out}}"
    assert run(line, model=model, out=out) == 0
    before = (out / "config.json").read_bytes(), state_of(out)
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)  # where there is no runs/sft
    others = TINY.replace("--held-out 8", "--held-out 9").replace("--group-size 2", "--group-size 4")
    assert run(f"ppo {others} --clip 0.1 --no-lr-decay --updates 8 --resume --out {{out}}", out=out) == 2
    named = f"clip 0.2, lr_decay True, init {model}, group_size 2, held_out 8, seed 3; give these, or another --out"
    assert f"the run in {out} had other settings: {named}" in one_line(capsys)
    assert ((out / "config.json").read_bytes(), state_of(out)) == before
    free = "--evaluate-every 1 --save-every 1 --device cpu --resume"
    assert run(f"{line} {free}", model=model, out=out) == 0


def test_a_resumed_run_may_become_longer_and_begins_where_it_began(model, tmp_path, capsys):
    line = f"ppo --init {{model}} {TINY.replace('--quiet', '')} --out {{out}}"
    assert run(line, model=model, out=tmp_path) == 0
    first = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    table = capsys.readouterr().out
    assert run(f"{line} --updates 5 --resume", model=model, out=tmp_path) == 0
    text = capsys.readouterr().out
    assert "was to have 3 updates and now has 5; from here on its step sizes fall as in a run of 5" in text
    begun, resumed = (re.findall(r"^(eval_\w+ +\S+) +\S+$", printed, re.MULTILINE) for printed in (table, text))
    assert begun == resumed and len(begun) >= 5
    again = json.loads((tmp_path / "samples.json").read_text(encoding="utf-8"))
    assert list(again) == ["before", "after"] and again["before"] == first["before"]
    assert [row["step"] for row in rows_of(tmp_path)] == list("012345")


# Preferences, own data, guides

FEW = "--pairs 24 --held-out-pairs 30 --batch-size 8 --steps 3 --evaluate-every 0"
PAIRS = FEW + " --samples-from {model} --init {model}"


@pytest.fixture(scope="module")
def scored(model, tmp_path_factory):
    """A run folder with a reward model, whose trunk is that model."""
    folder = tmp_path_factory.mktemp("scored")
    assert run(f"reward-model {PAIRS} --quiet --out {{out}}", model=model, out=folder) == 0
    return folder


def lines_file(folder, *rows):
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("line", [
    f"reward-model {PAIRS}", f"dpo {PAIRS}", f"orpo {PAIRS}",
    "q-sharp --init {model} --reward-model {scored} --prompts-per-batch 8 --rollouts 16 --steps 2 --batch-size 4 "
    "--evaluate-prompts 4 --bins 5 --reward learned",
    "ppo --task reviews --init {model} --reward-model {scored} --prompts-per-batch 8 --updates 2 --evaluate-prompts 4",
    "trpo --task reviews --init {model} --reward rules --prompts-per-batch 8 --updates 1 --evaluate-prompts 4",
    "r1-zero --start random --held-out 4 --group-size 2 --prompts-per-batch 4 --updates 2 --evaluate-every 1",
])  # fmt: skip
def test_new_commands_run_and_one_seed_gives_one_result(line, model, scored, tmp_path):
    for out in "ab":
        assert run(f"{line} --seed 3 --quiet --out {{out}}", model=model, scored=scored, out=tmp_path / out) == 0
    a, b = rows_of(tmp_path / "a"), rows_of(tmp_path / "b")
    assert a == b and len(a) > 1 and (tmp_path / "a" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reward-model", "dpo"])
def test_micro_batches_change_nothing_but_memory(name, model, tmp_path):
    for count in (1, 4):
        line = f"{name} {PAIRS} --micro-batches {count} --quiet --out {{out}}"
        assert run(line, model=model, out=tmp_path / str(count)) == 0
    one, four = (rows_of(tmp_path / count) for count in ("1", "4"))
    for first, second in zip(one[1:], four[1:], strict=True):
        assert abs(float(first["loss"]) - float(second["loss"])) < 1e-5 and first["count"] == second["count"] == "8"


def test_own_data_for_every_command_that_trains(model, scored, tmp_path, capsys):
    texts = lines_file(tmp_path, *({"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(12)),
                       {"prompt": "9+9=", "completion": "1" * 200})  # fmt: skip
    line = "{name} --data {data} --steps 2 --evaluate-every 0 --quiet --out {out}"
    assert run(line + " --init {model}", name="sft", data=texts, model=model, out=tmp_path / "sft") == 0
    assert run(line + " --n-layer 1 --n-embd 16", name="pretrain", data=texts, out=tmp_path / "pretrain") == 0
    # On which side of the split the long row fell is the same in both.
    assert capsys.readouterr().out.count("1 of 11 rows is longer than 96 tokens and was left out\n") in (0, 2)
    assert float(rows_of(tmp_path / "sft")[-1]["eval_match_greedy"]) >= 0

    pairs = lines_file(tmp_path, *({"prompt": f"{a}+1=", "chosen": str(a + 1), "rejected": "x"} for a in range(12)))
    for name in ("reward-model", "dpo", "orpo"):
        out = tmp_path / name
        assert run(line + " --init {model}", name=name, data=pairs, model=model, out=out) == 0
        assert len((out / "preferences.jsonl").read_text(encoding="utf-8").splitlines()) == 11

    asked = lines_file(tmp_path, *({"prompt": f"{a}+1=", "gold": a + 1} for a in range(12)))
    line = f"grpo --init {{model}} --data {{data}} {TINY.replace('--held-out 8', '')} --max-new-tokens 4 --out {{out}}"
    assert run(line, model=model, data=asked, out=tmp_path / "grpo") == 0
    assert "eval_accuracy_greedy" in rows_of(tmp_path / "grpo")[0]


def test_rows_that_are_too_long_are_counted_and_a_broken_line_is_named(model, tmp_path, capsys):
    rows = [{"prompt": f"{a}+1=", "completion": str(a + 1)} for a in range(30)]
    data = lines_file(tmp_path, *rows, *({"prompt": f"{a}+1=", "completion": "1" * 200} for a in range(3)))
    line = "sft --init {model} --data {data} --steps 1 --evaluate-every 0 --quiet --out {out}"
    assert run(line, model=model, data=data, out=tmp_path / "a") == 0
    assert re.search(r"[1-3] of \d+ rows? (is|are) longer than 96 tokens", capsys.readouterr().out)
    data.write_text('{"prompt": "1+1=", "completion": "2"}\n{"prompt": \n', encoding="utf-8")
    assert run(line, model=model, data=data, out=tmp_path / "b") == 2
    text = one_line(capsys)
    assert f"{data}, line 2: not JSON" in text and not (tmp_path / "b").exists()


@pytest.mark.parametrize("command", ["reward-model", "dpo", "orpo"])
def test_preferences_that_are_too_long_are_counted_and_a_broken_line_is_named(command, model, tmp_path, capsys):
    rows = [{"prompt": f"{i % 4}+1=", "chosen": "2", "rejected": "1" * (200 if i % 2 else 3)} for i in range(20)]
    data = lines_file(tmp_path, *rows)
    line = f"{command} --init {{model}} --data {{data}} --steps 1 --evaluate-every 0 --quiet --out {{out}}"
    # A tenth of the prompts, one of 0+1=, 1+1=, 2+1= and 3+1=, is kept: if the even ones' side of it has no row that
    # fits, that is an error, so every prompt has a short row, too.
    data.write_text(data.read_text(encoding="utf-8") + "".join(
        json.dumps({"prompt": f"{i}+1=", "chosen": "2", "rejected": "3"}) + "\n" for i in range(4)), encoding="utf-8")
    assert run(line, model=model, data=data, out=tmp_path / "a") == 0
    counts = re.findall(r"(\d+) of (\d+) rows are longer than 96 tokens and were left out\n", capsys.readouterr().out)
    assert sum(int(left_out) for left_out, _ in counts) == 10
    for broken in ('{"prompt": "1+1=", "chosen": "2"}', '{"prompt": "1+1=", "chosen": "2", "rejected": "3"'):
        data.write_text(json.dumps(rows[0]) + "\n\n" + broken + "\n", encoding="utf-8")
        assert run(line, model=model, data=data, out=tmp_path / "b") == 2
        assert f"{data}, line 3: " in one_line(capsys) and not (tmp_path / "b").exists()


OWN_PROMPTS = {  # command that learns from prompts -> more of its options; `mine` has a column gold, `plain` has none
    "ppo": "--data {mine} --epochs 1", "rejection-sampling": "--data {mine} --group-size 2 --min-score -1",
    "r1-zero": "--data {mine} --group-size 2 --evaluate-every 1", "q-sharp": "--data {plain} --reward-model {scored} "
    "--rollouts 8 --steps 1 --batch-size 4 --evaluate-prompts 2 --bins 5",
    "reinforce": "--task reviews --data {plain} --reward-model {scored} --group-size 2 --evaluate-prompts 2",
}  # fmt: skip


@pytest.mark.parametrize("command", OWN_PROMPTS)
def test_own_prompts_for_every_command_that_acts(command, model, scored, tmp_path, capsys):
    paths = {"model": model, "scored": scored, "mine": tmp_path / "mine.jsonl", "plain": tmp_path / "plain.jsonl"}
    rows = [{"prompt": f"{a}+1=", "gold": a + 1} for a in range(12)]
    paths["mine"].write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    paths["plain"].write_text("".join(json.dumps({"prompt": row["prompt"]}) + "\n" for row in rows), encoding="utf-8")
    line = f"{command} --init {{model}} --prompts-per-batch 4 --max-new-tokens 6 --quiet --out {{out}} "
    line += OWN_PROMPTS[command] + ("" if command == "q-sharp" else " --updates 1")
    assert run(line, out=tmp_path / "a", **paths) == 0
    measured = "eval_accuracy_sampled" if "{mine}" in line else "eval_score_sampled"
    assert measured in rows_of(tmp_path / "a")[-1]
    capsys.readouterr()
    used = paths["mine" if "{mine}" in line else "plain"]
    used.write_text(used.read_text(encoding="utf-8") + '{"prompt": 3}\n', encoding="utf-8")
    assert run(line, out=tmp_path / "b", **paths) == 2
    assert f"{used}, line 13: prompt is 3; it must be text" in one_line(capsys)
    used.write_text("".join(json.dumps({**row, "prompt": "1+" * 60}) + "\n" for row in rows[:1]) + "".join(
        json.dumps(row if used == paths["mine"] else {"gold": 1, **row}) + "\n" for row in rows), encoding="utf-8")
    assert run(line, out=tmp_path / "b", **paths) == 2
    assert f"{used}: a prompt has 120 tokens; the model takes at most 95" in one_line(capsys)
    assert not (tmp_path / "b").exists()


def test_next_commands_can_be_typed(model, tmp_path, capsys):
    """From fine-tuning on reviews over a reward model to PPO, by what each run tells to type next."""
    line = "sft --task reviews --init {model} --steps 1 --demonstrations 16 --evaluate-every 0 --quiet --out {out}"
    assert run(line, model=model, out=tmp_path / "sft") == 0
    told = capsys.readouterr().out.split("next: python -m minirl ")[1]
    assert told == f"reward-model --init {tmp_path / 'sft'} --samples-from {tmp_path / 'sft'}\n"
    assert run(f"{told} {FEW} --quiet --out {{out}}", out=tmp_path / "rm") == 0
    told = capsys.readouterr().out.split("next: python -m minirl ")[1]
    assert told == f"ppo --task reviews --init {tmp_path / 'sft'} --reward-model {tmp_path / 'rm'}\n"
    more = " --prompts-per-batch 4 --updates 1 --evaluate-prompts 2 --quiet --out {out}"
    assert run(told + more, out=tmp_path / "ppo") == 0
    told = capsys.readouterr().out.split("next: python -m minirl ")[1]
    assert told == f"generate --init {tmp_path / 'ppo'}\n" and run(f"{told} --prompts 1+2=") == 0


# Consoles

SCRIPT = """
import sys
from minirl.__main__ import main
model, out = sys.argv[1:]
codes = [main(["--help"]), main(["ppo-kl", "--help"]), main(["ppo", "--lr", "-1"]), main(["gr\\u00f6po"])]
print("heavy", [name for name in ("gymnasium", "mujoco", "matplotlib", "tensorboard") if name in sys.modules])
codes += [main(f"ppo --init {model} --held-out 8 --prompts-per-batch 4 --updates 2 --out {out}".split())]
codes += [main(f"orpo --init {model} --samples-from {model} --pairs 8 --held-out-pairs 15 --batch-size 4 --steps 1 "
               f"--evaluate-every 0 --out {out}/orpo".split())]
codes += [main(["dpo", "--data", f"{out}/missing \\u2264.jsonl", "--init", model])]
codes += [main(["generate", "--init", model, "--prompts", "1+2=", "\\u00e9\\u2192\\u2264"])]
print("codes", codes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["cp1252", "ascii"])
def test_everything_prints_on_poor_consoles_and_light_commands_stay_light(encoding, model, tmp_path):
    """cp1252 as on Windows; LC_ALL=C with a strict ASCII console. Piped: no escape codes, no boxes."""
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(ROOT), "PYTHONUTF8": "0"}
    if encoding == "ascii":
        environment |= {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(model), str(tmp_path)], capture_output=True, env=environment, check=False
    )
    out, err = done.stdout.decode(encoding), done.stderr.decode(encoding)
    assert done.returncode == 0, err
    assert "codes [0, 0, 2, 2, 0, 0, 2, 0]" in out and "heavy []" in out
    assert "Traceback" not in err and "\x1b" not in out + err
    assert not re.search("[\u2500-\u259f]", out + err)
    assert "where beta takes" in " ".join(out.split()) and "100%" in err
