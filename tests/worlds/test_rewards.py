"""Constraints, the rate of foreign pieces, and weighted sums of rewards."""

import random
import time

import pytest

from minirl.worlds.rewards import (
    WeightedRewards,
    each,
    ending_reward,
    includes_reward,
    length_reward,
    off_vocabulary_rate,
)
from minirl.worlds.verifiers import TAGS, answer_parses, answer_reward, format_reward

HOSTILE = [
    "", "\x00", "\ud800", "<" * 100_000, "<a" * 50_000, "<" + "a" * 100_000, "a'" * 50_000, "a-" * 50_000 + "!",
    "a" * 100_000, " \n" * 100_000 + "x", "x" + " " * 100_000, "<|endoftext|>" * 20_000, ")" * 100_000, "." * 100_000,
    "the " * 50_000, "\u0130" * 50_000, "9" * 100_000, "(" * 5000, "__import__('os').system('touch pwned')",
]  # fmt: skip


# --- constraints


@pytest.mark.parametrize(
    ("text", "words"),
    [("", 0), ("...", 0), ("one", 1), ("one two  three\n", 3), ("don't well-known it’s", 3), ("a,b;c", 3), ("3+4=7", 3)]
    + [("one two<|endoftext|>", 2), ("rock - roll", 2), ("Grüße, 日本", 2), ("one two <|pad|>\n<|pad|>", 2)],
)
def test_length_counts_words(text, words):
    for low, high in ((words, words), (0, words), (words, words + 3)):
        assert length_reward(text, low, high) == 1.0
    assert length_reward(text) == length_reward(text, low=words) == 1.0
    assert length_reward(text, low=words + 1) == length_reward(text, high=words - 1) == 0.0


@pytest.mark.parametrize(
    ("words", "share"),
    [(["film"], 1), (["FILM", "music"], 1), (["film", "plot"], 0.5), (["fil"], 0), (["mus", "ilm", "film"], 1 / 3)]
    + [(["the film"], 1), (["the\n film"], 1), (["film the"], 0), ("film", 1), ([], 1), (["", " "], 1), (["c++"], 1)]
    + [(["film", "film", "plot", ""], 2 / 3), (["f.lm"], 0), (("music", "plot", "c"), 2 / 3)],
)
def test_required_words_are_whole_words(words, share):
    assert includes_reward("I liked the  Film\nand its music. In c++", words) == share


def test_a_word_is_bounded_by_anything_but_letters_digits_and_underscores():
    for text in ("art", "(art)", "art,", "<think>art</think>", "art<|endoftext|>", "fine-art"):
        assert includes_reward(text, ["art"]) == 1.0
    for text in ("start", "arty", "art1", "art_", "éart", "a rt"):
        assert includes_reward(text, ["art"]) == 0.0


@pytest.mark.parametrize(
    "text", ["Yes.", "Yes!", "Yes?", "Yes. \n", "Yes.<|endoftext|>", "“Yes.”", "(Yes!)", ".", "He said 'yes.'"]
)
def test_sentences_that_end(text):
    assert ending_reward(text) == 1.0


@pytest.mark.parametrize("text", ["", "Yes", "Yes,", "Yes. And", "Yes.<|endoftext|>no", "()", "yes. )x", "1.5", "Yes:"])
def test_texts_that_break_off(text):
    assert ending_reward(text) == 0.0


# --- pieces that do not belong


@pytest.mark.parametrize(
    ("text", "rate"),
    [("", 0), (" \n\t", 0), ("3+4=7", 0), ("3 + 4 = 7\n", 0), ("<think>3</think>", 0), ("<answer>3</answer>", 0)]
    + [("x", 1), ("3x", 1 / 2), ("3+4 is 7", 2 / 6), ("<b>3", 1 / 2), ("<think>七</think>", 1 / 3), ("3<", 1 / 2)]
    + [("<think 3>", 7 / 8), ("<>", 1), ("3<|endoftext|>", 0), ("<|endoftext|>3", 1 / 2), ("<<think>", 1 / 2)],
)  # "<think 3>" has a blank, so it is eight characters, of which only the digit is known
def test_off_vocabulary_rate_by_hand(text, rate):
    vocabulary = {*"0123456789+=,", *TAGS}
    assert off_vocabulary_rate(text, vocabulary) == off_vocabulary_rate(text, sorted(vocabulary)) == rate


