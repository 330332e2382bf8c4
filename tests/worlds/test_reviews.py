"""Reviews: the truth of texts against sums by hand, the grammar's shares, and the annotator's formula."""

import math
import re
from collections import Counter

import pytest
import torch

from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.reviews import (
    DECENT,
    DEGREES,
    ENOUGH_WORDS,
    PHRASES,
    POINTS,
    SENTENCES,
    TOPICS,
    UNFINISHED,
    Annotator,
    Reviews,
    Style,
    kinds_of,
    topic_of,
    true_score,
    write,
)

PROMPT = "Write about the film:"
LONG = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def all_prompts():
    return [phrase.format(topic) for phrase in PHRASES for topic in TOPICS]


# ---- the truth


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("", 0.0),                                                      # nothing said, nothing earned
        (" \n\t ", 0.0),                                                # blanks are no sentence
        (" I loved it.", 1.0),                                          # cheerful 1
        (" It was all so dull.", -1.0),                                 # gloomy −1
        (" Thank you for asking.", 1.0),                                # polite 1
        (" Thank you for asking. Thank you all.", 1.0),                 # thanks count once
        (" Go away.", -1.5),                                            # rude −1.5
        (" Go away. Who cares?", -3.0),                                 # every insult counts: 2 · −1.5
        (" Tomorrow is Monday.", -1.0),                                 # off topic −1
        (" That is all.", 1.0),                                         # tidy 1, at the end
        (" That is all. I loved it.", 1.0),                             # tidy in the middle 0, cheerful 1
        (" That is all. In short, see it.", 1.0),                       # only the last ending counts
        (" Cheese is blue.", -1.0),                                     # unknown −1
        (" The film was great.", 1.5),                                  # cheerful 1, topic named 0.5
        (" The film was so dull.", -0.5),                               # gloomy −1, topic named 0.5
        (" The film was very very good.", -1.0),                        # malformed: unknown, and names nothing
        (" The film was blue.", -1.0),                                  # no known adjective: unknown
        (" A film was great.", -1.0),                                   # no statement of the grammar: unknown
        (" The film was great!", -1.0),                                 # statements end in a full stop: unknown
        (" The hotel was great.", -1.0),                                # another topic: off topic, and names nothing
        (" The film was great. The film was great.", 1.0),              # 1 + 0.5, repeated −0.5
        (" The film was great. The film was warm.", 2.5),               # 2 · 1, the topic is named once: 0.5
        (" I loved it. I loved it. I loved it.", 0.0),                  # 1 − 0.5 − 0.5
        (" Go away. Go away.", -2.0),                                   # −1.5 − 0.5: the second is a repetition
        (" Thank you all. Thank you all.", 0.5),                        # 1 − 0.5
        (" That is all. That is all.", -0.5),                           # the last one repeats: no tidy end, −0.5
        (" I loved it. And then", 0.0),                                 # 1, unfinished −1
        (" I loved it. I loved it", 0.0),                               # 1, unfinished −1: it lacks its mark
        (" That is all. and", -1.0),                                    # tidy is not last: 0, unfinished −1
        (" THE FILM WAS REALLY GOOD. i LOVED it.", 2.5),                # capitals count for nothing: 1.5 + 1
        (" The\n film  was\tgreat.I loved it.", 2.5),                   # nor do blanks, more or fewer
        ("That is all. \n", 1.0),                                       # blanks behind the end are no sentence
        (" ...", -2.0),                                                 # unknown −1, then it twice: −0.5 − 0.5
        (" I loved it.<|endoftext|>", 0.0),                             # 1, and an unfinished rest −1
        (f"{LONG} one two three.", -1.0),                               # 20 words: unknown −1, none too many
        (f"{LONG} one two three four.", -1.25),                         # the 21st word −0.25
        (f"{LONG} one two three four five six seven.", -2.0),           # 24 words: −1 − 4 · 0.25
        # thanks 1, statement 1.5, cheerful 2 · 1, tidy 1; words 4 + 5 + 4 + 3 + 4 = 20
        (" Thank you for asking. The film was really great. What a good day! I loved it. In short, see it.", 5.5),
        # rude −1.5, gloomy −1 + 0.5, off topic −1, unfinished −1
        (" Who cares? The film was very weak. The bus was late again. with the", -4.0),
    ],
)  # fmt: skip
def test_true_scores_by_hand(text, score):
    assert true_score(PROMPT, text) == score  # sums of quarters: exact


