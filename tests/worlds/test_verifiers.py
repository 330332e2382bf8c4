"""Verifiers: neither too narrow nor ever an interpreter of what a model wrote."""

import ast
import operator
import random
import time
from fractions import Fraction

import pytest

import minirl.worlds.verifiers as verifiers
from minirl.worlds.verifiers import answer_parses, answer_reward, expression_reward, format_reward

GOOD_FORMATS = [
    "<think>37+48=85</think><answer>85</answer>",
    "<think>\n37+48=85\n</think>\n<answer>\n85\n</answer>",
    "<think>\r\n37+48=85\r\n</think>\r\n<answer>\r\n85\r\n</answer>",
    "<think>37+48=85</think>\n\n<answer>85</answer>",
    "<think>37+48=85</think><answer>85</answer>\n",
    "<think>37+48=85</think><answer>85</answer><|endoftext|>",
    "  <think>first\n\nsecond</think> \t <answer> 85 </answer> <|endoftext|>\n<|pad|><|pad|>",
]
HOSTILE = {
    "import": "__import__('os').system('touch pwned')",
    "classes": "().__class__.__mro__",
    "powers": "9**9**9**9",
    "power": "2**5000",
    "brackets": "(" * 5000 + "1" + ")" * 5000,
    "open brackets": "(" * 5000,
    "sum": "1" + "+1" * 19_999,
    "minus signs": "-" * 20_000 + "1",
    "by zero": "1/0",
    "infinite": "1e999",
    "text": "'a'*10",
    "truth": "True",
    "imaginary": "1j",
    "hexadecimal": "0x10",
    "digits": "9" * 100_000,
    "long fraction": "1/" + "9" * 100_000,
    "commas": ",".join(["1"] + ["000"] * 50_000),
    "tags": "<answer>" * 50_000,
    "closing tags": "</answer>" * 50_000,
    "thoughts": "<think></think>" * 30_000,
    "end marks": "<|endoftext|>" * 50_000,
    "blanks": " \n" * 200_000 + "x",
    "blanks between": "<think></think>" + " " * 200_000 + "x</answer>",
    "no text": "",
    "null": "\x00",
    "half a surrogate pair": "\ud800",
    "other digits": "\u0664\u0662",
    "superscript": "4\u00b2",
    "separator": "1_000",
}


# --- answers


@pytest.mark.parametrize("text", ["42", "42.0", " 42 ", "+42", "84/2", "\n42\r\n", "042", "84 / 2", "42.000"])
@pytest.mark.parametrize("around", ["{}", "<answer>{}</answer>", "<think>1</think>\n<answer>{}</answer><|endoftext|>"])
@pytest.mark.parametrize("gold", [42, 42.0, "42", Fraction(42), " 84/2"])
def test_a_right_number_counts_in_every_form(text, around, gold):
    assert answer_reward(around.format(text), gold) == 1.0
    assert answer_parses(around.format(text))


@pytest.mark.parametrize(
    ("text", "gold"),
    [("1,000", 1000), ("1000", "1,000"), ("1,234,567.5", 1234567.5), ("-7", -7), ("-14/2", -7), ("0.1", 0.1)]
    + [("1/10", 0.1), (".5", 0.5), ("0.0000001", 1e-7), ("0", 0), ("-0", 0), ("9" * 60, 10**60 - 1)],
)
def test_other_right_numbers(text, gold):
    assert answer_reward(text, gold) == 1.0


@pytest.mark.parametrize(
    ("text", "gold"),
    [("43", 42), ("-42", 42), ("4 2", 42), ("42 43", 42), ("42abc", 42), ("37+5", 42), ("42=42", 42), ("", 42)]
    + [("1,00", 100), ("10,00", 1000), (",100", 100), ("84/0", 0), ("1/3", 0.3333333333333333), ("4.2e1", 42)]
    + [("<answer>42", 42), ("42</answer>", 42), ("<answer>41</answer>42", 42), ("+-42", -42), ("--42", 42)],
)
def test_wrong_answers(text, gold):
    assert answer_reward(text, gold) == 0.0


