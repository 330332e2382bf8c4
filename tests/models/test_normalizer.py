"""Statistics of observations and of returns, against numpy over everything that was seen."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import minirl.models.normalizer as module
from minirl.models.normalizer import ObservationNormalizer, RewardScaler

NO = torch.zeros(1, 2, dtype=torch.bool)


def test_population_statistics_of_zero_to_five():
    # mean 15/6 = 2.5; variance (2.5² + 1.5² + 0.5²)·2/6 = 17.5/6 = 2.916667; (7 − 2.5)/1.707825 = 2.634930
    normalizer = ObservationNormalizer(1).double()
    normalizer.update(torch.arange(6, dtype=torch.float64).reshape(6, 1))
    assert normalizer.mean.item() == pytest.approx(2.5, abs=1e-12)
    assert normalizer.variance.item() == pytest.approx(17.5 / 6, abs=1e-12)
    assert normalizer.count.item() == 6
    assert normalizer.normalize(torch.tensor([7.0], dtype=torch.float64)).item() == pytest.approx(2.634930, abs=1e-6)


def test_before_the_first_update_it_only_clips():
    obs = torch.tensor([[-50.0, -10.0, 0.3, 7.0, 11.0]])
    assert torch.equal(ObservationNormalizer(5).normalize(obs), torch.tensor([[-10.0, -10.0, 0.3, 7.0, 10.0]]))


def test_splitting_the_data_changes_nothing():
    data = torch.randn(60, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 5 + 100
    for pieces in (data.split(1), data.split([7, 50, 3]), [data[:30], data[:0], data[30:]]):
        normalizer = ObservationNormalizer((3,)).double()
        for piece in pieces:
            normalizer.update(piece)
        flat = data.reshape(-1, 3).numpy()
        np.testing.assert_allclose(normalizer.mean.numpy(), flat.mean(0), rtol=1e-12)
        np.testing.assert_allclose(normalizer.variance.numpy(), flat.var(0), rtol=1e-10)
        assert normalizer.count.item() == 240


def test_a_million_float32_samples():
    # Far from 0 with a small deviation: where the sum of squares minus the squared sum loses every digit in float32.
    data = (np.random.default_rng(0).standard_normal((1_000_000, 2)) * [0.5, 3.0] + [1000.0, -2.0]).astype(np.float32)
    normalizer = ObservationNormalizer(2)
    for piece in np.array_split(data, 489):  # rollouts of about 2,048
        normalizer.update(torch.from_numpy(piece))
    exact = data.astype(np.float64)
    # What is left is the rounding of the stored buffers; sums in float32 would be off by 1e-6 in the variance.
    np.testing.assert_allclose(normalizer.mean.numpy(), exact.mean(0), rtol=5e-7)
    np.testing.assert_allclose(normalizer.variance.numpy(), exact.var(0), rtol=5e-7)
    assert normalizer.count.item() == 1_000_000


def test_buffers_stay_float32_and_the_count_an_integer():
    normalizer = ObservationNormalizer(3)
    normalizer.update(torch.randn(5, 3, dtype=torch.float64))
    assert normalizer.mean.dtype == normalizer.variance.dtype == torch.float32
    assert normalizer.normalize(torch.randn(2, 3)).dtype == torch.float32
    assert normalizer.half().count.dtype == torch.long  # a half-precision count would stop at 2,048
    assert set(normalizer.state_dict()) == {"mean", "variance", "count"}
    assert not list(normalizer.parameters())


def test_normalising_moves_nothing_and_a_constant_feature_becomes_zero():
    normalizer = ObservationNormalizer(2)
    normalizer.update(torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
    before = {name: value.clone() for name, value in normalizer.state_dict().items()}
    out = normalizer.normalize(torch.tensor([[3.0, 4.0], [1.0, 5.0]]))
    torch.testing.assert_close(out, torch.tensor([[1.0, 0.0], [-1.0, 10.0]]))  # (5 − 4)/1e-4, clipped
    assert all(torch.equal(value, before[name]) for name, value in normalizer.state_dict().items())


def test_what_would_spoil_the_statistics_is_refused():
    normalizer = ObservationNormalizer(3)
    with pytest.raises(ValueError, match=r"obs has shape \(4, 2\), but mean has shape \(3,\)"):
        normalizer.update(torch.zeros(4, 2))
    with pytest.raises(ValueError, match="NaN"):
        normalizer.update(torch.tensor([[0.0, float("nan"), 0.0]]))
    assert normalizer.count.item() == 0


def test_a_fresh_process_acts_the_same(tmp_path):
    """Statistics travel with the policy's weights: an agent that lost them would see 7.0 instead of 2.63."""
    normalizer = ObservationNormalizer(1)
    normalizer.update(torch.arange(6.0).reshape(6, 1))
    policy = torch.nn.ModuleDict({"normalizer": normalizer, "mean": torch.nn.Linear(1, 2)})
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({k: v.tolist() for k, v in policy.state_dict().items()}), encoding="utf-8")
    script = (
        "import json, sys, torch\n"
        "from minirl.models.normalizer import ObservationNormalizer\n"
        "policy = torch.nn.ModuleDict({'normalizer': ObservationNormalizer(1), 'mean': torch.nn.Linear(1, 2)})\n"
        "state = json.load(open(sys.argv[1], encoding='utf-8'))\n"
        "policy.load_state_dict({k: torch.tensor(v) for k, v in state.items()})\n"
        "seen = policy['normalizer'].normalize(torch.tensor([7.0]))\n"
        "print(json.dumps([seen.tolist(), policy['mean'](seen).tolist()]))\n"
    )
    root = str(Path(module.__file__).parents[2])
    command = [sys.executable, "-c", script, str(path)]
    seen, action = json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)
    assert seen[0] == pytest.approx(2.634930, abs=1e-5)
    assert action == pytest.approx(policy["mean"](normalizer.normalize(torch.tensor([7.0]))).tolist(), abs=1e-6)


