"""The records: shapes are checked, and cutting a batch into parts loses and repeats nothing."""

import pytest
import torch

from minirl.worlds.batch import Batch, Completions, Pairs

B, T = 3, 4
MASK = torch.tensor([[1, 1, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()


def numbered(*shape):
    """Every entry says where it stood."""
    return torch.arange(float(torch.tensor(shape).prod())).view(shape)


def make(**changes):
    step = numbered(B, T)
    fields = dict(
        obs=numbered(B, T, 2), actions=100 + step, logprobs=200 + step, rewards=300 + step, scores=torch.arange(3.0),
        terminated=step % 2 == 0, truncated=step % 3 == 0, mask=MASK, values=400 + step, next_values=500 + step,
        group_size=3, max_length=9, kl_in_reward=0.5, metrics={"score": 1.0},
    )  # fmt: skip
    return Batch(**{**fields, **changes})


def ids_of(parts):
    """The numbers of all steps that the parts hold."""
    return sorted(int(x) for part in parts for x in (part.rewards - 300).flatten())


@pytest.mark.parametrize("name", ["rewards", "terminated", "truncated", "mask", "values", "next_values",
                                  "ref_logprobs", "advantages", "returns", "step_rewards", "step_ends"])  # fmt: skip
def test_fields_of_a_step_must_agree(name):
    with pytest.raises(ValueError, match=rf"{name} has shape \(3, 1\), but logprobs has shape \(3, 4\)"):
        make(**{name: torch.zeros(B, 1)})


@pytest.mark.parametrize("name", ["obs", "actions"])
def test_what_was_seen_and_done_must_have_rows_and_steps(name):
    make(**{name: torch.zeros(B, T, 5)}), make(**{name: torch.zeros(B, T)})
    for shape in ((B, T + 1), (B,), (T, B, 2)):
        with pytest.raises(ValueError, match=rf"{name} has shape .*, but rewards has shape \(3, 4\)"):
            make(**{name: torch.zeros(shape)})


@pytest.mark.parametrize("shape", [(1,), (B, 1), ()])
def test_scores_are_one_a_row(shape):
    with pytest.raises(ValueError, match="scores has shape|but scores has shape"):
        make(scores=torch.zeros(shape))


def test_changes_leave_the_original_alone():
    batch = make()
    other = batch.with_(rewards=torch.zeros(B, T))
    assert not other.rewards.any() and batch.rewards.all() and other.actions is batch.actions
    with pytest.raises(AttributeError):
        batch.rewards = 0


def test_moving_takes_every_tensor_along():
    moved = make().to("meta")
    tensors = [value for value in vars(moved).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) == 10 and all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.metrics == {"score": 1.0} and moved.ref_logprobs is None


@pytest.mark.parametrize("index", [slice(1, 3), torch.tensor([1, 2])])
def test_rows(index):
    part = make().rows(index)
    assert part.obs.shape == (2, T, 2) and part.scores.tolist() == [1, 2] and ids_of([part]) == list(range(4, 12))
    assert (part.group_size, part.max_length, part.kl_in_reward, part.metrics) == (3, 9, 0.5, {"score": 1.0})


def test_steps_are_those_that_count_row_by_row():
    steps = make().steps()
    where = [0, 1, 3, 8, 9, 10, 11]
    assert ids_of([steps]) == where and (steps.rewards.flatten() - 300).tolist() == where
    assert steps.obs.shape == (7, 1, 2) and steps.obs[3, 0].tolist() == [16, 17]
    assert steps.scores.tolist() == [0, 0, 0, 2, 2, 2, 2] and steps.mask.all() and steps.mask.shape == (7, 1)
    for name, base in (("actions", 100), ("logprobs", 200), ("values", 400), ("next_values", 500)):
        assert (getattr(steps, name).flatten() - base).tolist() == where
    assert steps.terminated.flatten().tolist() == [n % 2 == 0 for n in where]


def test_step_rewards_go_along_wherever_the_rows_go():
    step = numbered(B, T)
    batch = make(step_rewards=600 + step, step_ends=step % 2 == 1)
    parts = [batch, batch.rows(slice(1, 3)), batch.steps(), *batch.split(2), *batch.minibatches(2)]
    parts += batch.minibatches(2, whole_rows=True)
    for part in parts:
        assert part.step_rewards.equal(part.rewards + 300)
        assert part.step_ends.equal(part.rewards % 2 == 1) and part.step_ends.dtype == torch.bool
    moved = batch.to("meta")
    assert moved.step_rewards.device.type == moved.step_ends.device.type == "meta"
    assert make().rows(slice(0, 1)).step_rewards is None and make().steps().step_ends is None


@pytest.mark.parametrize("count, sizes", [(1, [3]), (2, [2, 1]), (3, [1, 1, 1]), (5, [1, 1, 1])])
def test_split_keeps_order_and_loses_nothing(count, sizes):
    parts = list(make().split(count))
    assert [len(part.mask) for part in parts] == sizes
    assert torch.cat([part.rewards for part in parts]).equal(make().rewards)


@pytest.mark.parametrize("count, sizes", [(1, [7]), (2, [4, 3]), (3, [3, 2, 2]), (50, [1] * 7)])
def test_a_step_is_a_unit_where_rows_are_not_sequences(count, sizes):
    parts = list(make().minibatches(count))
    assert [len(part.mask) for part in parts] == sizes
    assert ids_of(parts) == [0, 1, 3, 8, 9, 10, 11]


@pytest.mark.parametrize("settings, whole_rows", [({"rows_are_sequences": True}, None), ({}, True)])
def test_a_row_is_a_unit_where_rows_are_sequences(settings, whole_rows):
    parts = list(make(**settings).minibatches(2, whole_rows))
    assert [len(part.mask) for part in parts] == [2, 1] and parts[0].mask.shape == (2, T)
    assert ids_of(parts) == list(range(12))
    assert len(list(make(**settings).minibatches(9, whole_rows))) == 3


def test_a_step_may_be_the_unit_of_sequences_too():
    assert ids_of(make(rows_are_sequences=True).minibatches(2, whole_rows=False)) == [0, 1, 3, 8, 9, 10, 11]


def test_every_pass_is_shuffled_anew_and_reproducibly():
    def orders():
        torch.manual_seed(0)
        return [[int(x) for part in make().minibatches(3) for x in part.rewards] for _ in range(2)]

    first, second = orders()
    assert first != second and sorted(first) == sorted(second) and first != sorted(first)
    assert orders() == [first, second]


def completions(rows, first=0):
    return Completions(first + numbered(rows, T), 100 + first + numbered(rows, T), torch.ones(rows, T))


def test_completions_and_pairs():
    pairs = Pairs(completions(3), completions(3, 40))
    part = pairs.rows(torch.tensor([2, 0]))
    assert len(pairs) == 3 and len(part) == 2 and len(completions(3).rows(slice(0, 1))) == 1
    for side, first in ((part.chosen, 0), (part.rejected, 40)):
        assert (side.obs[:, 0] - first).tolist() == [8, 0] and (side.actions[:, 0] - first).tolist() == [108, 100]
    with pytest.raises(ValueError, match="chosen has 3 rows, but rejected has 2"):
        Pairs(completions(3), completions(2))


def test_pairs_may_say_by_how_much():
    pairs = Pairs(completions(3), completions(3), torch.tensor([0.5, 1.0, 2.0]))
    assert pairs.rows(torch.tensor([2, 0])).margin.tolist() == [2.0, 0.5]
    assert pairs.rows(slice(1, 2)).margin.tolist() == [1.0]
    assert Pairs(completions(3), completions(3)).rows(slice(0, 2)).margin is None
    for shape in ((2,), (3, 1), ()):
        with pytest.raises(ValueError, match="margin has shape .*, but there are 3 pairs"):
            Pairs(completions(3), completions(3), torch.zeros(shape))


@pytest.mark.parametrize("wrong", [1, 2])
def test_completions_must_agree(wrong):
    fields = [torch.zeros(2, 3)] * 3
    fields[wrong] = torch.zeros(2, 1)
    with pytest.raises(ValueError, match=r"has shape \(2, 1\), but obs has shape \(2, 3\)"):
        Completions(*fields)