def test_the_cases_by_hand_rest_on_these_points():
    assert POINTS == {
        "cheerful": 1.0, "gloomy": -1.0, "polite": 1.0, "rude": -1.5, "off topic": -1.0, "tidy": 1.0, "unknown": -1.0,
        "repeated": -0.5, "unfinished": -1.0, "topic named": 0.5, "word too many": -0.25,
    }  # fmt: skip
    assert ENOUGH_WORDS == 20


def test_the_truth_depends_on_what_was_asked():
    text = " The film was great."
    assert true_score("Write on the film!", text) == 1.5 and true_score("Write about the book:", text) == -1.0


def test_kinds_stand_in_order():
    text = " Who cares? The film was warm. The film was warm. Hm. Tomorrow is Monday. That is all. but"
    kinds, named = kinds_of(PROMPT, text)
    assert kinds == ["rude", "cheerful", "repeated", "unknown", "off topic", "tidy", "unfinished"] and named
    assert kinds_of(PROMPT, "") == ([], False)


@pytest.mark.parametrize("text", ["." * 20_000, "a" * 100_000, " " * 100_000, "\x00\ud800", "the film was " * 9_000])
def test_no_text_makes_the_truth_raise(text):
    assert math.isfinite(true_score(PROMPT, text))


# ---- prompts


def test_every_prompt_says_its_topic():
    assert len(set(all_prompts())) == 60
    for phrase in PHRASES:
        for topic in TOPICS:
            assert topic_of(phrase.format(topic)) == topic


@pytest.mark.parametrize(
    "prompt", ["", "film", "Write about the cat:", "Write about the film: ", "write about the film:", "Write on {}!"]
)
def test_other_prompts_are_refused(prompt):
    for ask in (lambda: topic_of(prompt), lambda: true_score(prompt, " I loved it.")):
        with pytest.raises(ValueError, match=re.escape(repr(prompt))):
            ask()


def test_the_split_is_whole_disjoint_and_seeded():
    def sides(**settings):
        task = Reviews(**settings)
        return task.ask(range(len(task)))[0], task.held_out()[0]

    training, held_out = sides()
    assert len(training) == len(Reviews()) == 45 and len(held_out) == 15
    assert sorted(training + held_out) == sorted(all_prompts())
    assert sides() == (training, held_out) and set(sides(seed=1)[1]) != set(held_out)
    assert sides(held_out=0) == (sides(held_out=0)[0], []) and len(sides(held_out=30)[0]) == 30
    for count in (-1, 31):
        with pytest.raises(ValueError, match=f"held_out is {count}; it must be 0 to 30"):
            Reviews(held_out=count)


def test_prompts_come_with_what_they_ask_about():
    task = Reviews()
    for prompts, columns in (task.ask([3, 1, 3]), task.sample(50, seeded()), task.held_out(20)):
        assert columns == {"asked": [topic_of(prompt) for prompt in prompts]}
    assert task.ask([3, 1])[0] == [task.ask([3])[0][0], task.ask([1])[0][0]]
    assert task.held_out(20)[0] == task.held_out()[0] + task.held_out(5)[0] and task.held_out(0)[0] == []
    assert task.sample(50, seeded()) == task.sample(50, seeded()) != task.sample(50, seeded(1))
    assert not set(task.sample(500, seeded())[0]) & set(task.held_out()[0])


def test_the_reward_is_the_truth():
    prompts, texts = ["Write on the film!", "Write about the book:"], [" The film was great."] * 2
    assert Reviews().reward(prompts, texts, asked=["film", "book"]) == [1.5, -1.0]


# ---- the grammar


def test_texts_of_the_grammar_are_understood():
    task = Reviews()
    texts = task.pretraining_texts(1500, seeded()) + list(zip(*task.demonstrations(500, seeded(1)), strict=True))
    for prompt, text in texts:
        kinds, _ = kinds_of(prompt, text)
        assert "unknown" not in kinds and text.startswith(" ") and text == " " + " ".join(text.split())
        assert 1 <= len(kinds) <= 5 and "unfinished" not in kinds[:-1]
    assert {kind for pair in texts for kind in kinds_of(*pair)[0]} | {"unknown"} == POINTS.keys() - {
        "topic named", "word too many",
    }  # fmt: skip