@pytest.mark.parametrize("mark", verifiers.END_MARKS)
def test_end_marks_behind_an_answer_do_not_count(mark):
    assert answer_reward("42" + mark, 42) == answer_reward(f"42 {mark}\n{mark} ", 42) == 1.0
    assert answer_reward(mark + "42", 42) == 0.0  # only behind it


def test_the_last_answer_counts():
    assert answer_reward("<answer>1</answer><answer>2</answer> and so on", 2) == 1.0
    assert answer_reward("<answer>2</answer><answer>1</answer>", 2) == 0.0
    assert answer_reward("<answer>1<answer>2</answer>", 2) == 1.0
    assert answer_reward("<answer>2</answer><answer>1", 2) == 1.0  # the last one that closes


def test_answers_that_are_words():
    assert answer_reward("<answer> Paris\n</answer>", "Paris") == 1.0
    assert answer_reward("paris", "Paris") == 1.0
    assert answer_reward("London", "Paris") == 0.0
    assert answer_reward("42", "Paris") == answer_reward("Paris", 42) == 0.0
    assert not answer_parses("Paris")


def test_what_does_not_parse_is_told_from_what_is_wrong():
    assert [answer_parses(text) for text in ["41", "<answer>41</answer>", "41!", "<answer></answer>", "", "84/0"]] == [
        True, True, False, False, False, False
    ]  # fmt: skip


# --- formats


@pytest.mark.parametrize("text", GOOD_FORMATS)
def test_blanks_and_end_marks_do_not_break_the_format(text):
    assert format_reward(text) == 1.0
    assert answer_reward(text, 85) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "85",
        "<answer>85</answer>",
        "<think>x</think>85",
        "<think>x</think><answer>85",
        "<think>x<answer>85</answer>",
        "x</think><answer>85</answer>",
        "<answer>85</answer><think>x</think>",
        "so: <think>x</think><answer>85</answer>",
        "<think>x</think>so<answer>85</answer>",
        "<think>x</think><answer>85</answer>so",
        "<think>x</think><answer>85</answer><answer>85</answer>",
        "<think>x<think>y</think><answer>85</answer>",
        "<think>x<answer></think>85</answer>",
        "<think>x</answer></think><answer>85",
        "<|endoftext|><think>x</think><answer>85</answer>",
        "<Think>x</Think><Answer>85</Answer>",
    ],
)
def test_broken_formats(text):
    assert format_reward(text) == 0.0


# --- expressions


@pytest.mark.parametrize(
    ("text", "numbers", "target"),
    [
        ("(1+2)*3", [1, 2, 3], 9),
        ("<think>try</think><answer> ( 1 + 2 ) * 3 </answer><|endoftext|>", [3, 2, 1], 9),
        ("1+2*3", [1, 2, 3], 7),  # a product before a sum
        ("2*3+1", [1, 2, 3], 7),
        ("8-3-2", [2, 3, 8], 3),  # from the left: (8-3)-2, not 8-(3-2)
        ("8/4/2", [2, 4, 8], 1),
        ("8/4*2", [2, 4, 8], 4),
        ("8-2*3+1", [1, 2, 3, 8], 3),
        ("2*(8-(3-1))/4", [1, 2, 3, 4, 8], 3),
        ("1/3*3", [1, 3, 3], 1),  # exact, where floats happen to be lucky
        ("1/49*49", [1, 49, 49], 1),  # exact, where floats give 0.9999999999999999
        ("-2+5", [2, 5], 3),
        ("5--2", [2, 5], 7),
        ("-2*-3", [2, 3], 6),
        ("6/(1-3/4)", [1, 3, 4, 6], 24),
        ("0.5*4", [0.5, 4], 2),
        ("((((7))))", [7], 7),
        ("1/3", [1, 3], Fraction(1, 3)),
    ],
)
def test_expressions_that_reach_the_target(text, numbers, target):
    assert expression_reward(text, numbers, target) == 1.0
    assert expression_reward(text, numbers, target + 1) == 0.0