def test_a_string_is_a_vocabulary_of_characters():
    assert off_vocabulary_rate("abba", "ab") == 0.0 and off_vocabulary_rate("abc", "ab") == 1 / 3
    assert off_vocabulary_rate("<ab>", "<ab>") == 1.0  # the tag is one piece, and not among the characters
    assert off_vocabulary_rate("aB", "ab") == 0.5 and off_vocabulary_rate("a", "") == 1.0


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_judged_quickly_and_touch_nothing(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = time.process_time()
    check(text)
    assert time.process_time() - start < 1.0  # a second of our own time is the promise; it takes milliseconds
    assert not list(tmp_path.iterdir())


def check(text):
    for value in (length_reward(text, 1, 5), ending_reward(text), includes_reward(text, ["the", "a'a", ")"]),
                  off_vocabulary_rate(text, {"9", "<think>"})):
        assert isinstance(value, float) and 0.0 <= value <= 1.0


def test_no_text_makes_a_verifier_raise():
    rng = random.Random(0)
    parts = [*TAGS, "<|endoftext|>", "<", ">", "the", "THE", "'", "’", "-", " ", "\n", ".", ")", "\ud800", "ß", "İ"]
    for _ in range(2000):
        check("".join(rng.choice(parts) for _ in range(rng.randrange(15))))


# --- many completions, several rewards

PROMPTS, COMPLETIONS = ["3+4=", "1+1="], ["<think>3+4=7</think><answer>7</answer>", "3"]


def test_each_judges_one_by_one_with_the_columns_it_names():
    columns = dict(gold=[7, 2], words=[["answer"], ["3", "4"]], source=["book", "book"])
    assert each(format_reward)(PROMPTS, COMPLETIONS, **columns) == [1.0, 0.0]
    assert each(answer_reward, "gold")(PROMPTS, COMPLETIONS, **columns) == [1.0, 0.0]
    assert each(includes_reward, "words")(PROMPTS, COMPLETIONS, **columns) == [1.0, 0.5]
    assert each(length_reward, high=1)(PROMPTS, COMPLETIONS, **columns) == [0.0, 1.0]
    assert each(length_reward, "low", high=9)(PROMPTS, COMPLETIONS, low=[9, 1]) == [0.0, 1.0]
    values = each(answer_parses)(PROMPTS, COMPLETIONS)
    assert values == [1.0, 1.0] and all(type(value) is float for value in values)
    with pytest.raises(ValueError):
        each(answer_reward, "gold")(PROMPTS, COMPLETIONS, gold=[7])
    with pytest.raises(KeyError, match="gold"):
        each(answer_reward, "gold")(PROMPTS, COMPLETIONS)


def test_weighted_rewards_add_up_and_say_what_they_are_made_of():
    reward = WeightedRewards({
        "accuracy": (1.0, each(answer_reward, "gold")), "format": (0.2, each(format_reward)),
        "length": (-0.01, lambda prompts, completions, **columns: [len(text) for text in completions]),
        "zero": (0, each(len)),
    })  # fmt: skip
    assert reward.parts == {}
    assert reward(PROMPTS, COMPLETIONS, gold=[7, 2]) == pytest.approx([1.2 - 0.38, -0.01])
    assert reward.parts == {"accuracy": 0.5, "format": 0.5, "length": 19.5, "zero": 19.5}
    assert reward(PROMPTS[:1], ["7"], gold=[7]) == pytest.approx([0.99])
    assert reward.parts == {"accuracy": 1.0, "format": 0.0, "length": 1.0, "zero": 1.0}  # of the latest call
    assert reward([], [], gold=[]) == [] and set(reward.parts.values()) == {0.0}


def test_every_part_sees_prompts_and_columns():
    seen = []

    def spy(prompts, completions, **columns):
        seen.append((prompts, completions, columns))
        return [0.5] * len(completions)

    assert WeightedRewards({"a": (2.0, spy), "b": (4, spy)})(PROMPTS, COMPLETIONS, gold=[7, 2]) == [3.0, 3.0]
    assert seen == [(PROMPTS, COMPLETIONS, {"gold": [7, 2]})] * 2


def test_what_cannot_be_weighted_is_one_clear_line():
    with pytest.raises(ValueError, match="got no rewards"):
        WeightedRewards({})
    for weight in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"the weight of format is {weight}; it must be a finite number"):
            WeightedRewards({"format": (weight, each(format_reward))})
    short = WeightedRewards({"short": (1.0, lambda prompts, completions: [1.0])})
    with pytest.raises(ValueError, match="reward short gave 1 values for 2 completions"):
        short(PROMPTS, COMPLETIONS)
    assert short.parts == {}