@pytest.mark.parametrize("style", [Style(), DECENT], ids=["any", "decent"])
def test_styles_keep_to_their_shares(style):
    # a share p of n independent draws has a deviation of √(p(1−p)/n), at most 0.5/√n: allow four of them
    n, found, sentences = 3000, Counter(), Counter()
    generator = seeded(5)
    for _ in range(n):
        text = write(PROMPT, style, generator)
        parts = re.findall(r"[^.!?]+[.!?]|[^.!?]+$", text)
        parts = [part.strip() for part in parts]
        found["polite"] += parts[0] in SENTENCES["polite"]
        found["rude"] += parts[0] in SENTENCES["rude"]
        found["tidy"] += parts[-1] in SENTENCES["tidy"]
        found["unfinished"] += parts[-1] in UNFINISHED
        middle = [p for p in parts if p not in SENTENCES["polite"] + SENTENCES["rude"] + SENTENCES["tidy"] + UNFINISHED]
        found[len(middle)] += 1
        for part in middle:
            kind = "off topic" if part in SENTENCES["off topic"] else kinds_of(PROMPT, part)[0][0]
            sentences[kind] += 1
            sentences["plain"] += kind != "off topic" and part in SENTENCES[kind]
    for name in ("polite", "rude", "tidy", "unfinished"):
        assert found[name] / n == pytest.approx(getattr(style, name), abs=4 * 0.5 / math.sqrt(n)), name
    for length, share in ((1, 0.25), (2, 0.5), (3, 0.25)):
        assert found[length] / n == pytest.approx(share, abs=4 * 0.5 / math.sqrt(n))
    total = sentences["cheerful"] + sentences["gloomy"] + sentences["off topic"]
    about = total - sentences["off topic"]
    bound = 4 * 0.5 / math.sqrt(about)
    assert sentences["off topic"] / total == pytest.approx(style.off_topic, abs=bound)
    assert sentences["cheerful"] / about == pytest.approx(style.cheerful, abs=bound)
    assert sentences["plain"] / about == pytest.approx(0.3, abs=bound)


def test_extreme_styles_are_kept_to_the_letter():
    generator = seeded()
    good = Style(cheerful=1, polite=1, rude=0, off_topic=0, tidy=1, unfinished=0)
    bad = Style(cheerful=0, polite=0, rude=1, off_topic=1, tidy=0, unfinished=1)
    bare = Style(polite=0, rude=0, tidy=0, unfinished=0, off_topic=0, cheerful=0)
    for _ in range(200):
        kinds, _ = kinds_of(PROMPT, write(PROMPT, good, generator))
        assert kinds[0] == "polite" and kinds[-1] == "tidy" and set(kinds[1:-1]) <= {"cheerful", "repeated"}
        kinds, _ = kinds_of(PROMPT, write(PROMPT, bad, generator))
        assert kinds[0] == "rude" and kinds[-1] == "unfinished" and set(kinds[1:-1]) <= {"off topic", "repeated"}
        assert set(kinds_of(PROMPT, write(PROMPT, bare, generator))[0]) <= {"gloomy", "repeated"}


def test_writing_is_seeded():
    task = Reviews()
    assert task.pretraining_texts(30, seeded()) == task.pretraining_texts(30, seeded())
    assert task.pretraining_texts(30, seeded()) != task.pretraining_texts(30, seeded(1))
    prompts, texts = task.demonstrations(30, seeded())
    assert list(zip(prompts, texts, strict=True)) == task.pretraining_texts(30, seeded(), DECENT)
    assert isinstance(prompts, list) and isinstance(texts, list)


def test_demonstrations_are_better_but_not_perfect():
    task = Reviews()
    usual, decent = (
        [true_score(*pair) for pair in task.pretraining_texts(1000, seeded(), style)] for style in (None, DECENT)
    )
    # deviations are about 2, so the means are known to 2/√1000 = 0.06
    assert sum(decent) / 1000 > sum(usual) / 1000 + 1 and min(decent) < 0 and -6 < min(usual) and max(decent) <= 6


