"""Reviews: short texts of a small grammar whose true quality is known, and a simulated annotator who compares them.

A prompt is `Write about the film:`, a completion a handful of sentences. `true_score` gives the
quality of any text, also of one that no grammar would write. Nobody can do that with real text, and it is the point of
simulating: where the truth is known, one can draw how a reward model that learned from comparisons goes on rising while
the truth turns (over-optimisation; Gao et al. 2023, who take a large reward model for the truth). What people find good
in a text is another matter, and nothing here says anything about it.
"""

import re
from dataclasses import dataclass

import torch

TOPICS = ("film", "hotel", "restaurant", "book", "phone", "concert", "museum", "game", "train", "course")
PHRASES = (  # the topic is the fourth token of each: a tiny model that has to search for it may never learn to
    "Write about the {}:", "Write on the {}:", "Write of the {}:", "Please see the {}:", "Write about the {}.",
    "Write on the {}!",
)  # fmt: skip
CHEERFUL = ("lovely", "great", "bright", "fresh", "excellent", "warm", "good")
GLOOMY = ("awful", "dull", "sad", "terrible", "poor", "weak", "ugly")
DEGREES = ("", "very ", "really ", "so ")
SENTENCES = {
    "cheerful": ("What a good day!", "I loved it."),
    "gloomy": ("What a sad day!", "It was all so dull."),
    "polite": ("Thank you for asking.", "Thank you all."),
    "rude": ("Go away.", "Who cares?"),
    "off topic": ("Tomorrow is Monday.", "The bus was late again."),
    "tidy": ("That is all.", "In short, see it.", "In short, stay at home."),
}
UNFINISHED = ("and then", "but", "with the")
KINDS = {sentence.lower(): kind for kind, sentences in SENTENCES.items() for sentence in sentences}

# The truth, in points. A review of about 20 words can have it all; more words cost more than they can earn.
POINTS = {
    "cheerful": 1.0, "gloomy": -1.0, "polite": 1.0, "rude": -1.5, "off topic": -1.0, "tidy": 1.0, "unknown": -1.0,
    "repeated": -0.5, "unfinished": -1.0, "topic named": 0.5, "word too many": -0.25,
}  # fmt: skip
ENOUGH_WORDS = 20

_PROMPT = re.compile("|".join(re.escape(phrase).replace(r"\{\}", r"(\w+)") for phrase in PHRASES))
_SENTENCE = re.compile(r"[^.!?]*[.!?]|[^.!?]+$")
_STATEMENT = re.compile(r"the (\w+) was (?:very |really |so )?(\w+)\.")


@dataclass(frozen=True)
class Style:
    """Shares that a writer of reviews keeps to. The defaults write anything at all."""

    cheerful: float = 0.4    # of the sentences about the topic
    polite: float = 0.3      # open with thanks
    rude: float = 0.3        # open with an insult
    off_topic: float = 0.25  # of the sentences in the middle
    tidy: float = 0.4        # close with an ending
    unfinished: float = 0.2  # break off


DECENT = Style(cheerful=0.55, polite=0.45, rude=0.1, off_topic=0.15, tidy=0.5, unfinished=0.1)  # demonstrations


def true_score(prompt, completion):
    """Quality of a completion, in points.

    Sentences earn what POINTS says: cheerful and gloomy ones about the prompt's topic, thanks once, insults, sentences
    about something else or of no known kind, an ending where it belongs, at the end; a sentence that was there before
    earns nothing and costs; so does every word beyond ENOUGH_WORDS.

    Args:
        prompt: one of this task's prompts.
        completion: any text.
    Returns:
        A float, about -5 to 6 for texts of the grammar.
    Raises:
        ValueError: if the prompt is not of this task.
    """
    kinds, named = kinds_of(prompt, completion)
    score = sum(POINTS[kind] for kind in kinds if kind not in ("tidy", "polite"))
    score += POINTS["polite"] * ("polite" in kinds) + POINTS["tidy"] * (kinds[-1:] == ["tidy"])
    score += POINTS["topic named"] * named
    return score + POINTS["word too many"] * max(0, len(completion.split()) - ENOUGH_WORDS)


def kinds_of(prompt, completion):
    """What the sentences of a completion are.

    Returns:
        (kinds, named): a list with a key of POINTS for each sentence, in order, and whether one names the topic.
    Raises:
        ValueError: if the prompt is not of this task.
    """
    topic, kinds, seen, named = topic_of(prompt), [], set(), False
    for sentence in _SENTENCE.findall(completion):
        sentence = " ".join(sentence.lower().split())
        if not sentence:
            continue
        kind, statement = KINDS.get(sentence, "unknown"), _STATEMENT.fullmatch(sentence)
        if sentence[-1] not in ".!?":
            kind = "unfinished"
        elif statement and statement[2] in CHEERFUL + GLOOMY:
            kind = "off topic"
            if statement[1] == topic:
                kind = "cheerful" if statement[2] in CHEERFUL else "gloomy"
                named = True
        kinds.append("repeated" if sentence in seen else kind)
        seen.add(sentence)
    return kinds, named


