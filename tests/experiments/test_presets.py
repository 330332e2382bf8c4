"""Presets, and settings changed by words."""

import ast
import importlib.util
import statistics
from pathlib import Path

import pytest

from minirl.experiments.compare import Compare
from minirl.experiments.presets import PRESETS, apply_changes, entry_of

ENTRIES = {name: entry_of(name) for name in ("ppo", "trpo")}
DATA = Path(__file__).resolve().parents[2] / "data"


def test_a_word_changes_one_algorithm_or_all_that_have_the_setting():
    changed = apply_changes(ENTRIES, ["ppo.clip=0.1", "num-envs=8", "lr=1e-3", "trpo.delta_decay=true"])
    assert changed["ppo"][0].clip == 0.1 and changed["ppo"][0].lr == 1e-3 and changed["trpo"][0].delta_decay is True
    assert changed["ppo"][1].num_envs == changed["trpo"][1].num_envs == 8
    assert ENTRIES["ppo"][0].clip == 0.2  # untouched
    assert apply_changes(ENTRIES, ["hidden=32 32"])["trpo"][1].hidden == (32, 32)
    assert apply_changes(ENTRIES, ["ppo.target_kl=none"])["ppo"][0].target_kl is None
    assert apply_changes(ENTRIES, []) == ENTRIES


@pytest.mark.parametrize("word, named", [
    ("clip", "write ALGORITHM.SETTING=VALUE"), ("sac.lr=1", "of ppo, trpo"), ("ppo.delta=1", "no setting delta in ppo"),
    ("colour=1", "no setting colour in ppo or trpo"), ("ppo.clip=", "gives no value"), ("ppo.clip=-1", "clip is -1"),
    ("ppo.clp=1", "no setting clp in ppo; did you mean clip?"),
    ("ppo.epochs=2.5", "epochs is 2.5"), ("ppo.lr=fast", "lr is 'fast'"),
])  # fmt: skip
def test_what_cannot_be_meant_is_one_line(word, named):
    with pytest.raises(ValueError, match=named) as caught:
        apply_changes(ENTRIES, [word])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("second", ["ppo.clip=0.3", "clip=0.3"])
def test_a_setting_has_one_value(second):
    with pytest.raises(ValueError, match="clip of ppo is set twice"):
        apply_changes(ENTRIES, ["ppo.clip=0.1", second])


def test_a_run_is_named_after_its_own_changes():
    jobs = Compare(env="Pendulum-v1", seeds="1", set=("ppo.clip=0.1", "num-envs=8", "epochs=3")).jobs()
    assert {job.algorithm: job.variant for job in jobs} == {"ppo": "ppo.clip=0.1 num-envs=8 epochs=3",
                                                            "trpo": "num-envs=8"}


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_compares_like_with_like(name):
    jobs = Compare(preset=name, seeds="3").jobs()
    assert [job.algorithm for job in jobs] == ["trpo", "ppo"]
    assert {job.env_id for job in jobs} == {PRESETS[name].env} and {job.settings.seed for job in jobs} == {3}
    assert len({job.size for job in jobs}) == 1 and jobs[0].size >= PRESETS[name].env_steps
    for setting in ("gamma", "gae_lambda", "whiten"):  # the same advantage estimator
        assert len({getattr(job.config, setting) for job in jobs}) == 1
    assert len({job.world for job in jobs}) == 1  # networks, normalisation, batches


def test_cleanrls_numbers():
    config, world = PRESETS["cleanrl-50k"].algorithms["ppo"]
    assert (config.lr, config.clip, config.value_clip, config.epochs, config.minibatches) == (3e-4, 0.2, 0.2, 10, 32)
    assert (config.gamma, config.gae_lambda, config.max_grad_norm, config.lr_decay) == (0.99, 0.95, 0.5, True)
    assert (world.num_envs, world.steps, world.hidden) == (1, 2048, (64, 64))
    (job,) = Compare(preset="cleanrl-50k", algorithms=("ppo",), seeds="1").jobs()
    assert job.size == 25 * 2048  # 50,000 rounded up to whole batches


def test_what_is_given_wins_over_the_preset():
    jobs = Compare(preset="mujoco-1m", env="Pendulum-v1", env_steps=5_000, eval_every=0, set=("ppo.clip=0.3",)).jobs()
    assert {job.env_id for job in jobs} == {"Pendulum-v1"} and jobs[0].size == 5120
    assert jobs[0].settings.eval_every is None
    assert {job.config.clip for job in jobs if job.algorithm == "ppo"} == {0.3} and jobs[1].variant == "ppo.clip=0.3"
    assert jobs[0].variant == ""


def test_the_dry_run_trains_nothing_and_says_how_long(tmp_path, capsys):
    settings = Compare(env="CartPole-v1", env_steps=2_000, seeds="1-2", workers=1, dry_run=True, out=tmp_path / "none",
                       set=("steps=100", "ppo.epochs=1", "critic_epochs=1"))  # fmt: skip
    assert settings.run() == ([], {}) and not (tmp_path / "none").exists()
    printed = capsys.readouterr().out
    assert "4 runs of 2,000 steps on CartPole-v1, 1 side by side: about" in printed and "trpo seed 2" in printed


def test_whole_episodes_end_by_steps(tmp_path):
    settings = Compare(algorithms=("reinforce", "grpo"), env="CartPole-v1", env_steps=1_500, seeds="1", eval_every=500,
                       eval_episodes=2, out=tmp_path, quiet=True)  # fmt: skip
    for job in settings.jobs():
        taken = []
        job.run(taken.append)
        assert sum(taken) == job.size == 1_500 and job.summary.is_file()
        rows = (job.settings.out / "updates.csv").read_text(encoding="utf-8").splitlines()
        last = int(rows[-1].split(",")[0])
        assert 1_500 <= last < 1_500 + 16 * 500  # ends with the batch of episodes that passes the limit
        assert int(rows[-2].split(",")[0]) < 1_500


def test_a_million_steps_use_the_best_settings_that_both_share():
    specification = importlib.util.spec_from_file_location("tune", DATA / "walker2d" / "tune.py")
    tune = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(tune)
    rows, means, found = tune.read(), {}, {}
    for row in rows:
        means.setdefault((row["algorithm"], row["trial"]), []).append(float(row["final_return"]))
        found[row["algorithm"], row["trial"]] = row
    sums = {trial: sum(statistics.fmean(means[name, trial]) for name in ("ppo", "trpo"))
            for name, trial in means if name == "ppo" and all(len(means[a, trial]) == 3 for a in ("ppo", "trpo"))}
    best = max(sums, key=sums.get)
    for name, (config, world) in PRESETS["mujoco-1m"].algorithms.items():
        row = found[name, best]
        numbers = {key: ast.literal_eval(value) for key, value in row.items() if value and key != "algorithm"}
        assert config == tune.config_of(name, numbers) and world.num_envs * world.steps == numbers["batch"]
    assert {int(row["seed"]) for row in rows} & set(range(1, 1000)) == set()  # no seed that a result uses
