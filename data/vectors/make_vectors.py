"""Write the test vectors: `python data/vectors/make_vectors.py`; `--out FOLDER` writes elsewhere.

The inputs are chosen here, the right values come from formulas.py. Only Python's standard library is used, and all
arithmetic is decimal with 50 digits, rounded to float64 once at the end, so that every machine writes the same bytes.
Every gradient is confirmed here, entry by entry, by central differences of the value.
"""

import argparse
import copy
import json
import math
from decimal import Decimal
from pathlib import Path

import formulas as f

HERE = Path(__file__).resolve().parent
NAN, MINUS_INFINITY = "NaN", "-Infinity"  # JSON has no such numbers; float() and its like read these strings
STEP = Decimal("1e-14")  # of the central differences: their error is about its square, far below float64's
VERIFIERS = "minirl.worlds.verifiers"


# --- from float64 to decimal and back


def exact(x):
    """Floats, and the strings that stand for numbers, as the Decimals they are; anything else as it is."""
    if isinstance(x, dict):
        return {name: exact(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [exact(value) for value in x]
    return Decimal(x) if isinstance(x, float) or x in (NAN, MINUS_INFINITY) else x


def rounded(x):
    """Decimals as the nearest float64, what is not finite as a string."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, list):
        return [rounded(value) for value in x]
    if not isinstance(x, Decimal):
        return x
    return float(x) + 0.0 if x.is_finite() else str(x)  # + 0.0 turns -0.0 into 0.0


def flat(x):
    """All numbers of a nested list in order."""
    return [number for part in x for number in flat(part)] if isinstance(x, list) else [x]


def slots(x):
    """(list, index) of every number of a nested list, in the order of `flat`."""
    for index, part in enumerate(x):
        if isinstance(part, list):
            yield from slots(part)
        else:
            yield x, index


def fill(shape, numbers):
    """A nested list of that shape, the numbers over and over."""
    numbers = list(numbers)
    if len(shape) == 1:
        return [numbers[i % len(numbers)] for i in range(shape[0])]
    size = math.prod(shape[1:])
    shift = [(i * size) % len(numbers) for i in range(shape[0])]
    return [fill(shape[1:], numbers[s:] + numbers[:s]) for s in shift]


def plus(a, b):
    """a + b of nested lists, as short decimals; NaN where either is."""
    if isinstance(a, list):
        return [plus(x, y) for x, y in zip(a, b, strict=True)]
    return NAN if NAN in (a, b) else round(a + b, 6)


def poison(x, mask, value=NAN):
    """x with `value` outside the mask."""
    return [[n if on else value for n, on in zip(*rows, strict=True)] for rows in zip(x, mask, strict=True)]


# --- collecting cases


class Book:
    """All cases so far, by function."""

    def __init__(self):
        self.cases = {formula: [] for formula in f.FORMULAS}
        self.rules = {}

    def add(self, formula, name, inputs, cotangent=None, **options):
        """One case: the formula applied to the inputs, its gradients confirmed."""
        numbers, settings = exact(inputs), exact(options)
        if cotangent is not None:
            settings["cotangent"] = exact(cotangent)
        result = formula(**numbers, **settings)
        for argument, gradient in result.get("gradients", {}).items():
            confirm(formula, name, numbers, settings, argument, gradient)
        given = {} if cotangent is None else {"cotangent": cotangent}
        case = {"name": name, "inputs": inputs, "options": options} | given | rounded(result)
        self.cases[formula].append(copy.deepcopy(case))

    def rule(self, function, name, value, **inputs):
        """One case of a rule-based function, its value given by hand."""
        self.rules.setdefault(function, []).append({"name": name, "inputs": inputs, "options": {}, "value": value})

    def files(self):
        """Name and text of every file."""
        modules = {}
        for formula, cases in self.cases.items():
            assert cases, f"{formula.__name__} has no case"
            entry = {
                "function": f"{formula.module}.{formula.__name__}",
                "source": formula.source,
                "derivation": " ".join(formula.__doc__.split()),
                "conventions": formula.conventions,
                "constants": formula.constants,
                "cases": cases,
            }
            modules.setdefault(formula.module, []).append(entry)
        for function, cases in self.rules.items():
            entry = {"function": f"{VERIFIERS}.{function}", "source": RULES[function], "derivation": "by hand",
                     "conventions": None, "constants": [], "cases": cases}  # fmt: skip
            modules.setdefault(VERIFIERS, []).append(entry)
        for module, functions in modules.items():
            yield module.split(".")[-1] + ".json", layout({"module": module, "functions": functions}) + "\n"


def confirm(formula, name, numbers, settings, argument, gradient):
    """Raise unless the gradient equals the central differences of Σ cotangent · value."""

    def height(change, place):
        moved = copy.copy(numbers)
        moved[argument] = copy.deepcopy(numbers[argument])
        row, index = list(slots(moved[argument]))[place]
        row[index] += change
        value = formula(**moved, **settings)["value"]
        return f.dot(flat(value), flat(settings["cotangent"])) if "cotangent" in settings else value

    for place, (number, slope) in enumerate(zip(flat(numbers[argument]), flat(gradient), strict=True)):
        if number.is_finite():
            difference = (height(STEP, place) - height(-STEP, place)) / (2 * STEP)
        else:
            difference = f.ZERO
        if not abs(difference - slope) <= Decimal("1e-14") * max(1, abs(slope)):
            raise ValueError(f"{formula.__name__}, {name}, {argument}[{place}]: {slope} by hand, {difference} measured")


def layout(x, indent=""):
    """JSON that can be read: dicts of lists over several lines, a list of numbers on one."""
    inner = indent + " "
    if isinstance(x, dict) and any(isinstance(value, (dict, list)) for value in x.values()):
        lines = [f"{inner}{json.dumps(key)}: {layout(value, inner)}" for key, value in x.items()]
    elif isinstance(x, list) and x and isinstance(x[0], dict):
        lines = [inner + layout(value, inner) for value in x]
    else:
        return json.dumps(x, ensure_ascii=False, allow_nan=False)
    begin, end = "{}" if isinstance(x, dict) else "[]"
    return begin + "\n" + ",\n".join(lines) + f"\n{indent}{end}"


# --- the inputs that several functions share

WEIGHTS = (0.5, -1.0, 2.0, 0.25, -1.5, 1.0, 0.75)
MASK = [[0, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 0, 0]]  # a prompt; unequal lengths 4, 2, 5, 1
ROW_WITHOUT = [[0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
EMPTY = [[0, 0, 0], [0, 0, 0]]
OLD = fill((4, 5), (-1.2, -0.6, -2.5, -0.7, -0.9, -1.7, -3.1))
MOVED = [  # log-ratios: ratios 1.65, 0.61, 1.25 and 0.74 with either sign of the advantage, others inside 1 ± 0.2
    [0.1, 0.5, -0.5, 0.22, -0.3],
    [0.05, -0.05, 0.4, 0.4, 0.4],
    [0.5, -0.5, 0.22, -0.3, 0.0],
    [0.3, 0.3, 0.1, 0.3, 0.3],
]
NEW = plus(OLD, MOVED)
REF = plus(OLD, fill((4, 5), (0.3, -0.2, 0.1, -0.4, 0.0, 0.6)))
ADVANTAGES = [
    [3.0, 1.2, 0.7, 0.4, 2.0],
    [0.9, -1.1, 5.0, 5.0, 5.0],
    [-1.5, -0.8, -0.6, -0.25, -1.0],
    [4.0, 4.0, 0.35, 4.0, 4.0],
]
ROW_ADVANTAGES = [1.0, -0.5, -1.25, 0.75]


def small(mask, **entries):
    """The inputs of a 2 x 3 loss with the same number at every place of each."""
    return {name: fill((2, 3), [number]) for name, number in entries.items()} | {"mask": mask}


def masked_cases(book):
    x = [[1.5, -2.0, 0.25, 3.0], [0.5, -1.25, 4.0, 0.75], [2.0, 0.125, -3.5, 1.0]]
    gaps = [[1, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 0]]
    nothing_in_row = [[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]]
    masks = {"mask with gaps, NaN outside": gaps, "an empty row and an empty column": nothing_in_row}
    for formula in (f.masked_sum, f.masked_mean):
        for about, mask in masks.items():
            book.add(formula, f"{about}, all", {"x": poison(x, mask), "mask": mask})
            for dim, size in ((0, 4), (1, 3)):
                inputs = {"x": poison(x, mask), "mask": mask}
                book.add(formula, f"{about}, dim {dim}", inputs, fill((size,), WEIGHTS), dim=dim)
        book.add(formula, "full mask", {"x": x, "mask": f.everywhere(x)})
        book.add(formula, "single entry", {"x": [[7.5]], "mask": [[1]]})
        book.add(formula, "empty mask", {"x": fill((2, 3), [NAN, 1.0]), "mask": EMPTY})
        inputs = {"x": poison(x, gaps, MINUS_INFINITY), "mask": gaps}
        book.add(formula, "infinite outside", inputs, fill((3,), WEIGHTS), dim=1)

    weights = fill((3, 4), WEIGHTS)
    book.add(f.masked_whiten, "mask with gaps, NaN outside", {"x": poison(x, gaps), "mask": gaps}, weights)
    book.add(f.masked_whiten, "full mask", {"x": x, "mask": f.everywhere(x)}, weights)
    book.add(f.masked_whiten, "large eps", {"x": x, "mask": gaps}, weights, eps=0.1)
    rows = {"x": [[1.0, 2.0, 3.0, 0.0, 0.0], [4.0, 5.0, 0.0, 0.0, 0.0]], "mask": [[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]}
    book.add(f.masked_whiten, "padding is no zero", rows, fill((2, 5), WEIGHTS))
    for name, values, mask in (
        ("single entry", [5.0, 1.0], [1, 0]), ("empty mask", [5.0, NAN], [0, 0]),
        ("equal entries", [0.7, 0.7, 0.7, 9.0], [1, 1, 1, 0]),
        ("rounding noise", [0.3, 0.30000000000000004, 0.3], [1, 1, 1]),
        ("deviation too small for such large values", [1e6, 1e6 + 0.5], [1, 1]),
        ("deviation too small for any values", [0.0, 1e-7], [1, 1]),
    ):  # fmt: skip
        book.add(f.masked_whiten, name, {"x": [values], "mask": [mask]})
    for name, values in (("two entries", [3.0, 1.0]), ("small but real", [0.0, 1e-5]), ("offset", [1e3, 1e3 + 0.5])):
        book.add(f.masked_whiten, name, {"x": [values], "mask": [[1, 1]]}, [[1.0, 0.5]])

    logits = fill((2, 3, 4), (0.5, -1.0, 2.0, 0.25, -0.75, 1.5, 0.0))
    actions = [[2, 0, 3], [1, 1, 0]]
    for temperature in (1.0, 0.7, 2.0):
        inputs = {"logits": logits, "actions": actions}
        book.add(f.token_logprobs, f"temperature {temperature}", inputs, fill((2, 3), WEIGHTS), temperature=temperature)
    for action in range(3):
        inputs = {"logits": [[[2.0, 1.0, 0.0]]], "actions": [[action]]}
        book.add(f.token_logprobs, f"action {action} of 3, temperature 0.5", inputs, [[1.0]], temperature=0.5)
    forbidden = [[[MINUS_INFINITY, 1.0, 0.5], [2.0, MINUS_INFINITY, MINUS_INFINITY], [0.0, 0.0, 0.0]]]
    weights = [[1.0, -0.5, 2.0]]
    book.add(f.token_logprobs, "forbidden ids", {"logits": forbidden, "actions": [[2, 0, 1]]}, weights)
    extreme = [[[1000.0, -1000.0, 999.0], [-1000.0, -1000.0, -1000.0], [40.0, 0.0, 0.0]]]
    book.add(f.token_logprobs, "extreme logits", {"logits": extreme, "actions": [[1, 2, 0]]}, weights)
    book.add(f.entropy, "several", {"logits": logits}, fill((2, 3), WEIGHTS))
    book.add(f.entropy, "forbidden ids, and uniform", {"logits": forbidden}, weights)
    book.add(f.entropy, "extreme logits", {"logits": extreme}, weights)
    book.add(f.entropy, "a single id", {"logits": [[[3.0]]]}, [[1.0]])


def kl_cases(book):
    p, q = [math.log(7), math.log(2), 0.0], [math.log(5), math.log(3), math.log(2)]
    p, q = [round(z, 12) for z in p], [round(z, 12) for z in q]
    pairs = {
        "policy (0.7, 0.2, 0.1), reference (0.5, 0.3, 0.2)": (
            [[-0.35667494393873245, -1.6094379124341003, -2.3025850929940455]],
            [[-0.6931471805599453, -1.203972804325936, -1.6094379124341003]],
        ),
        "either sign": ([[-1.0, -1.3, -2.0], [-0.5, -4.0, -0.1]], [[-1.3, -1.0, -2.0], [-0.75, -1.5, -2.6]]),
        "nearly equal": ([[-1.0, -1.0, -2.0]], [[-1.000001, -0.999999, -2.0000001]]),
        "far apart": ([[-0.01, -12.0]], [[-12.0, -0.01]]),
        "old and new of three steps": ([[-1.5, -1.4, -0.9]], [[-1.0, -1.0, -1.0]]),
    }
    for formula in (f.k1, f.k2, f.k3):
        for name, (logprobs, ref_logprobs) in pairs.items():
            weights = fill((len(logprobs), len(logprobs[0])), WEIGHTS)
            book.add(formula, name, {"logprobs": logprobs, "ref_logprobs": ref_logprobs}, weights)
    for name, p_logits, q_logits in (
        ("(0.7, 0.2, 0.1) and (0.5, 0.3, 0.2)", [p], [q]),
        ("either direction, and equal", [p, q, p], [q, p, p]),
        ("shifted logits are the same distribution", [[1.0, 0.0, -1.0]], [[101.0, 100.0, 99.0]]),
        ("both forbid an id", [[1.0, MINUS_INFINITY, 0.0]], [[0.0, MINUS_INFINITY, 0.5]]),
        ("p forbids an id", [[1.0, MINUS_INFINITY, 0.0]], [[0.0, 2.0, 0.5]]),
        ("extreme logits", [[800.0, 0.0, -800.0]], [[-30.0, 0.0, 30.0]]),
    ):
        inputs = {"p_logits": p_logits, "q_logits": q_logits}
        book.add(f.categorical_kl, name, inputs, fill((len(p_logits),), WEIGHTS))
    inputs = {"p_logits": [[1.0, 2.0, 0.0]], "q_logits": [[0.0, MINUS_INFINITY, 0.5]]}
    book.add(f.categorical_kl, "q forbids what p does not", inputs)
    six = {"p_mean": [[0.0] * 6], "p_std": [[0.6] * 6], "q_mean": [[0.1] * 6], "q_std": [[0.6] * 6]}
    book.add(f.gaussian_kl, "six means moved by 0.1 at deviation 0.6", six, [1.0])
    inputs = {
        "p_mean": [[0.5, -1.0], [0.0, 2.0], [1.0, 1.0]], "p_std": [[0.5, 2.0], [1.0, 0.1], [0.7, 0.7]],
        "q_mean": [[0.0, -1.5], [0.0, 2.0], [1.0, 1.0]], "q_std": [[1.0, 1.5], [0.3, 0.4], [0.7, 0.7]],
    }  # fmt: skip
    book.add(f.gaussian_kl, "several, the last pair equal", inputs, [0.5, -1.0, 2.0])


def returns_cases(book):
    rewards = [[1.0, -0.5, 2.0, 0.25, 3.0, -1.0], [0.5, 0.5, 1.5, -2.0, 0.75, 1.0]]
    ends = {
        "terminated": [[0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], "truncated": [[0, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0]],
    }  # fmt: skip
    open_end = {"terminated": [[0] * 6] * 2, "truncated": [[0] * 6] * 2}
    for gamma in (0.9, 1.0, 0.0):
        book.add(f.rewards_to_go, f"ends in mid-rollout, gamma {gamma}", {"rewards": rewards} | ends, gamma=gamma)
    book.add(f.rewards_to_go, "no end in sight", {"rewards": rewards} | open_end, gamma=0.99)
    book.add(f.rewards_to_go, "both flags", {"rewards": [[1.0, 2.0, 4.0]], "terminated": [[0, 1, 0]],
             "truncated": [[0, 1, 0]]}, gamma=0.5)  # fmt: skip
    book.add(f.rewards_to_go, "one step", {"rewards": [[2.5]], "terminated": [[1]], "truncated": [[0]]}, gamma=0.99)

    settings = {"gamma": 0.99, "lam": 0.95}
    ones = {"rewards": [[1.0, 1.0, 1.0]], "values": [[0.5, 0.6, 0.7]], "next_values": [[0.6, 0.7, 0.8]]}
    for name, terminated, truncated in (("a time limit", 0, 1), ("a true end", 1, 0), ("both, terminated wins", 1, 1)):
        flags = {"terminated": [[0, 0, terminated]], "truncated": [[0, 0, truncated]]}
        book.add(f.gae, name, ones | flags, **settings)
    cut = {"rewards": [[1.0, 2.0, 3.0]], "values": [[0.5, 0.6, 0.7]], "next_values": [[0.6, 0.8, 0.9]]}
    book.add(f.gae, "a time limit in mid-rollout",
             cut | {"terminated": [[0, 0, 0]], "truncated": [[0, 1, 0]]}, **settings)  # fmt: skip
    answer = {"rewards": [[-0.02, 0.01, 0.97, 0.0, 0.0]], "values": [[0.0] * 5], "next_values": [[0.0] * 5],
              "terminated": [[0, 0, 1, 0, 0]], "truncated": [[0] * 5]}  # fmt: skip
    book.add(f.gae, "a completion with padding", answer, gamma=1.0, lam=0.95)
    long = {"rewards": rewards, "values": [[0.5, 1.0, -0.3, 0.8, 1.2, 0.1], [0.2, 0.4, -1.0, 0.6, 0.9, 0.3]],
            "next_values": [[1.0, 100.0, 0.8, 2.5, 0.1, -0.6], [0.4, 0.7, 1.1, 0.9, 0.3, -50.0]]}  # fmt: skip
    for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.9, 1.0), (0.9, 0.0), (0.0, 0.95)):
        book.add(f.gae, f"all kinds of ends, gamma {gamma}, lambda {lam}", long | ends, gamma=gamma, lam=lam)
    book.add(f.gae, "no end in sight", long | open_end, gamma=0.97, lam=0.9)

    fits = {"scores": [1.0, -0.5, 0.75, 2.0], "logprobs": NEW, "ref_logprobs": REF, "mask": MASK}
    book.add(f.token_rewards, "unequal lengths", fits, kl_coef=0.1)
    nans = {"logprobs": poison(NEW, ROW_WITHOUT), "ref_logprobs": poison(REF, ROW_WITHOUT), "mask": ROW_WITHOUT}
    book.add(f.token_rewards, "NaN outside, and a row without tokens", fits | nans, kl_coef=0.5)
    book.add(f.token_rewards, "no penalty", fits, kl_coef=0.0)
    short = {"scores": [1.0], "logprobs": [[-0.8, -1.1, -0.7, -9.0, -9.0]], "ref_logprobs": [[-1.0] * 3 + [0.0] * 2]}
    book.add(f.token_rewards, "end token, then padding", short | {"mask": [[1, 1, 1, 0, 0]]}, kl_coef=0.1)
    book.add(f.token_rewards, "end token only", short | {"mask": [[1, 0, 0, 0, 0]]}, kl_coef=0.1)
    book.add(f.token_rewards, "a gap in the mask", short | {"mask": [[1, 0, 0, 1, 0]]}, kl_coef=0.1)

    returns, mask = [[1.0, 2.0, 4.0], [3.0, 0.5, 9.0]], [[1, 1, 1], [1, 1, 0]]
    for name, values in (
        ("a fair critic", [[1.5, 1.5, 3.0], [2.5, 1.0, 0.0]]), ("a perfect critic", returns),
        ("only the mean", [[2.0] * 3] * 2), ("worse than the mean", [[4.0, 0.5, 1.0], [-2.0, 3.0, 1.0]]),
        ("a constant error costs nothing", [[2.0, 3.0, 5.0], [4.0, 1.5, 0.0]]),
    ):  # fmt: skip
        book.add(f.explained_variance, name, {"values": values, "returns": returns, "mask": mask})
    values = [[1.5, 1.5, 3.0], [2.5, 1.0, NAN]]
    book.add(f.explained_variance, "NaN outside", {"values": values, "returns": poison(returns, mask), "mask": mask})
    book.add(f.explained_variance, "no mask", {"values": [[1.5, 1.0, 3.0]], "returns": [[1.0, 2.0, 4.0]], "mask": None})
    constant = {"values": [[1.0, 3.0]], "returns": [[2.0, 2.0]]}
    book.add(f.explained_variance, "returns that do not vary", constant | {"mask": [[1, 1]]})
    book.add(f.explained_variance, "single entry", constant | {"mask": [[1, 0]]})
    book.add(f.explained_variance, "empty mask", constant | {"mask": [[0, 0]]})


def sft_cases(book):
    ids = [1, 2, 3, 4, 9, 9, 9]  # prompt 1 2, response 3 4, end token 9, and padding that looks like the end token
    logits = [[[round(math.sin(0.7 * t + 1.3 * v), 6) for v in range(10)] for t in range(6)]]
    for name, mask in (("padding id equals end id", [[0, 1, 1, 1, 0, 0]]), ("one token", [[0, 0, 0, 1, 0, 0]])):
        book.add(f.sft_loss, name, {"logits": logits, "actions": [ids[1:]], "mask": mask})
    logits = fill((4, 5, 3), (0.5, -1.0, 2.0, 0.25, -0.75, 1.5, 0.1))
    for b, t in f.cells([[not on for on in row] for row in MASK]):
        logits[b][t] = [300.0, -400.0, 500.0]
    inputs = {"logits": logits, "actions": fill((4, 5), (2, 0, 1, 1)), "mask": MASK}
    book.add(f.sft_loss, "unequal lengths, huge logits outside", inputs)
    inputs = {"logits": fill((2, 3, 2), [1.0, 2.0, 0.5]), "actions": fill((2, 3), [0]), "mask": EMPTY}
    book.add(f.sft_loss, "empty mask", inputs)
    extreme = {"logits": [[[-500.0, 500.0], [1.0, MINUS_INFINITY]]], "actions": [[0, 0]], "mask": [[1, 1]]}
    book.add(f.sft_loss, "extreme and forbidden", extreme)

    book.add(f.likelihood_loss, "unequal lengths, NaN outside", {"logprobs": poison(NEW, MASK), "mask": MASK})
    book.add(f.likelihood_loss, "a row without tokens", {"logprobs": NEW, "mask": ROW_WITHOUT})
    book.add(f.likelihood_loss, "empty mask", small(EMPTY, logprobs=-0.5))


def reinforce_cases(book):
    for reduction in ("token", "trajectory"):
        for name, mask in (("unequal lengths", MASK), ("a row without tokens", ROW_WITHOUT)):
            inputs = {"logprobs": poison(OLD, mask), "advantages": poison(ADVANTAGES, mask), "mask": mask}
            book.add(f.policy_gradient_loss, f"{reduction}, {name}, NaN outside", inputs, reduction=reduction)
        inputs = {"logprobs": poison(OLD, MASK, -1e300), "advantages": poison(ADVANTAGES, MASK, 1e300), "mask": MASK}
        book.add(f.policy_gradient_loss, f"{reduction}, huge numbers outside", inputs, reduction=reduction)
        inputs = small(EMPTY, logprobs=-1.0, advantages=2.0)
        book.add(f.policy_gradient_loss, f"{reduction}, empty mask", inputs, reduction=reduction)
        inputs = {"logprobs": [[-1.5]], "advantages": [[2.0]], "mask": [[1]]}
        book.add(f.policy_gradient_loss, f"{reduction}, single entry", inputs, reduction=reduction)
    for name, scores, size in (
        ("two groups of four", [1.0, 0.0, 0.0, 1.0, 3.0, -1.0, 0.5, 0.25], 4),
        ("groups of two", [1.0, 0.0, 2.0, 5.0], 2),
        ("equal scores", [0.5, 0.5, 0.5], 3), ("one right answer of three", [0.0, 1.0, 0.0], 3),
    ):  # fmt: skip
        book.add(f.leave_one_out, name, {"scores": scores}, group_size=size)
    for decay in (0.9, 0.5, 0.0):
        book.add(f.EMABaseline, f"decay {decay}", {"returns": [1.0, 0.5, -2.0, 3.0, 3.0, 0.25]}, decay=decay)
    book.add(f.EMABaseline, "a constant return from the first update on", {"returns": [2.0, 2.0, 2.0]}, decay=0.99)


def trpo_cases(book):
    inputs = {"logprobs": NEW, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK}
    surrogate_cases(book, f.surrogate_loss, inputs)

    diagonal = {"matrix": [[4.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 0.25]], "b": [1.0, 1.0, 1.0]}
    dense = {"matrix": [[2.0, 0.5, 0.25, 0.0], [0.5, 1.5, -0.5, 0.1], [0.25, -0.5, 1.0, 0.2], [0.0, 0.1, 0.2, 0.75]],
             "b": [1.0, -2.0, 0.5, 1.5]}  # fmt: skip
    for iterations in (1, 2, 3):
        book.add(f.conjugate_gradient, f"diagonal, {iterations} iterations", diagonal, iterations=iterations)
        book.add(f.conjugate_gradient, f"dense, {iterations} iterations", dense, iterations=iterations)
    book.add(f.conjugate_gradient, "dense, solved", dense)
    book.add(f.conjugate_gradient, "stops at the tolerance", dense, tolerance=0.3)
    book.add(f.conjugate_gradient, "b is 0", diagonal | {"b": [0.0, 0.0, 0.0]})
    identity = [[3.0, 0.0], [0.0, 3.0]]
    book.add(f.conjugate_gradient, "one eigenvalue, one iteration", {"matrix": identity, "b": [1.0, -2.0]})
    book.add(f.conjugate_gradient, "negative curvature", {"matrix": [[1.0, 0.0], [0.0, -2.0]], "b": [1.0, 1.0]})

    one = {"distribution": "categorical", "weight": [[1.0], [0.0], [-1.0]]}
    two = {"distribution": "categorical", "weight": [[0.5, -1.0], [0.25, 0.75], [-0.5, 0.1]]}
    gauss = {"distribution": "gaussian", "weight": [[0.3, -0.2], [0.1, 0.5]], "log_std": [math.log(0.5), math.log(2)]}
    gauss["log_std"] = [round(s, 12) for s in gauss["log_std"]]
    obs = [[[1.0, 0.5], [1.0, -0.25], [7.0, 7.0]], [[1.0, 2.0], [-9.0, 4.0], [1.0, -1.5]]]
    mask = [[1, 1, 0], [1, 0, 1]]
    single = {"policy": one, "obs": [[[1.0]]], "mask": [[1]], "vector": [1.0, 2.0, 3.0]}
    flat_gauss = {"policy": gauss | {"weight": [[0.0], [0.0]]}, "vector": [1.0, 1.0, 1.0, 1.0]}
    for damping in (0.0, 0.1):
        book.add(f.fisher_vector_product, f"logits (1, 0, -1), damping {damping}", single, damping=damping)
        inputs = {"policy": two, "obs": obs, "mask": mask, "vector": [1.0, -0.5, 0.25, 2.0, -1.0, 0.5]}
        book.add(f.fisher_vector_product, f"two features, masked, damping {damping}", inputs, damping=damping)
        inputs_of_gauss = single | flat_gauss
        book.add(f.fisher_vector_product, f"deviations 0.5 and 2, damping {damping}", inputs_of_gauss, damping=damping)
        book.add(f.fisher_vector_product, f"Gaussian, two features, masked, damping {damping}",
                 inputs | {"policy": gauss}, damping=damping)  # fmt: skip

    three = {"obs": [[[1.0]] * 3], "actions": [[0, 1, 2]], "advantages": [[0.9, -0.3, -0.6]], "mask": [[1, 1, 1]]}
    advantages = [[1.0, -0.5, NAN], [0.75, NAN, -1.25]]
    words = {"obs": obs, "actions": [[0, 2, 1], [1, 0, 2]], "advantages": advantages, "mask": mask}
    sure = {"distribution": "categorical", "weight": [[4.0], [0.0], [-1.0]]}
    away = three | {"advantages": [[-0.9, 0.3, 0.6]]}
    unit = {"distribution": "gaussian", "weight": [[0.0]], "log_std": [0.0]}
    beyond = {"obs": [[[1.0]]], "actions": [[[1.0]]], "advantages": [[1.0]], "mask": [[1]]}
    motors = words | {"actions": [[[0.6, -0.4], [0.1, 1.5], [0.0, 0.0]], [[-0.5, 2.0], [0.0, 0.0], [1.2, -3.0]]]}
    for name, policy, inputs, options in (
        ("logits (1, 0, -1), gradient (0.3, -0.1, -0.2)", one, three, {}),
        ("two features, masked, NaN outside", two, words, {}),
        ("KL too large for three tries", sure, away, {"delta": 0.1, "damping": 0.001}),
        ("KL too large, halves", sure, away, {"delta": 0.1, "damping": 0.001, "backtrack": 0.5}),
        ("gives up", sure, away, {"delta": 0.1, "damping": 0.001, "max_backtracks": 2}),
        ("within the KL, yet a worse surrogate at first", unit, beyond, {"delta": 3.0}),
        ("few iterations", two, words, {"iterations": 2}),
        ("nothing to gain", two, words | {"advantages": [[0.0] * 3] * 2}, {}),
        ("Gaussian", gauss, motors, {}),
        ("Gaussian, a wide region", gauss, motors, {"delta": 0.3, "damping": 0.001}),
    ):
        old = [[logprob(policy, o, a) if on else NAN for o, a, on in zip(*rows, strict=True)]
               for rows in zip(inputs["obs"], inputs["actions"], inputs["mask"], strict=True)]  # fmt: skip
        book.add(f.trust_region_step, name, {"policy": policy} | inputs | {"old_logprobs": old}, **options)


def logprob(policy, obs, action):
    """log π(action | obs) as a float64."""
    model = f.Policy(**exact(policy))
    return float(model.log_prob(model.theta, exact(obs), exact(action)))


def surrogate_cases(book, formula, inputs, **options):
    """The cases that every loss with a ratio has; inputs as for MASK."""
    book.add(formula, "ratios on both sides, both signs", inputs, **options)
    with_nan = {name: poison(value, MASK) for name, value in inputs.items() if name != "mask"}
    book.add(formula, "NaN outside the mask", with_nan | {"mask": MASK}, **options)
    outside = {"logprobs": poison(NEW, MASK, 0.0), "old_logprobs": poison(OLD, MASK, -1000.0)}
    book.add(formula, "infinite ratios outside the mask", inputs | outside, **options)
    book.add(formula, "a row without tokens", inputs | {"mask": ROW_WITHOUT}, **options)
    book.add(formula, "first pass, all ratios 1", inputs | {"logprobs": OLD}, **options)
    constants = {name: number for name, number in (("ref_logprobs", -1.25), ("kl", 0.01)) if name in inputs}
    numbers = {"logprobs": -0.5, "old_logprobs": -1.0} | constants | {"advantages": 2.0}
    book.add(formula, "empty mask", small(EMPTY, **numbers), **options)
    single = {name: [[number]] for name, number in numbers.items()}
    book.add(formula, "single entry", single | {"mask": [[1]]}, **options)


def ppo_cases(book):
    ratio = [[1.6, 0.6, 1.25, 0.75, 1.05], [1.6, 0.6, 1.25, 0.75, 0.9], [1.0, 1.0, 1.5, 0.5, 1e30]]
    advantages = [[1.5] * 5, [-1.5] * 5, [2.0, -2.0, 0.0, 0.0, -1.0]]
    inputs = {"logprobs": NEW, "old_logprobs": OLD, "advantages": ADVANTAGES, "mask": MASK}
    for name, clip in (("clip 0.2", 0.2), ("low 0.2, high 0.28", [0.2, 0.28]), ("low 0.3, high 0.1", [0.3, 0.1])):
        both = {"ratio": ratio, "advantages": advantages}
        book.add(f.clipped_surrogate, name, both, fill((3, 5), (0.5, -1.0, 2.0, 0.25)), clip=clip)
        book.add(f.clipped_surrogate_loss, name, inputs, clip=clip)
    surrogate_cases(book, f.clipped_surrogate_loss, inputs)

    critic = {
        "values": [
            [9.0, 0.6, -0.2, 1.5, 0.4], [1.0, 2.0, 9.0, 9.0, 9.0], [0.1, 0.9, -1.0, 0.0, 0.3],
            [9.0, 9.0, 0.7, 9.0, 9.0],
        ],
        "old_values": [
            [9.0, 0.5, 0.3, 1.0, 0.9], [0.9, 1.4, 0.0, 0.0, 0.0], [0.6, 0.3, -0.97, 0.1, 0.3],
            [9.0, 9.0, 0.2, 9.0, 9.0],
        ],
        "returns": [
            [0.0, 1.0, 0.4, 2.0, 0.0], [1.5, 1.0, 0.0, 0.0, 0.0], [0.5, 1.5, -0.5, 0.3, 0.3],
            [0.0, 0.0, 0.1, 0.0, 0.0],
        ],
    }  # fmt: skip
    for clip in (None, 0.2, 0.05):
        book.add(f.value_loss, f"clip {clip}", critic | {"mask": MASK}, clip=clip)
        nans = {name: poison(value, MASK) for name, value in critic.items()}
        book.add(f.value_loss, f"clip {clip}, NaN outside the mask", nans | {"mask": MASK}, clip=clip)
        nothing = small(EMPTY, values=1.0, old_values=0.5, returns=2.0)
        book.add(f.value_loss, f"clip {clip}, empty mask", nothing, clip=clip)
        single = {"values": [[1.5]], "old_values": [[1.0]], "returns": [[2.0]], "mask": [[1]]}
        book.add(f.value_loss, f"clip {clip}, single entry", single, clip=clip)


def ppo_kl_cases(book):
    inputs = {"logprobs": NEW, "old_logprobs": OLD, "advantages": ADVANTAGES,
              "kl": fill((4, 5), (0.02, 0.005, 0.0, 0.11, 0.04, 0.3)), "mask": MASK}  # fmt: skip
    surrogate_cases(book, f.kl_penalty_loss, inputs)
    for beta in (0.0, 0.3, 10.0):
        book.add(f.kl_penalty_loss, f"beta {beta}", inputs, beta=beta)
    for kl in (0.0, 0.006, 0.007, 0.01, 0.0149, 0.0151, 0.4):
        book.add(f.adapt_beta, f"KL {kl}", {"beta": 0.5, "kl": kl, "target": 0.01})


def grpo_cases(book):
    groups = {
        "two of four right": ([1.0, 0.0, 0.0, 1.0], 4), "one of four right": ([1.0, 0.0, 0.0, 0.0], 4),
        "two groups of different level": ([1.0, 2.0, 4.5, -10.0, -11.0, -12.5], 3), "all right": ([1.0] * 4, 4),
        "all wrong, then not": ([0.0, 0.0, 0.25, 0.75], 2), "equal but for rounding": ([0.7, 0.7000000000000001], 2),
        "deviation too small for such large scores": ([1e6, 1e6 + 1.0], 2), "small but real": ([0.0, 1e-4, 2e-4], 3),
        "deviation too small for any scores": ([0.0, 1e-7], 2),
    }  # fmt: skip
    for scale in (True, False):
        for name, (scores, size) in groups.items():
            book.add(f.group_advantages, f"{name}, scale {scale}", {"scores": scores}, group_size=size, scale=scale)
    book.add(f.group_advantages, "large eps", {"scores": [1.0, 0.0, 0.0, 1.0]}, group_size=4, eps=0.5)

    rewards = [[9.0, 1.0, 9.0, 0.0], [0.5, 9.0, 9.0, 9.0], [9.0, 9.0, 0.25, 9.0], [9.0, 1.0, 2.0, 9.0]]
    ends = [[0, 1, 0, 1], [1, 0, 0, 0], [0, 0, 1, 0], [0, 1, 1, 0]]
    for name, step_rewards, step_ends, size in (
        ("two groups of two, NaN elsewhere", poison(rewards, ends), ends, 2), ("one group of four", rewards, ends, 4),
        ("one step in each row", [[0.0, 1.0], [0.0, 3.0]], [[0, 1], [0, 1]], 2),
        ("equal rewards", [[0.5, 0.5], [9.0, 0.5]], [[1, 1], [0, 1]], 2),
        ("a single step", [[0.5, 9.0], [9.0, 9.0]], [[1, 0], [0, 0]], 2),
        ("no step", [[9.0, 9.0], [9.0, 9.0]], [[0, 0], [0, 0]], 2),
    ):  # fmt: skip
        inputs = {"step_rewards": step_rewards, "step_ends": step_ends}
        book.add(f.process_supervision_advantages, name, inputs, group_size=size)

    inputs = {"logprobs": NEW, "old_logprobs": OLD, "ref_logprobs": REF}
    for kind in ("k1", "k2", "k3", "k3_weighted"):
        book.add(f.kl_in_loss, kind, inputs, fill((4, 5), WEIGHTS), kind=kind)

    inputs = inputs | {"advantages": ROW_ADVANTAGES, "mask": MASK}
    per_token = inputs | {"advantages": ADVANTAGES}
    for reduction in ("sequence", "token", "constant"):
        for about, given in (("row", inputs), ("token", per_token)):
            name = f"{reduction}, advantages per {about}"
            book.add(f.grpo_loss, f"{name}, beta 0", given, reduction=reduction)
            for kl in ("k1", "k2", "k3", "k3_weighted"):
                book.add(f.grpo_loss, f"{name}, beta 0.3, {kl}", given, beta=0.3, reduction=reduction, kl=kl)
        book.add(f.grpo_loss, f"{reduction}, a row without tokens", inputs | {"mask": ROW_WITHOUT}, beta=0.04,
                 reduction=reduction)  # fmt: skip
        nothing = small(EMPTY, logprobs=-0.5, old_logprobs=-1.0, ref_logprobs=-1.0, advantages=2.0)
        book.add(f.grpo_loss, f"{reduction}, no tokens", nothing, beta=0.04, reduction=reduction)
    surrogate_cases(book, f.grpo_loss, per_token, beta=0.04)
    book.add(f.grpo_loss, "no reference", inputs | {"ref_logprobs": None})
    book.add(f.grpo_loss, "low 0.2, high 0.28", per_token, clip=[0.2, 0.28])
    book.add(f.grpo_loss, "low 0.3, high 0.1", per_token, clip=[0.3, 0.1])
    book.add(f.grpo_loss, "no lower bound, high 10", per_token, clip=10.0)
    book.add(f.grpo_loss, "constant, length 8", inputs, reduction="constant", normalizer_length=8)


def reward_model_cases(book):
    scores = {"chosen_scores": [1.5, -0.5, 0.25, 2.0, 0.7], "rejected_scores": [0.5, 0.75, 0.25, -3.0, 0.6]}
    for centering in (0.0, 0.01, 0.5):
        for name, margin in (("no margin", None), ("margins", [1.0, 0.0, 0.5, 0.25, 2.0])):
            inputs = scores | {"margin": margin}
            book.add(f.bradley_terry_loss, f"{name}, centering {centering}", inputs, centering=centering)
    for name, chosen, rejected in (
        ("one pair", [1.0], [0.0]), ("equal scores", [0.5, -2.0], [0.5, -2.0]),
        ("far apart, either way", [800.0, -800.0], [-800.0, 800.0]),
        ("a constant more changes nothing", [101.5, 99.5], [100.5, 100.75]),
        ("the same without it", [1.5, -0.5], [0.5, 0.75]),
    ):  # fmt: skip
        book.add(f.bradley_terry_loss, name, {"chosen_scores": chosen, "rejected_scores": rejected, "margin": None})


def segment_reward_cases(book):
    sums = {"chosen_sums": [1.5, -0.5, 0.25, 2.0, 0.75], "other_sums": [0.5, 0.75, 0.25, -3.0, 1.0]}
    for noise in (0.1, 0.5, 1.0):
        for name, mu in (("all sure", [1.0, 0.0, 1.0, 0.0, 1.0]), ("some ties", [0.5, 0.5, 1.0, 0.0, 0.5])):
            book.add(f.segment_preference_loss, f"{name}, noise {noise}", sums | {"mu": mu}, noise=noise)
    far = {"chosen_sums": [60.0, -60.0, 60.0], "other_sums": [-60.0, 60.0, -60.0], "mu": [1.0, 1.0, 0.5]}
    book.add(f.segment_preference_loss, "far apart, either way", far)


def dpo_cases(book):
    inputs = {
        "chosen_logprobs": [-12.0, -3.5, -40.25, -7.0, -1.5], "rejected_logprobs": [-15.0, -2.0, -38.0, -7.5, -1.0],
        "ref_chosen_logprobs": [-13.5, -3.0, -39.0, -6.0, -2.0],
        "ref_rejected_logprobs": [-14.0, -2.5, -39.5, -6.5, -1.5],
    }
    for beta in (0.1, 0.5, 5.0):
        for label_smoothing in (0.0, 0.1, 0.4):
            name = f"five pairs, the last two tied, beta {beta}, smoothing {label_smoothing}"
            book.add(f.dpo_loss, name, inputs, beta=beta, label_smoothing=label_smoothing)
    same = {
        f"{ref}{side}_logprobs": x for ref in ("", "ref_") for side, x in (("chosen", [-9.0]), ("rejected", [-4.0]))
    }
    book.add(f.dpo_loss, "policy equals reference", same)
    free = inputs | {"ref_chosen_logprobs": [0.0] * 5, "ref_rejected_logprobs": [0.0] * 5}
    book.add(f.dpo_loss, "no reference", free)
    zero = {"ref_chosen_logprobs": [0.0, 0.0], "ref_rejected_logprobs": [0.0, 0.0]}
    far = {"chosen_logprobs": [-1.0, -801.0], "rejected_logprobs": [-801.0, -1.0]} | zero
    book.add(f.dpo_loss, "far apart, either way", far, beta=1.0)
    book.add(f.dpo_loss, "far apart, either way, smoothing 0.25", far, beta=1.0, label_smoothing=0.25)


def orpo_cases(book):
    book.add(f.log_odds, "even, rare, likely", {"mean_logprobs": [-0.6931471805599453, -9.0, -0.05, -0.25]},
             WEIGHTS[:4])  # fmt: skip
    book.add(f.log_odds, "rarer than a float", {"mean_logprobs": [-50.0, -800.0]}, [1.0, 0.5])
    book.add(f.log_odds, "nearly certain", {"mean_logprobs": [-1e-3, -1e-5, -1e-6]}, [1.0, -0.5, 2.0])
    book.add(f.log_odds, "so certain that only the value is listed", {"mean_logprobs": [-1e-7, -1e-9, -1e-11, -1e-12]})
    book.add(f.log_odds, "certain", {"mean_logprobs": [0.0, -1e-13]}, [1.0, 1.0])
    inputs = {
        "chosen_mean_logprobs": [-0.4, -1.5, -0.05, -0.7], "rejected_mean_logprobs": [-1.2, -0.3, -2.5, -0.7],
        "chosen_nll": [0.4, 1.5, 0.05, 0.7],
    }
    for lam in (0.1, 0.0, 1.0):
        book.add(f.orpo_loss, f"four pairs, the last tied, lambda {lam}", inputs, lam=lam)
    book.add(f.orpo_loss, "prompt in the likelihood", inputs | {"chosen_nll": [2.5, 0.75, 1.25, 3.0]})
    one = {"chosen_mean_logprobs": [-0.4], "rejected_mean_logprobs": [-1.2], "chosen_nll": [0.4]}
    book.add(f.orpo_loss, "one pair", one)
    edge = {"chosen_mean_logprobs": [-1e-5, -2.0, 0.0, 0.0], "rejected_mean_logprobs": [-1.0, -1e-5, -0.5, 0.0],
            "chosen_nll": [1e-5, 2.0, 0.0, 0.0]}  # fmt: skip
    book.add(f.orpo_loss, "nearly certain and certain, on either side", edge, lam=0.5)


def q_sharp_cases(book):
    coin = [[0.5, 0.5], [0.75, 0.25], [0.99, 0.01], [1e-6, 0.999999]]
    for eta in (1.0, 0.1, 0.01, 0.001):
        book.add(f.optimal_q, f"rewards 0 and 1, eta {eta}", {"probs": coin, "support": [0.0, 1.0]},
                 fill((4,), WEIGHTS), eta=eta)  # fmt: skip
    sure = {"probs": [[1.0, 0.0], [0.0, 1.0]], "support": [0.0, 1.0]}
    for eta in (0.1, 0.001):
        book.add(f.optimal_q, f"certain outcomes, eta {eta}", sure, eta=eta)
    five = {"probs": [[0.125, 0.25, 0.25, 0.25, 0.125], [0.5, 0.125, 0.0625, 0.0625, 0.25]],
            "support": [-2.0, -1.0, 0.5, 1.0, 3.0]}  # fmt: skip
    for eta in (10.0, 0.5, 0.02):
        book.add(f.optimal_q, f"five outcomes, eta {eta}", five, [1.0, -0.5], eta=eta)

    support = [-1.0, -0.5, 0.0, 0.5, 1.0]
    single = {"probs": [[1.0]] * 6, "values": [[0.3], [0.5], [1.0], [-1.0], [3.0], [-7.5]], "support": support}
    book.add(f.project_to_support, "one mass: inside, on the grid, at its ends, beyond", single,
             fill((6, 5), WEIGHTS))  # fmt: skip
    several = {"probs": [[0.4, 0.6], [0.25, 0.75]], "values": [[0.0, 0.75], [-0.9, -0.6]], "support": support}
    book.add(f.project_to_support, "two masses", several, fill((2, 5), WEIGHTS))
    uneven = {"probs": [[0.5, 0.2, 0.3]], "values": [[0.5, 2.5, 9.0]], "support": [0.0, 1.0, 4.0, 10.0]}
    book.add(f.project_to_support, "an uneven grid", uneven, [[0.5, -1.0, 2.0, 0.25]])
    book.add(f.project_to_support, "rewards 0 and 1", {"probs": [[1.0], [1.0], [1.0]], "values": [[0.0], [1.0], [0.25]],
             "support": [0.0, 1.0]}, fill((3, 2), WEIGHTS))  # fmt: skip

    chances = (0.9, 0.2, 0.5, 0.05, 0.7, 0.35, 0.6)
    pairs = [[[round(math.log(1 - p), 6), round(math.log(p), 6)] for p in row] for row in fill((4, 5), chances)]
    poisoned = [[pair if on else [NAN, NAN] for pair, on in zip(row, ons, strict=True)]
                for row, ons in zip(pairs, MASK, strict=True)]  # fmt: skip
    binary = {"log_probs": pairs, "outcomes": [1.0, 0.0, 0.0, 1.0], "support": [0.0, 1.0]}
    book.add(f.outcome_loss, "rewards 0 and 1, NaN outside", binary | {"log_probs": poisoned, "mask": MASK})
    book.add(f.outcome_loss, "a row without steps", binary | {"mask": ROW_WITHOUT})
    book.add(f.outcome_loss, "no steps", binary | {"mask": [[0] * 5] * 4})
    real = {"log_probs": fill((2, 3, 3), (-1.5, -0.5, -1.75, -0.25, -3.0, -2.5, -1.0)), "outcomes": [0.3, 2.0],
            "support": [-1.0, 0.0, 1.0], "mask": [[1, 1, 1], [0, 1, 1]]}  # fmt: skip
    book.add(f.outcome_loss, "between the grid points, and beyond them", real)

    tilted = {"logits": [[-0.5108, -0.9163], [0.5, -1.0]], "q": [[0.2, 0.5], [0.25, 0.125]]}
    for eta in (1.0, 0.1, 0.001):
        book.add(f.guided_logits, f"two actions, eta {eta}", tilted, [[0.5, -1.0], [2.0, 0.25]], eta=eta)
    book.add(f.guided_logits, "a forbidden action has the largest q", {"logits": [[-1e9, 0.5, 0.0]],
             "q": [[1.0, 0.25, 0.5]]}, [[0.5, -1.0, 2.0]], eta=0.1)  # fmt: skip


RULES = {
    "answer_reward": "DeepSeek-R1 (2025), section 2.2.2: accuracy",
    "format_reward": "DeepSeek-R1 (2025), section 2.2.2: format",
    "expression_reward": "the countdown task: every number exactly once, + - * / and brackets, exact fractions",
}


def verifier_cases(book):
    for text in ("42", "42.0", " 42 ", "+42", "84/2", "\n42\r\n", "<answer>42</answer>", "42<|endoftext|>",
                 "<think>6*7</think>\n<answer>\n42\n</answer>", "<answer>41</answer><answer>42</answer>"):  # fmt: skip
        book.rule("answer_reward", f"right: {text}", 1.0, completion=text, gold="42")
    for text in ("", "41", "-42", "42.5", "142", "4 2", "40+2", "6*7", "the answer is 42", "0x2a", "42/0", "1e999",
                 "__import__('os')", "<answer>42</answer><answer>41</answer>", "<answer>41</answer> 42"):  # fmt: skip
        book.rule("answer_reward", f"wrong: {text}", 0.0, completion=text, gold="42")
    for text, gold, value in (("1,000", "1000", 1.0), ("1,00", "100", 0.0), ("-7", -7, 1.0), ("1/3", "0.333", 0.0),
                              ("0.1", 0.1, 1.0), ("yes", "Yes", 1.0), ("no", "yes", 0.0)):  # fmt: skip
        book.rule("answer_reward", f"{text} for {gold}", value, completion=text, gold=gold)
    thought, answer = "<think>a</think>", "<answer>b</answer>"
    for text in (thought + answer, "<think>\na\n\nc\n</think>\n<answer>\nb\n</answer>",
                 thought + "\r\n" + answer + "\r\n", thought + "\n\n" + answer, thought + answer + "\n",
                 thought + answer + "<|endoftext|>"):  # fmt: skip
        book.rule("format_reward", f"kept: {text}", 1.0, completion=text)
    for text in ("", "b", answer, thought, answer + thought, thought + answer + "c", "c" + thought + answer,
                 thought + "c" + answer, thought + answer + answer, thought + thought + answer,
                 "<think>a<answer>b</answer>", "<think>a" + answer + "</think>",
                 "<Think>a</Think>" + answer):  # fmt: skip
        book.rule("format_reward", f"broken: {text}", 0.0, completion=text)
    for text, numbers, target, value in (
        ("(1+2)*3", [1, 2, 3], 9, 1.0), ("<answer> 3 * (2 + 1) </answer>", [1, 2, 3], 9, 1.0),
        ("1+2*3", [1, 2, 3], 7, 1.0), ("1+2*3", [1, 2, 3], 9, 0.0), ("1/3*3", [1, 3, 3], 1, 1.0),
        ("8-4-2", [8, 4, 2], 2, 1.0), ("8/4/2", [8, 4, 2], 1, 1.0), ("-1+3", [1, 3], 2, 1.0),
        ("1+2", [1, 2, 3], 3, 0.0), ("3+3+3", [1, 2, 3], 9, 0.0), ("9", [1, 2, 3], 9, 0.0), ("3*3", [3], 9, 0.0),
        ("12-3", [1, 2, 3], 9, 0.0), ("1/0", [1, 0], 1, 0.0), ("2**3", [2, 3], 8, 0.0), ("(1+2", [1, 2], 3, 0.0),
        ("1+2)", [1, 2], 3, 0.0), ("1 2", [1, 2], 3, 0.0), ("", [1, 2], 3, 0.0), ("()", [], 0, 0.0),
        ("True", [1], 1, 0.0), ("1+2=3", [1, 2], 3, 0.0), ("__import__('os').getpid()", [1], 1, 0.0),
    ):  # fmt: skip
        book.rule("expression_reward", f"{text} for {target}", value, completion=text, numbers=numbers, target=target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to (default: this one)")
    out = parser.parse_args().out
    book = Book()
    for write in (masked_cases, kl_cases, returns_cases, sft_cases, reinforce_cases, trpo_cases, ppo_cases,
                  ppo_kl_cases, grpo_cases, reward_model_cases, segment_reward_cases, dpo_cases, orpo_cases,
                  q_sharp_cases, verifier_cases):  # fmt: skip
        write(book)
    out.mkdir(parents=True, exist_ok=True)
    for name, text in book.files():
        with open(out / name, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)


if __name__ == "__main__":
    main()
