"""The two loops: nothing is dropped, a broken run is put back, and looking at a run does not change it."""

import copy
import math
import random
import signal
import threading
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from minirl.algorithms.grpo import GRPO, GRPOConfig
from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.algorithms.sft import SFT, SFTConfig
from minirl.models.policies import TokenPolicy
from minirl.tracking import TrainingDiverged
from minirl.training import fit, resolve_device, seed_everything, to_floats, train, windows
from minirl.worlds.text import pack_completions

# ---- small things


def test_one_seed_for_everything():
    draws = []
    for seed in (7, 7, 8, 2**40):
        seed_everything(seed)
        draws.append((random.random(), np.random.rand(), torch.rand(1).item()))
    assert draws[0] == draws[1] and not set(draws[0]) & set(draws[2]) and len(set(draws)) == 3


def test_devices():
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == resolve_device() == ("cuda" if torch.cuda.is_available() else "cpu")
    for missing in ["gpu9", "cuda:99", "fpga"]:
        with pytest.raises(ValueError, match=f"device '{missing}' is not available here; use --device cpu, or auto"):
            resolve_device(missing)


def test_a_missing_cuda_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(ValueError, match="device 'cuda' is not available"):
        resolve_device("cuda")


def test_stats_become_numbers():
    floats = to_floats({"a": torch.tensor(0.5), "b": torch.tensor(3), "c": 2.0, "d": torch.tensor(True)})
    assert floats == {"a": 0.5, "b": 3, "c": 2.0, "d": 1} and not any(torch.is_tensor(v) for v in floats.values())


# ---- windows


class Numbers:
    """Records that are their own numbers."""

    def __init__(self, values):
        self.values = values

    def __len__(self):
        return len(self.values)

    def rows(self, index):
        return [self.values[i] for i in index]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("count, batch_size, accumulate", [(10, 2, 4), (10, 3, 2), (5, 1, 4), (4, 9, 3), (1, 1, 1)])
def test_windows_drop_nothing_and_repeat_nothing(count, batch_size, accumulate):
    stream, epochs = windows(Numbers(range(count)), batch_size, accumulate, generator()), []
    for _ in range(3):
        seen, lengths = [], []
        while len(seen) < count:
            parts = next(stream)
            seen += [number for part in parts for number in part]
            lengths.append([len(part) for part in parts])
        assert sorted(seen) == list(range(count))
        whole = [size for window in lengths for size in window]
        assert all(size == batch_size for size in whole[:-1]) and whole[-1] <= batch_size
        assert all(len(window) == accumulate for window in lengths[:-1])
        epochs.append(seen)
    assert count == 1 or count == 4 or epochs[0] != epochs[1]  # shuffled anew
    again = windows(Numbers(range(count)), batch_size, accumulate, generator())
    assert sorted(number for part in next(again) for number in part) == sorted(epochs[0][: batch_size * accumulate])


def test_five_parts_accumulated_by_four_are_two_steps():
    stream = windows(Numbers(range(5)), 1, 4, generator())
    assert [len(next(stream)) for _ in range(4)] == [4, 1, 4, 1]


def test_no_records_are_an_error_not_an_endless_loop():
    with pytest.raises(ValueError, match="no records"):
        next(windows(Numbers([]), 2, 1, generator()))


# ---- fit


@dataclass
class Plain:
    """Settings that `fit` reads."""

    lr: float = 0.1
    lr_decay: bool = True
    max_grad_norm: float | None = None


