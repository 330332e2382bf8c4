"""More rules for texts, and how several become one reward: constraints, signs of a text that drifts, weighted sums.

The verifiers here judge form where `worlds.verifiers` judges the answer, and keep the same promises: a text in, a float
in [0, 1] out; nothing is evaluated as code, the time is linear in the text, and no text makes one raise. The
constraints are in the spirit of IFEval (Zhou et al. 2023): what a program can check without understanding a word.
"""

import math
import re

from minirl.worlds.verifiers import without_end_marks

_WORD = re.compile(r"\w+(?:['’-]\w+)*")  # don't and well-known are one word each
_PIECE = re.compile(r"<[^<>\s]*>|\S")    # a tag, or any other character that is no blank
_CLOSING = "\"'”’»)]"                    # may follow the mark that ends a sentence


def length_reward(completion, low=0, high=math.inf):
    """1 if the completion has at least `low` and at most `high` words, else 0.

    Args:
        completion: the text a model wrote; end-of-text marks behind it do not count.
        low, high: bounds, both included.
    Returns:
        0.0 or 1.0.
    """
    return float(low <= len(_WORD.findall(without_end_marks(completion))) <= high)


def includes_reward(completion, words):
    """Share of the required words that occur in the completion as whole words, capitals aside.

    Args:
        completion: the text a model wrote.
        words: list of words or phrases, or one; `art` does not occur in `start`. Blanks and line breaks are alike.
    Returns:
        A float in [0, 1]; 1.0 where nothing is required.
    """
    words = [words] if isinstance(words, str) else words
    required = [plain for plain in map(_plain, words) if plain]
    text = _plain(completion)
    found = [re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) is not None for word in required]
    return sum(found) / len(found) if found else 1.0


def ending_reward(completion):
    """1 if the completion ends as a sentence does, in . ! or ?, else 0.

    Blanks, end-of-text marks, and quotation marks or brackets that close there may follow.
    """
    return float(without_end_marks(completion).rstrip(_CLOSING).endswith((".", "!", "?")))


def off_vocabulary_rate(completion, vocabulary):
    """Share of a completion's pieces that the task's own language does not have: language mixing, in small.

    DeepSeek-R1 (2025, section 2.3.2) rewards the share of words in the language that is wanted, for R1-Zero's thoughts
    drifted from one into another. Here a piece is a tag such as <think>, or else a single character; blanks never
    count, nor do end-of-text marks behind the text.

    Args:
        completion: the text a model wrote.
        vocabulary: the pieces that belong to the language: a set or list of strings, or a string of characters.
    Returns:
        A float in [0, 1]; 0.0 for a text without pieces.
    """
    known = frozenset(vocabulary)
    pieces = _PIECE.findall(without_end_marks(completion))
    return sum(piece not in known for piece in pieces) / max(1, len(pieces))


def each(verifier, *names, **settings):
    """A verifier of one completion as a reward of many, the form in which a world and WeightedRewards want it.

        each(answer_reward, "gold")        each(length_reward, high=20)        each(includes_reward, "words")

    Args:
        verifier: verifier(completion, ...) -> a number.
        names: the task's columns whose entry the verifier takes after the completion, in that order.
        settings: keywords that are the same for every completion.
    Returns:
        reward(prompts, completions, **columns) -> list of floats.
    """

    def reward(prompts, completions, **columns):
        rows = zip(completions, *(columns[name] for name in names), strict=True)
        return [float(verifier(*row, **settings)) for row in rows]

    return reward


class WeightedRewards:
    """Several rewards as one: Σ weight · reward. A weight of 0 only watches.

        WeightedRewards({"accuracy": (1.0, task.reward), "format": (0.2, each(format_reward))})

    DeepSeek-R1 (2025, section 2.2.2) adds accuracy and format so; the reward α of a verifiable answer (Tülu 3, section
    6) is one part with the weight α.

    Args:
        weighted: dict name -> (weight, reward), reward(prompts, completions, **columns) -> list of floats.
    Attributes:
        parts: name -> mean of that reward, without its weight, in the latest call; empty before the first.
    Raises:
        ValueError: if there is no reward, a weight is no finite number, or (when called) a reward gives too few or too
            many values.
    """

    def __init__(self, weighted):
        if not weighted:
            raise ValueError("WeightedRewards got no rewards; give it a dict name -> (weight, reward)")
        for name, (weight, _) in weighted.items():
            if not math.isfinite(weight):
                raise ValueError(f"the weight of {name} is {weight}; it must be a finite number")
        self.weighted, self.parts = dict(weighted), {}

    def __call__(self, prompts, completions, **columns):
        """The weighted sums, a list with one float for each completion."""
        totals, parts = [0.0] * len(completions), {}
        for name, (weight, reward) in self.weighted.items():
            values = reward(prompts, completions, **columns)
            if len(values) != len(completions):
                raise ValueError(f"reward {name} gave {len(values)} values for {len(completions)} completions")
            totals = [total + weight * value for total, value in zip(totals, values, strict=True)]
            parts[name] = sum(values) / max(1, len(values))
        self.parts = parts
        return totals


def _plain(text):
    """`text` without capitals, and with one blank wherever there are some."""
    return " ".join(text.casefold().split())
