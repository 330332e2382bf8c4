"""Settings that refuse what they cannot mean: a field's type says its range, and a run with a wrong value never starts.

    lr: NonNegative = 3e-4        epochs: Count = 10        gamma: Share = 0.99        target_kl: Positive | None = None

A dataclass that inherits `Settings` is checked when it is made, in Python and on the command line alike.
"""

import math
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`; each belongs to it unless it is `open` there."""

    low: float
    high: float = math.inf
    open: Literal["", "low", "high"] = ""

    def __contains__(self, number):
        above = number > self.low if self.open == "low" else number >= self.low
        return above and (number < self.high if self.open == "high" else number <= self.high)

    def __str__(self):
        low = f"{'>' if self.open == 'low' else '>='} {self.low:.9g}"
        return low if self.high == math.inf else f"{low} and {'<' if self.open == 'high' else '<='} {self.high:.9g}"


Positive = Annotated[float, Range(0, open="low")]
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, open="low")]
ShareBelowOne = Annotated[float, Range(0, 1, open="high")]
Count = Annotated[int, Range(1)]
Whole = Annotated[int, Range(0)]
Seed = Annotated[int, Range(0, 999_999_999)]  # what every generator takes


class Settings:
    """Base of a dataclass whose fields are checked against their types when it is made.

    Raises:
        ValueError: naming the field, its value and what it may be.
    """

    def __post_init__(self):
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            check_value(name, getattr(self, name), hint)


def check_value(name, value, hint):
    """Check a value against numbers with a Range, Literals, and tuples or a union with None of these; else do nothing.

    Raises:
        ValueError: naming `name`, the value and what it may be.
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(args[1], Range):
        kind, noun = (Integral, "whole number") if args[0] is int else (Real, "number")
        if not isinstance(value, kind) or value not in args[1]:
            raise ValueError(f"{name} is {value!r}; it must be a {noun} {args[1]}")
    elif origin is Literal and value not in args:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, args))}")
    elif origin in (Union, UnionType) and value is not None:
        check_value(name, value, next(arg for arg in args if arg is not NoneType))
    elif origin is tuple:
        for item in value:
            check_value(name, item, args[0])