@dataclass
class Pull:
    """Pulls w towards its records; every number it saw is written down."""

    config: Plain = field(default_factory=Plain)

    def __post_init__(self):
        self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.optimizer = torch.optim.SGD([self.w], lr=self.config.lr, momentum=0.9)
        self.seen, self.rates = [], []

    def loss(self, part):
        self.seen.append(list(part))
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        loss = torch.stack([(self.w - number) ** 2 for number in part]).mean()
        return loss, {"loss": loss.detach(), "count": torch.tensor(len(part))}

    def state_dict(self):
        return {"w": self.w.detach(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.w.data.copy_(state["w"])
        self.optimizer.load_state_dict(state["optimizer"])


def test_fit_goes_through_the_records_and_the_schedule():
    algorithm = Pull()
    history = fit(algorithm, Numbers(range(5)), steps=4, batch_size=1, accumulate=4)
    assert [row["step"] for row in history] == [1, 2, 3, 4] and [row["count"] for row in history] == [4, 1, 4, 1]
    assert sorted(sum(algorithm.seen[:5], [])) == sorted(sum(algorithm.seen[5:], [])) == list(range(5))
    assert algorithm.rates == [0.1] * 4 + [0.1 * 0.75] + [0.05] * 4 + [0.1 * 0.25]
    assert "grad_norm" in history[0]


@pytest.mark.parametrize("start", [0, 1])
def test_the_step_size_rises_first(start):
    algorithm = Pull(Plain(lr=0.6))
    fit(algorithm, Numbers(range(5)), steps=6, batch_size=1, start=start, warmup_steps=3)
    # 0.6 · min(1, step/3) · (1 − (step − 1)/6) for step = 1 ... 6
    assert algorithm.rates == pytest.approx([0.2, 1 / 3, 0.4, 0.3, 0.2, 0.1][start:], abs=1e-15)


def test_accumulating_changes_nothing():
    whole, parts = Pull(), Pull()
    first = fit(whole, Numbers(range(6)), steps=3, batch_size=6)
    second = fit(parts, Numbers(range(6)), steps=3, batch_size=1, accumulate=6)
    assert abs(whole.w - parts.w) < 1e-12
    assert all(abs(a["loss"] - b["loss"]) < 1e-10 for a, b in zip(first, second, strict=True))


def test_accumulating_changes_nothing_for_rows_of_unequal_length(make_gpt, letters):
    records = pack_completions(letters, ["a", "b", "cc", "d"], ["", "abcdef", "ab", "g"])
    found = []
    for batch_size, accumulate in ((4, 1), (2, 2), (1, 4)):
        policy = TokenPolicy(make_gpt())
        fit(SFT(policy, SFTConfig(lr=0.01)), records, steps=3, batch_size=batch_size, accumulate=accumulate)
        found.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    for parameters in found[1:]:
        torch.testing.assert_close(parameters, found[0], rtol=0, atol=1e-6)


def test_a_continued_fit_sees_what_an_uninterrupted_one_sees():
    whole, halves = Pull(), Pull()
    history = fit(whole, Numbers(range(7)), steps=6, batch_size=2, accumulate=2, seed=3)
    saved = {}

    def stop_after_three(row):
        return row["step"] == 3

    rows = fit(halves, Numbers(range(7)), steps=6, batch_size=2, accumulate=2, seed=3, evaluate_every=1,
               evaluate=lambda step: {"step": step}, stop=stop_after_three,
               save=lambda step: saved.update(step=step, state=copy.deepcopy(halves.state_dict())))
    assert saved["step"] == 3 and len(rows) == 3
    halves.load_state_dict(saved["state"])
    rows += fit(halves, Numbers(range(7)), steps=6, batch_size=2, accumulate=2, seed=3, start=3)
    assert halves.seen == whole.seen and torch.equal(halves.w, whole.w) and rows == history
    assert fit(Pull(), Numbers(range(7)), steps=6, batch_size=2, accumulate=2, seed=4) != history


def test_fit_evaluates_and_saves_when_it_should():
    evaluated, saved, logged = [], [], []

    class Log:
        def log(self, step, row):
            logged.append((step, row))

    history = fit(Pull(), Numbers(range(3)), steps=5, evaluate=lambda s: evaluated.append(s) or {"score": s},
                  evaluate_every=2, save=saved.append, tracker=Log())
    assert evaluated == [2, 4, 5] and saved == [5]
    assert [row.get("score") for row in history] == [None, 2, None, 4, 5]
    assert [step for step, _ in logged] == [1, 2, 3, 4, 5] and logged[1][1]["score"] == 2
    evaluated.clear()
    fit(Pull(), Numbers(range(3)), steps=2, evaluate=lambda s: evaluated.append(s) or {})
    assert evaluated == [2]  # always after the last


def test_fit_that_diverges_goes_back_and_saves():
    algorithm, saved = Pull(Plain(lr=0.1, lr_decay=False)), []
    records = Numbers([1.0, 1.0, math.nan, 1.0])  # some step meets the nan
    clean = Pull(Plain(lr=0.1, lr_decay=False))
    with pytest.raises(TrainingDiverged, match="loss is nan") as error:
        fit(algorithm, records, steps=9, batch_size=1,
            save=lambda step: saved.append((step, algorithm.w.item(), copy.deepcopy(algorithm.state_dict()))))
    good = error.value.step - 1
    assert [step for step, *_ in saved] == [good] and good >= 1
    fit(clean, Numbers([1.0] * 4), steps=good, batch_size=1)
    assert saved[0][1] == clean.w.item() == algorithm.w.item()
    momentum = algorithm.optimizer.state[algorithm.w]["momentum_buffer"]
    assert torch.equal(momentum, clean.optimizer.state[clean.w]["momentum_buffer"])


# ---- train


class Walk:
    """A world that hands out numbers, and an algorithm that adds them up; both in one."""

    def __init__(self, bad_at=None, interrupt_at=None):
        self.policy, self.critic, self.total = object(), object(), torch.zeros(())
        self.collected, self.progress = 0, []
        self.metrics, self.bad_at, self.interrupt_at = {}, bad_at, interrupt_at

    def collect(self, policy, critic):
        assert policy is self.policy and critic is self.critic
        self.collected += 1
        if self.collected == self.interrupt_at:
            signal.raise_signal(signal.SIGINT)
        self.metrics = {"score": float(self.collected)}
        return self

    def update(self, batch, progress):
        self.progress.append(progress)
        self.total += math.nan if self.collected == self.bad_at else self.collected  # in place, as an optimizer does
        return {"policy_loss": self.total.clone(), "ratio_max": 1.0}

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total.copy_(state["total"])


def test_train_collects_updates_and_writes_down():
    walk, evaluated, saved, logged = Walk(), [], [], []

    class Log:
        def log(self, step, row):
            logged.append((step, dict(row)))

    history = train(walk, walk, 5, Log(), lambda n: evaluated.append(n) or {"e": n}, 2, saved.append, 3)
    assert walk.progress == [0, 0.2, 0.4, 0.6, 0.8] and evaluated == [2, 4, 5] and saved == [3, 5]
    assert [row["policy_loss"] for row in history] == [1, 3, 6, 10, 15]
    assert [row["step"] for row in history] == [step for step, _ in logged] == [1, 2, 3, 4, 5]
    assert history[1] == {"step": 2, "score": 2.0, "policy_loss": 3.0, "ratio_max": 1.0, "e": 2}
    assert logged[1][1] == {name: value for name, value in history[1].items() if name != "step"}


def test_train_may_start_later_and_need_nobody_to_watch():
    walk = Walk()
    assert [row["step"] for row in train(walk, walk, 5, start=3)] == [4, 5] and walk.progress == [0.6, 0.8]
    assert train(walk, walk, 5, start=5) == []


def test_train_that_diverges_goes_back_and_saves():
    walk, saved = Walk(bad_at=3), []
    with pytest.raises(TrainingDiverged, match="step 3: policy_loss is nan"):
        train(walk, walk, 5, save=lambda n: saved.append((n, walk.total.item())))
    assert saved == [(2, 3.0)] and walk.total == 3
    walk = Walk(bad_at=1)
    with pytest.raises(TrainingDiverged):
        train(walk, walk, 5)
    assert walk.total == 0


def test_ctrl_c_waits_for_the_update_and_saves_it():
    before = signal.getsignal(signal.SIGINT)
    walk, saved = Walk(interrupt_at=2), []
    with pytest.raises(KeyboardInterrupt):
        train(walk, walk, 5, save=lambda n: saved.append((n, walk.total.item())))
    assert saved == [(2, 3.0)] and signal.getsignal(signal.SIGINT) is before

    class Interrupted(Pull):
        def loss(self, part):
            if len(self.seen) == 1:
                signal.raise_signal(signal.SIGINT)
            return super().loss(part)

    saved.clear()
    with pytest.raises(KeyboardInterrupt):
        fit(Interrupted(), Numbers(range(3)), steps=5, save=saved.append)
    assert saved == [2] and signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_twice_stops_at_once():
    class Impatient(Walk):
        def collect(self, policy, critic):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    walk = Impatient()
    with pytest.raises(KeyboardInterrupt):
        train(walk, walk, 5, save=pytest.fail)


def test_train_works_in_another_thread():
    rows, walk = [], Walk()
    thread = threading.Thread(target=lambda: rows.extend(train(walk, walk, 2)))
    thread.start()
    thread.join()
    assert len(rows) == 2


# ---- on text: the same run whoever watches


SMALL_PPO = PPOConfig(epochs=2, minibatches=2, lr=0.01, critic_epochs=1, critic_minibatches=2)
ALGORITHMS = {
    "ppo": lambda policy, critic: PPO(policy, critic, SMALL_PPO),
    "grpo": lambda policy, critic: GRPO(policy, GRPOConfig(epochs=2, minibatches=2, lr=0.01)),
}


def run(make_text, make, evaluate_every, seed=5):
    world, policy, critic = make_text(torch.float32, dropout=0.2)
    policy.train()
    seed_everything(seed)

    def evaluate(update):
        metrics, _ = world.evaluate(policy)
        return {f"held_out/{name}": value for name, value in metrics.items()}

    history = train(world, make(policy, critic), 4, evaluate=evaluate if evaluate_every else None,
                    evaluate_every=evaluate_every)
    return [{k: v for k, v in row.items() if not k.startswith("held_out")} for row in history], policy.state_dict()


@pytest.mark.parametrize("make", ALGORITHMS.values(), ids=ALGORITHMS)
def test_evaluation_changes_no_training_metric_and_a_seed_fixes_all(make, make_text):
    rows, weights = run(make_text, make, evaluate_every=0)
    for evaluate_every in (0, 1, 3):
        other_rows, other_weights = run(make_text, make, evaluate_every)
        assert str(other_rows) == str(rows)
        assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert str(run(make_text, make, 0, seed=6)[0]) != str(rows)