@pytest.mark.parametrize(
    "text",
    ["9", "3*3", "(1+2)*3*1", "(1+2)*3+0", "12-3", "(1+2)*3=9", "(1+2)3", "1 2*3", "(1+2)*3)", "((1+2)*3", "()", "1+2*"]
    + ["*1+2*3", "(1+2)*+3", "1+2)*(3", "(1+2)**3", "(1+2)//3", "(1,2)*3", "(1+2)*3;", "(1+2)*3 #", "", "()(1+2)*3"],
)
def test_anything_but_the_given_numbers_in_one_whole_expression_scores_nothing(text):
    assert expression_reward(text, [1, 2, 3], 9) == 0.0


def python_value(node):
    """The value of an arithmetic expression as Python's own parser reads it."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp):
        return -python_value(node.operand)
    return operators[type(node.op)](python_value(node.left), python_value(node.right))


def test_random_expressions_agree_with_pythons_parser():
    rng = random.Random(0)

    def build(depth):
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randrange(1, 10))
        text = f"{build(depth - 1)} {rng.choice('+-*/')} {build(depth - 1)}"
        return f"({text})" if rng.random() < 0.5 else f"-({text})" if rng.random() < 0.2 else text

    for _ in range(300):
        text = build(4)
        numbers = [int(token) for token in "".join(c if c.isdigit() else " " for c in text).split()]
        try:
            value = python_value(ast.parse(text, mode="eval").body)
        except ZeroDivisionError:
            assert expression_reward(text, numbers, 0) == 0.0
            continue
        assert expression_reward(text, numbers, value) == 1.0
        assert expression_reward(text, numbers, value + 1) == 0.0


# --- hostile texts


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("around", ["{}", "<answer>{}</answer>", "<think>{}</think><answer>{}</answer>"])
def test_hostile_texts_score_nothing_quickly_and_touch_nothing(name, around, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = around.replace("{}", HOSTILE[name])
    start = time.process_time()
    assert expression_reward(text, [1, 2, 3], 9) == 0.0
    assert answer_reward(text, 9) == 0.0
    assert format_reward(text) in (0.0, 1.0)
    assert answer_parses(text) is False
    assert time.process_time() - start < 1.0  # a second of our own time is the promise; it takes milliseconds
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["1" + "+1" * 19_999, "-" * 20_000 + "1", "(" * 5000 + "1" + ")" * 5000])
def test_size_is_bounded_even_where_the_numbers_match(text):
    assert expression_reward(text, [1] * text.count("1"), text.count("1")) == 0.0


def test_depth_is_bounded():
    limit = verifiers.MAX_DEPTH
    assert expression_reward("(" * limit + "1" + ")" * limit, [1], 1) == 1.0
    assert expression_reward("(" * (limit + 1) + "1" + ")" * (limit + 1), [1], 1) == 0.0
    assert expression_reward("-" * (limit + 2) + "1", [1], 1) == 0.0


def test_division_by_zero_inside_an_expression():
    assert expression_reward("1/(2-2)", [1, 2, 2], 0) == 0.0


def test_no_text_makes_a_verifier_raise():
    rng = random.Random(0)
    parts = ["<think>", "</think>", "<answer>", "</answer>", "<|endoftext|>", *"()+-*/123"]
    parts += [" ", "\n", ".", ",", "e", "\u0661", "\U0001f600", "0", "9" * 90]
    for _ in range(3000):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(15)))
        for value in (answer_reward(text, 3), format_reward(text), expression_reward(text, [1, 2, 3], 6)):
            assert isinstance(value, float) and 0.0 <= value <= 1.0
