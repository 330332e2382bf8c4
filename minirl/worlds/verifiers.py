"""Rule-based rewards: is the answer right, is the format kept, does the expression reach the target?

Each function takes the text a model wrote and returns a float in [0, 1]. The text is untrusted: nothing here evaluates
it as code, every length, depth and number is bounded, and no text makes a verifier raise. A verifier must not be too
narrow either: line breaks, blanks and a rendered end token around a right answer cost nothing.
"""

import math
import re
from fractions import Fraction

END_MARKS = ("<|endoftext|>", "<|pad|>", "<|im_end|>", "<|eot_id|>", "</s>", "<eos>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

MAX_NUMBER = 80        # characters of a number: far beyond any task here, and cheap to compute with
MAX_EXPRESSION = 1000  # characters of an expression
MAX_DEPTH = 50         # nested brackets and minus signs of an expression

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"  # 1000 or 1,000
_NUMBER = re.compile(rf"([+-]?)({_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:\s*/\s*([0-9]+))?")
_EXPRESSION_TOKEN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|[-+*/()])")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_SIGN = 3  # a minus sign in front of something binds tighter than any of the above


def answer_reward(completion, gold):
    """1 if the completion's answer equals `gold`, else 0.

    The answer is the text inside the last <answer>...</answer>, or the whole completion where there is none, without
    blanks around it and without end-of-text marks behind it. A number may be written as 42, +42, 42.0, 84/2 or 1,000;
    sums are not accepted, or a model could answer 37+48= by repeating it. If `gold` is not a number the two texts must
    be equal, capitals aside.

    Args:
        completion: the text a model wrote.
        gold: the right answer, a number or a text.
    Returns:
        0.0 or 1.0.
    """
    answer, right = _answer_text(completion), _gold_value(gold)
    if right is None:
        return float(answer.casefold() == str(gold).strip().casefold())
    return float(_number(answer) == right)


def answer_parses(completion):
    """Whether the completion's answer can be read as a number at all.

    The share of completions for which it cannot is worth logging next to the reward: a model that is right in a form
    the verifier does not read looks exactly like one that is wrong.
    """
    return _number(_answer_text(completion)) is not None


def format_reward(completion):
    """1 if the completion is one <think>...</think> followed by one <answer>...</answer> and nothing else, else 0.

    Blanks and line breaks are free inside, between and around the blocks; end-of-text marks may follow. Each of the
    four tags must occur exactly once.                                    DeepSeek-R1 (2025), section 2.2.2

    Args:
        completion: the text a model wrote.
    Returns:
        0.0 or 1.0.
    """
    text = without_end_marks(completion)
    if any(text.count(tag) != 1 for tag in TAGS):
        return 0.0
    thought, _, rest = text.partition("</think>")
    rest = rest.lstrip()
    return float(thought.startswith("<think>") and rest.startswith("<answer>") and rest.endswith("</answer>"))


def expression_reward(completion, numbers, target):
    """1 if the answer is an expression that uses exactly the given numbers, each once, and equals `target`, else 0.

    Allowed are the numbers themselves, + - * /, brackets and a minus sign in front. The order is free, and results are
    exact fractions, so 1/3*3 is 1. The answer is read as in `answer_reward`.

    Args:
        completion: the text a model wrote.
        numbers: the numbers to use; a number listed twice must be used twice.
        target: the value to reach.
    Returns:
        0.0 or 1.0. Whatever cannot be read, divides by zero or is too long or too deep scores 0.
    """
    try:
        tokens = _expression_tokens(_answer_text(completion))
        used = sorted(Fraction(token) for token in tokens if token[0].isdigit())
        if used != sorted(_gold_value(number) for number in numbers):
            return 0.0
        tokens.reverse()  # so that pop() takes the next one
        value = _evaluate(tokens)
        return float(not tokens and value == _gold_value(target))
    except (ValueError, IndexError, ZeroDivisionError):  # not an expression; it ended too early; x / 0
        return 0.0


def without_end_marks(text):
    """`text` without blanks around it and without end-of-text marks and blanks behind it."""
    end, previous = len(text), None
    while end != previous:
        previous = end
        while end and text[end - 1].isspace():
            end -= 1
        end -= next((len(mark) for mark in END_MARKS if text.endswith(mark, 0, end)), 0)
    return text[:end].strip()


def _answer_text(completion):
    text = without_end_marks(completion)
    end = text.rfind("</answer>")
    start = text.rfind("<answer>", 0, max(end, 0))
    return text if start < 0 else text[start + len("<answer>") : end].strip()


def _number(text):
    """The value of a number written as 42, +42, -4.5, 84/2 or 1,000; None if it is something else or too long."""
    match = _NUMBER.fullmatch(text) if len(text) <= MAX_NUMBER else None
    if match is None:
        return None
    sign, digits, denominator = match.groups()
    value = Fraction(digits.replace(",", ""))
    if denominator is not None:
        if int(denominator) == 0:
            return None
        value /= int(denominator)
    return -value if sign == "-" else value


def _gold_value(gold):
    """The value of a trusted number (or of its text), None for any other text. 0.1 is a tenth, not the float."""
    if isinstance(gold, float) and math.isfinite(gold):
        return Fraction(str(gold))
    if isinstance(gold, (int, Fraction)):
        return Fraction(gold)
    return _number(str(gold).strip())


def _expression_tokens(text):
    """Numbers, operators and brackets as strings; ValueError for anything else."""
    if len(text) > MAX_EXPRESSION:
        raise ValueError("too long")
    tokens, position = [], 0
    while position < len(text):
        match = _EXPRESSION_TOKEN.match(text, position)
        if match is None or len(match[1]) > MAX_NUMBER:
            raise ValueError("not a number, an operator or a bracket")
        tokens.append(match[1])
        position = match.end()
    return tokens


def _evaluate(tokens, binding=0, depth=0):
    """Precedence climbing: read one operand, then every following operator that binds tighter than `binding`.

    Args:
        tokens: the tokens still to be read, the next one last; what is read is removed.
        binding: precedence of the operator to our left; 0 at the start and after a bracket.
        depth: how deep we are nested.
    Returns:
        The value, a Fraction.
    """
    if depth > MAX_DEPTH:
        raise ValueError("too deep")
    token = tokens.pop()
    if token == "(":
        value = _evaluate(tokens, 0, depth + 1)
        if tokens.pop() != ")":
            raise ValueError("a bracket does not close")
    elif token == "-":
        value = -_evaluate(tokens, _SIGN, depth + 1)
    else:
        value = Fraction(token)  # ValueError for an operator in the wrong place
    while tokens and _PRECEDENCE.get(tokens[-1], 0) > binding:
        operator = tokens.pop()
        right = _evaluate(tokens, _PRECEDENCE[operator], depth + 1)
        if operator == "+":
            value += right
        elif operator == "-":
            value -= right
        elif operator == "*":
            value *= right
        else:
            value /= right
    return value