def test_accumulator_is_cleared_by_a_time_limit():
    # Two episodes of rewards 1, 1, both cut by a time limit: 1, 1 + 0.99·1, then 1 again and not 1 + 0.99·1.99.
    scaler = RewardScaler(rows=1, gamma=0.99)
    ended = torch.tensor([[False, True, False, True]])
    running = scaler.accumulate(torch.ones(1, 4, dtype=torch.float64), ended)
    np.testing.assert_allclose(running.numpy(), [[1.0, 1.99, 1.0, 1.99]], atol=1e-12)


def test_accumulator_runs_on_into_the_next_rollout():
    scaler = RewardScaler(rows=2, gamma=0.5)
    ended = torch.tensor([[False, False], [False, True]])
    scaler.accumulate(torch.tensor([[1.0, 2.0], [1.0, 2.0]]), ended)  # row 0 runs on with 2.5, row 1 ended
    running = scaler.accumulate(torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool))
    np.testing.assert_allclose(running.numpy(), [[2.25], [1.0]], atol=1e-12)


def test_rewards_are_divided_by_the_deviation_of_the_returns():
    rewards = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 7 + 2
    ended = torch.zeros(3, 40, dtype=torch.bool)
    ended[:, 9::10] = True
    scaler, mask = RewardScaler(3, gamma=0.9), torch.ones(3, 40, dtype=torch.bool)
    halves = [scaler(rewards[:, part], ended[:, part], mask[:, part]) for part in (slice(0, 25), slice(25, 40))]
    powers = 0.9 ** np.subtract.outer(np.arange(10), np.arange(10))  # R as one triangular product an episode
    returns = (rewards.numpy().reshape(3, 4, 1, 10) * np.tril(powers)).sum(-1).reshape(3, 40)
    for scaled, raw, seen in zip(halves, (rewards[:, :25], rewards[:, 25:]), (returns[:, :25], returns), strict=True):
        np.testing.assert_allclose(scaled.numpy(), raw.numpy() / np.sqrt(seen.var() + 1e-8), rtol=1e-10)


def test_padding_does_not_count_and_outliers_are_clipped():
    scaler = RewardScaler(1)
    mask = torch.tensor([[True, True, False, False]])
    ended = torch.tensor([[False, True, False, False]])
    scaled = scaler(torch.tensor([[1.0, 3.0, 0.0, 0.0]]), ended, mask)
    assert scaler.count == 2
    torch.testing.assert_close(scaled, torch.tensor([[1.0, 3.0, 0.0, 0.0]]) / (0.5 * (1 * 0.99 + 3 - 1)))  # half range
    big = scaler(torch.tensor([[1e3, -1e3]]), NO, torch.tensor([[False, False]]))
    assert big.tolist() == [[10.0, -10.0]]


def test_rewards_pass_while_the_return_never_varied():
    scaler = RewardScaler(1)
    rewards = torch.full((1, 2), 0.1)
    assert torch.equal(scaler(rewards, ~NO, ~NO), rewards)


def test_scaler_state_is_plain_numbers_and_resumes_exactly():
    generator = torch.Generator().manual_seed(2)
    first, second = torch.randn(2, 2, 5, dtype=torch.float64, generator=generator)
    ended, mask = torch.zeros(2, 5, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)
    scaler, resumed = RewardScaler(2), RewardScaler(2)
    scaler(first, ended, mask)
    resumed.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert torch.equal(scaler(second, ended, mask), resumed(second, ended, mask))
    assert scaler.state_dict() == resumed.state_dict()
