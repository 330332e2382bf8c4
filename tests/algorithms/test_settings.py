"""Settings refuse what they cannot mean, naming field, value and range."""

import math
from dataclasses import dataclass, fields
from typing import Literal

import pytest

from minirl.algorithms.dpo import DPOConfig
from minirl.algorithms.grpo import GRPOConfig
from minirl.algorithms.orpo import ORPOConfig
from minirl.algorithms.ppo import PPOConfig
from minirl.algorithms.ppo_kl import PPOKLConfig
from minirl.algorithms.q_sharp import QSharpConfig
from minirl.algorithms.reinforce import REINFORCEConfig
from minirl.algorithms.rejection_sampling import RejectionSamplingConfig
from minirl.algorithms.reward_model import RewardModelConfig
from minirl.algorithms.settings import Count, Positive, Seed, Settings, Share, ShareBelowOne, Whole
from minirl.algorithms.sft import SFTConfig
from minirl.algorithms.trpo import TRPOConfig

CONFIGS = [
    SFTConfig, REINFORCEConfig, TRPOConfig, PPOConfig, PPOKLConfig, GRPOConfig, RejectionSamplingConfig,
    RewardModelConfig, DPOConfig, ORPOConfig, QSharpConfig,
]  # fmt: skip
ANY_NUMBER = {"min_score"}  # the walker's returns may be negative


@dataclass(frozen=True)
class Example(Settings):
    positive: Positive = 1.0
    maybe: Positive | None = None
    share: Share = 0.5
    below_one: ShareBelowOne = 0.5
    count: Count = 1
    whole: Whole = 0
    seed: Seed = 0
    sizes: tuple[Count, ...] = (1, 2)
    choice: Literal["a", "b"] = "a"
    text: str = ""


GOOD = [
    ("positive", 1e-9), ("positive", 3), ("maybe", None), ("maybe", 0.1), ("share", 0.0), ("share", 1),
    ("count", 10**9), ("below_one", 0), ("whole", 0), ("seed", 999_999_999), ("sizes", ()), ("choice", "b"),
]  # fmt: skip
BAD = [
    ("positive", 0, "a number > 0"), ("positive", -1.0, "a number > 0"), ("positive", math.nan, "a number > 0"),
    ("positive", "3", "a number > 0"), ("maybe", 0.0, "a number > 0"), ("share", 1.1, "a number >= 0 and <= 1"),
    ("share", -0.1, "a number >= 0 and <= 1"), ("below_one", 1.0, "a number >= 0 and < 1"),
    ("count", 0, "a whole number >= 1"), ("count", 1.5, "a whole number >= 1"), ("whole", -1, "a whole number >= 0"),
    ("seed", 10**9, "a whole number >= 0 and <= 999999999"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_values_within_the_range_pass(name, value):
    assert getattr(Example(**{name: value}), name) == value


@pytest.mark.parametrize(("name", "value", "allowed"), BAD)
def test_values_outside_are_refused_with_name_value_and_range(name, value, allowed):
    with pytest.raises(ValueError) as caught:
        Example(**{name: value})
    assert str(caught.value) == f"{name} is {value!r}; it must be {allowed}"


def test_tuples_are_checked_item_by_item_and_choices_by_name():
    with pytest.raises(ValueError, match="sizes is 0; it must be a whole number >= 1"):
        Example(sizes=(64, 0))
    with pytest.raises(ValueError, match="choice is 'c'; choose one of a, b"):
        Example(choice="c")


@pytest.mark.parametrize("config", CONFIGS)
def test_every_number_of_every_algorithm_has_a_range(config):
    """-1 and nan mean nothing in any of them, but for a score."""
    numbers = [f.name for f in fields(config) if f.type not in (bool, "bool") and not isinstance(f.default, str)]
    assert "lr" in numbers or "delta" in numbers
    for name in numbers:
        for value in (math.nan,) if name in ANY_NUMBER else (-1, math.nan):
            with pytest.raises(ValueError, match=f"^{name} is {value}; "):
                config(**{name: value})
