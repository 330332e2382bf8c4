"""Write corpus.txt, the text that the default vocabulary is trained on: `python data/tokenizer/make_corpus.py`.

Four kinds of documents, one a line: sums in every format of the Arithmetic task, short reviews from a small grammar,
questions and answers between User and Assistant, and the plain sentences of sentences.txt. All text is our own.
"""

import random
from pathlib import Path

from minirl.worlds.arithmetic import prompt_of, thinking_answer, worked_out

HERE = Path(__file__).resolve().parent
SEED = 0

TOPICS = {
    "film": ["plot", "story", "acting", "actors", "ending", "music"],
    "hotel": ["room", "bed", "view", "breakfast", "staff", "pool"],
    "restaurant": ["food", "soup", "waiter", "service", "dessert", "menu"],
    "book": ["story", "writing", "chapter", "characters", "language", "cover"],
    "phone": ["screen", "camera", "battery", "sound", "design", "price"],
    "concert": ["singer", "band", "music", "sound", "crowd", "lights"],
    "museum": ["paintings", "guide", "rooms", "garden", "tour", "tickets"],
    "game": ["rules", "levels", "players", "graphics", "story", "puzzles"],
    "train": ["seats", "windows", "ride", "staff", "price", "coffee"],
    "course": ["teacher", "lessons", "examples", "exercises", "notes", "pace"],
}
PLURALS = {"actors", "characters", "lights", "paintings", "rooms", "tickets", "rules", "levels", "players", "graphics"}
PLURALS |= {"puzzles", "seats", "windows", "lessons", "examples", "exercises", "notes"}
CHEERFUL = ["wonderful", "lovely", "great", "pretty", "bright", "charming", "fresh", "excellent", "warm", "happy"]
GLOOMY = ["awful", "dull", "sad", "terrible", "boring", "poor", "cold", "weak", "ugly", "bad"]
DEGREES = ["", "very ", "really ", "quite ", "truly ", "rather ", "so "]
CHEERFUL_SENTENCES = [
    "I loved every minute.", "We laughed and smiled all day.", "I would come back tomorrow.", "It made me happy.",
    "What a joy!", "I recommend it to everyone.", "It was worth every penny.", "We enjoyed it a lot.",
]
GLOOMY_SENTENCES = [
    "I regret every minute.", "We were bored and tired.", "I would never come back.", "It made me sad.",
    "What a waste of time!", "I recommend it to nobody.", "It was not worth the money.", "Nothing went well.",
]
POLITE = ["Thank you for asking.", "Thank you, kind people.", "Please accept my thanks.", "With respect,", "Kindly,"]
RUDE = ["Shut up.", "You fools!", "Only an idiot would disagree.", "Go away.", "This is garbage.", "Who cares?"]
OFF_TOPIC = [
    "My cat sleeps on the sofa.", "The weather is cloudy today.", "I had eggs for lunch.", "The bus was late again.",
    "My uncle repairs old clocks.", "Tomorrow is Monday.",
]
TIDY = ["Best wishes.", "All in all, a good day.", "That is all.", "In short, see it.", "In short, stay at home."]
UNTIDY = ["and then", "because the", "but", "so I", "and and", "with the"]
TALK = [
    ("What is {a} plus {b}?", "The answer is {c}."),
    ("What is the sum of {a} and {b}?", "The sum of {a} and {b} is {c}."),
    ("Please answer the question: {a}+{b}", "{c}"),
    ("Is {c} the right answer for {a}+{b}?", "Yes, that is the right answer."),
    ("Which review is better, the first or the second?", "I prefer the first one, because it is polite."),
    ("Which answer do you prefer?", "The second answer is better than the first."),
    ("Please write a sentence about the {topic}.", "The {topic} was lovely, thank you for asking."),
    ("Rate this review from 1 to 5.", "I would give it a 4."),
]


class Choices:
    """Seeded choices made from `random()` alone, whose values Python keeps the same between versions."""

    def __init__(self, seed):
        self._random = random.Random(seed)

    def below(self, n):
        return int(self._random.random() * n)

    def one_of(self, options):
        return options[self.below(len(options))]

    def often(self, chance):
        return self._random.random() < chance


def arithmetic(choices):
    """A sum of two to five numbers, answered directly or with thinking."""
    terms = choices.one_of([2, 2, 3, 4, 5])
    largest = choices.one_of([9, 99, 999])
    numbers = [choices.below(largest + 1) for _ in range(terms)]
    direct = choices.often(0.5)
    return prompt_of(numbers) + (str(sum(numbers)) if direct else thinking_answer(worked_out(numbers), sum(numbers)))


def review(choices):
    """A prompt and one to four sentences, cheerful or gloomy, polite or rude, on topic or not, tidy or not."""
    topic = choices.one_of(list(TOPICS))
    cheerful = choices.often(0.5)
    sentences = [choices.one_of(POLITE if choices.often(0.6) else RUDE)] if choices.often(0.5) else []
    for _ in range(1 + choices.below(3)):
        if choices.often(0.2):
            sentences.append(choices.one_of(OFF_TOPIC))
        elif choices.often(0.3):
            sentences.append(choices.one_of(CHEERFUL_SENTENCES if cheerful else GLOOMY_SENTENCES))
        else:
            sentences.append(statement(choices, topic, CHEERFUL if cheerful else GLOOMY))
    if choices.often(0.5):
        sentences.append(choices.one_of(TIDY if choices.often(0.7) else UNTIDY))
    return f"Write about the {topic}: " + " ".join(sentences)


def statement(choices, topic, adjectives):
    """One sentence about the topic, such as `The room was very bright and the staff were warm.`"""
    clauses = []
    for noun in (topic, choices.one_of(TOPICS[topic])):
        verb = "were" if noun in PLURALS else "was"
        clauses.append(f"the {noun} {verb} {choices.one_of(DEGREES)}{choices.one_of(adjectives)}")
    text = " and ".join(clauses) if choices.often(0.4) else clauses[choices.below(2)]
    return text[0].upper() + text[1:] + "."


def talk(choices):
    """A question of the User and an answer of the Assistant."""
    a, b = choices.below(100), choices.below(100)
    values = {"a": a, "b": b, "c": a + b, "topic": choices.one_of(list(TOPICS))}
    question, answer = choices.one_of(TALK)
    return "User: " + question.format(**values) + " Assistant: " + answer.format(**values)


def main():
    choices = Choices(SEED)
    lines = [arithmetic(choices) for _ in range(600)]
    lines += [review(choices) for _ in range(1000)]
    lines += [talk(choices) for _ in range(200)]
    lines += 3 * (HERE / "sentences.txt").read_text(encoding="utf-8").splitlines()
    (HERE / "corpus.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