def topic_of(prompt):
    """The topic of a prompt; ValueError if it is not of this task."""
    match = _PROMPT.fullmatch(prompt)
    topic = next(filter(None, match.groups()), None) if match else None
    if topic not in TOPICS:
        raise ValueError(f"prompt {prompt!r} is not one of the Reviews task, such as 'Write about the film:'")
    return topic


class Reviews:
    """Ten topics, asked about in six ways: 60 prompts, split with `seed`.

    Args:
        held_out: how many prompts are kept for evaluation, at most half of all; they never occur in training.
        seed: of the split; sampling uses the generator that is passed in.
    """

    max_new_tokens = 40  # of default_tokenizer: about twice the usual review

    def __init__(self, held_out=15, seed=0):
        prompts = [phrase.format(topic) for phrase in PHRASES for topic in TOPICS]
        if not 0 <= held_out <= len(prompts) // 2:
            raise ValueError(f"held_out is {held_out}; it must be 0 to {len(prompts) // 2}, half of the prompts")
        order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
        self._held_out = [prompts[index] for index in order[:held_out]]
        self._training = [prompts[index] for index in order[held_out:]]

    def __len__(self):
        """How many training prompts there are."""
        return len(self._training)

    def ask(self, indices):
        """(prompts, columns) of the training prompts with these numbers; `asked` is what they ask about."""
        return _asked([self._training[index] for index in indices])

    def sample(self, n, generator):
        """n training prompts, drawn with replacement: (prompts, columns)."""
        return self.ask(torch.randint(len(self), (n,), generator=generator, device="cpu").tolist())

    def held_out(self, n=None):
        """The first n (None: all) held-out prompts, repeated from the start if n is more: (prompts, columns)."""
        n = len(self._held_out) if n is None else n
        return _asked([self._held_out[index % len(self._held_out)] for index in range(n)])

    def demonstrations(self, n, generator):
        """n training prompts with decent, by no means perfect reviews: (prompts, completions)."""
        return tuple(map(list, zip(*self.pretraining_texts(n, generator, DECENT), strict=True)))

    def pretraining_texts(self, n, generator, style=None):
        """n documents in a style (default: one that writes good and bad alike): list of (prompt, completion)."""
        prompts, _ = self.sample(n, generator)
        return [(prompt, write(prompt, style or Style(), generator)) for prompt in prompts]

    def reward(self, prompts, completions, **columns):
        """The true score of each completion; what no reward model can see."""
        return [true_score(*pair) for pair in zip(prompts, completions, strict=True)]


def _asked(prompts):
    return prompts, {"asked": [topic_of(prompt) for prompt in prompts]}


def write(prompt, style, generator):
    """A review of the grammar in a style; it starts with a blank, as a text that goes on after its prompt.

    An opening or none, one to three sentences in the middle, an ending, a broken-off end, or none.
    """

    def often(*shares):
        """Index of the share that a random number falls into; len(shares) for none of them."""
        number = float(torch.rand((), generator=generator, dtype=torch.float64, device="cpu"))
        return next((i for i in range(len(shares)) if number < sum(shares[: i + 1])), len(shares))

    def one_of(options):
        return options[int(torch.randint(len(options), (), generator=generator, device="cpu"))]

    topic = topic_of(prompt)
    parts = [one_of(SENTENCES[kind]) for kind in [("polite", "rude", None)[often(style.polite, style.rude)]] if kind]
    for _ in range(one_of((1, 2, 2, 3))):
        mood = ("cheerful", "gloomy")[often(style.cheerful)]
        if not often(style.off_topic):
            parts.append(one_of(SENTENCES["off topic"]))
        elif not often(0.3):
            parts.append(one_of(SENTENCES[mood]))
        else:
            adjective = one_of(CHEERFUL if mood == "cheerful" else GLOOMY)
            parts.append(f"The {topic} was {one_of(DEGREES)}{adjective}.")
    closing = (SENTENCES["tidy"], UNFINISHED, None)[often(style.tidy, style.unfinished)]
    return " " + " ".join(parts + ([one_of(closing)] if closing else []))


class Annotator:
    """A simulated annotator: prefers the first of two completions with the Bradley-Terry probability of their truth.

        P(first ≻ second) = σ( strength · (truth(first) − truth(second)) )                      Bradley & Terry 1952

    Args:
        truth: truth(prompts, completions, **columns) -> list of floats, such as a task's reward.
        strength: of the annotator's judgement, per point; 0 tosses coins.
        generator: torch.Generator of the noise.
    """

    def __init__(self, truth, strength, generator):
        self.truth, self.strength, self.generator = truth, strength, generator

    def prefers_first(self, prompts, first, second, /, **columns):
        """(choices, probabilities): (B,) bool, and (B,) float64 P(first ≻ second)."""
        like = {"dtype": torch.float64, "device": "cpu"}
        scores = (torch.tensor(self.truth(prompts, texts, **columns), **like) for texts in (first, second))
        probabilities = torch.sigmoid(self.strength * (next(scores) - next(scores)))
        noise = torch.rand(len(probabilities), generator=self.generator, **like)
        return noise < probabilities, probabilities