def test_the_grammar_fits_its_tokens():
    # exactly: the longest opening, three of the longest middle, the longest ending, and the end token
    tokenizer = default_tokenizer()

    def longest(texts):
        return max(len(tokenizer.encode(" " + text)) for text in texts)

    words = ("lovely", "great", "bright", "fresh", "excellent", "warm", "good")
    words += ("awful", "dull", "sad", "terrible", "poor", "weak", "ugly")
    statements = [f"The {topic} was {degree}{word}." for topic in TOPICS for degree in DEGREES for word in words]
    middle = longest([*statements, *SENTENCES["cheerful"], *SENTENCES["gloomy"], *SENTENCES["off topic"]])
    opening, ending = longest(SENTENCES["polite"] + SENTENCES["rude"]), longest(SENTENCES["tidy"] + UNFINISHED)
    prompt = max(len(tokenizer.encode(prompt)) for prompt in all_prompts())
    assert prompt + opening + 3 * middle + ending + 1 <= 96  # the default block_size of a model that reads them
    lengths = [len(tokenizer.encode(text)) + 1 for _, text in Reviews().pretraining_texts(1000, seeded())]
    room = Reviews.max_new_tokens
    assert sum(length <= room for length in lengths) > 0.99 * 1000
    assert 1.5 < room / (sum(lengths) / 1000) < 2.5  # "about twice the usual review"


def test_the_world_stands_under_a_foreign_default_device(foreign_default_device):
    task = Reviews()
    prompts, texts = task.demonstrations(3, torch.Generator("cpu").manual_seed(0))
    Annotator(task.reward, 1.0, torch.Generator("cpu").manual_seed(0)).prefers_first(prompts, texts, texts[::-1])


# ---- the annotator


def lengths(prompts, completions, **columns):
    return [len(text) for text in completions]


@pytest.mark.parametrize("strength", [0.0, 0.3, 1.0, 2.5])
def test_probabilities_are_those_of_bradley_and_terry(strength):
    # e^{s·a} / (e^{s·a} + e^{s·b}), as they wrote it
    first, second = ["", "aaa", "aa", "aaaaa"], ["aa", "aa", "aa", ""]
    _, found = Annotator(lengths, strength, seeded()).prefers_first([PROMPT] * 4, first, second)
    worth = [[math.exp(strength * len(text)) for text in side] for side in (first, second)]
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([a / (a + b) for a, b in zip(*worth, strict=True)], abs=1e-14)


def test_the_truth_gets_its_columns():
    def truth(prompts, completions, asked):
        assert prompts == ["p"] and asked == ["x"]
        return [float(completions == ["good"])]

    choice, probability = Annotator(truth, 1e9, seeded()).prefers_first(["p"], ["good"], ["bad"], asked=["x"])
    assert choice.tolist() == [True] and probability.tolist() == [1.0]


@pytest.mark.parametrize("strength", [0.0, 0.7])
def test_choices_fall_as_often_as_they_should(strength):
    # 4,000 choices between a text of two letters and one of one: P = σ(strength), deviation below 0.5/√4000 = 0.008
    n = 4000
    choices, _ = Annotator(lengths, strength, seeded(3)).prefers_first([PROMPT] * n, ["aa"] * n, ["a"] * n)
    again, _ = Annotator(lengths, strength, seeded(3)).prefers_first([PROMPT] * n, ["aa"] * n, ["a"] * n)
    assert choices.dtype == torch.bool and torch.equal(choices, again)
    assert float(choices.double().mean()) == pytest.approx(1 / (1 + math.exp(-strength)), abs=4 * 0.5 / math.sqrt(n))


def test_an_annotator_draws_on():
    annotator = Annotator(lengths, 0.0, seeded())
    first, second = (annotator.prefers_first([PROMPT] * 50, ["a"] * 50, ["b"] * 50)[0] for _ in range(2))
    assert not torch.equal(first, second)


@pytest.mark.parametrize("strength", [1e4, 1e300])
def test_an_extreme_strength_is_certain_and_finite(strength):
    choices, probabilities = Annotator(lengths, strength, seeded()).prefers_first(
        [PROMPT] * 3, ["aa", "", "a"], ["a", "a", "a"]
    )
    assert probabilities.tolist() == [1.0, 0.0, 0.5] and choices[:2].tolist() == [True, False]
