"""Arithmetic: sums with a rule that checks them, the smallest task with a verifiable reward.

A prompt is `37+48=`. A direct answer is `85`; with thinking it is `<think>37+48=85</think><answer>85</answer>`. The
answer is known, so the reward is exact: no reward model, nothing to over-optimise.
"""

import re

import torch

from minirl.worlds.verifiers import TAGS, answer_reward, format_reward

MAX_PROBLEMS = 10_000_000  # all problems are listed once, to split them
_SUM = re.compile(r"[0-9]{1,80}(?:\+[0-9]{1,80})+(?==$)")  # what a prompt asks for, at its end


def prompt_of(numbers):
    """The prompt that asks for the sum: (37, 48) -> `37+48=`."""
    return "+".join(map(str, numbers)) + "="


def worked_out(numbers, slip=lambda total: total):
    """The sum step by step: (3, 4, 2) -> `3+4=7,7+2=9`; slip(total) is what the pupil writes for a right total."""
    steps, total = [], numbers[0]
    for number in numbers[1:]:
        written = slip(total + number)
        steps.append(f"{total}+{number}={written}")
        total = written
    return ",".join(steps)


def without_carries(numbers):
    """The sum of a pupil who adds each column and forgets what to carry: (37, 48) -> 75."""
    width = len(str(max(numbers)))
    columns = zip(*(str(number).zfill(width) for number in numbers), strict=True)
    return int("".join(str(sum(map(int, column)) % 10) for column in columns))


def thinking_answer(thought, answer):
    """A thought and an answer in the tags that `verifiers.format_reward` checks."""
    return f"<think>{thought}</think><answer>{answer}</answer>"


class Arithmetic:
    """Sums of `terms` numbers from 0 to `largest`.

    All problems are shuffled with `seed` and split once: held-out problems never occur in training. Nor do they occur
    inside a longer training prompt: where 2+34= is held out, 12+34= is in neither part. The same sum in another order
    (34+2=) is another problem and may be in training.

    Args:
        terms: how many numbers are added, at least 2.
        largest: the largest number.
        format: `direct` (the bare answer) or `think` (steps, then the answer, in tags).
        held_out: how many problems are kept for evaluation, at most half of all.
        seed: of the split; sampling uses the generator that is passed in.
    Raises:
        ValueError: if a setting is out of its range.
    """

    def __init__(self, terms=2, largest=99, format="direct", held_out=256, seed=0):
        if terms < 2 or largest < 1:
            raise ValueError(f"Arithmetic needs terms >= 2 and largest >= 1; got terms={terms}, largest={largest}")
        if format not in ("direct", "think"):
            raise ValueError(f"format is {format!r}; choose 'direct' or 'think'")
        problems = (largest + 1) ** terms
        if problems > MAX_PROBLEMS:
            raise ValueError(f"{terms} terms up to {largest} are {problems} problems; at most {MAX_PROBLEMS} allowed")
        if not 0 <= held_out <= problems // 2:
            raise ValueError(f"held_out is {held_out}; it must be 0 to {problems // 2}, half of {problems} problems")
        self.terms, self.largest, self.format = terms, largest, format
        shuffled = torch.randperm(problems, generator=torch.Generator().manual_seed(seed))
        self._held_out = shuffled[:held_out].tolist()
        trainable = torch.ones(problems, dtype=torch.bool)
        for index in self._held_out:
            trainable[self._same_ending(index)] = False
        self._training = trainable.nonzero().squeeze(1)  # problem numbers; see `_numbers`

    def __len__(self):
        return len(self._training)

    @property
    def alphabet(self):
        """The pieces that the task's texts are made of, in either format; see `rewards.off_vocabulary_rate`."""
        return frozenset("0123456789+=,") | frozenset(TAGS)

    @property
    def max_new_tokens(self):
        """Tokens of the longest right completion and its end token, where a tag and any other character are one token.

        That holds for `tokenizer.default_tokenizer()`; other vocabularies may cut a tag into several tokens.
        """
        return len(re.sub("<[^>]*>", "#", self._completion([self.largest] * self.terms))) + 1

    def sample(self, n, generator):
        """n training problems, drawn with replacement.

        Args:
            n: how many.
            generator: a torch.Generator.
        Returns:
            (prompts, columns): n strings, and {"gold": the n right sums as ints}.
        """
        return self._asked(self._draw(n, generator))

    def ask(self, indices):
        """The training problems at `indices` (ints from 0 to len(task) − 1), for whole epochs; returned as by `sample`.

        Raises:
            IndexError: if there is no such problem.
        """
        chosen = torch.as_tensor(indices, dtype=torch.long, device="cpu")
        return self._asked([self._numbers(index) for index in self._training[chosen].tolist()])

    def held_out(self, n=None):
        """The first n (None: all) held-out problems, always in the same order; returned as by `sample`."""
        if n is not None and not 0 <= n <= len(self._held_out):
            raise ValueError(f"{n} held-out problems asked for, but there are {len(self._held_out)}; raise held_out")
        return self._asked([self._numbers(index) for index in self._held_out[:n]])

    def demonstrations(self, n, generator):
        """n training prompts with right completions in the task's format, for supervised fine-tuning.

        Returns:
            (prompts, completions). The end token is no part of the text; packing adds it.
        """
        problems = self._draw(n, generator)
        return [prompt_of(numbers) for numbers in problems], [self._completion(numbers) for numbers in problems]

    def pretraining_texts(self, n, generator, thinking=None, forgetful=0.6, wrong=0.2, wrong_thinking=0.5,
                          random_answers=0.0, careless=0.0):
        """n documents about training problems, many of them wrong: what a model may have read before it is trained.

        A model that has seen right answers and wrong ones samples both, which is what reinforcement learning needs: a
        reward that never varies teaches nothing.

        Args:
            n: how many.
            generator: a torch.Generator.
            thinking: share of documents that think; None for all or none, as the task's format says.
            forgetful: share of the direct answers that forget every carry (right where there is none).
            wrong: share of the direct answers in which one random digit of the sum is another one.
            wrong_thinking: share of the thinking documents that are wrong so, in the last step and in the answer.
            random_answers: share of the direct answers that are any number a sum can be, all alike: who answers without
                thinking learns nothing there (for a base model that R1-Zero's training can teach to think).
            careless: share of the steps of thinking documents that go wrong by a digit; the next goes on from there.
        Returns:
            List of (prompt, completion).
        Raises:
            ValueError: if forgetful, wrong and random_answers are more than all.
        """
        if wrong + forgetful + random_answers > 1:
            raise ValueError(f"forgetful={forgetful}, wrong={wrong} and random_answers={random_answers} are shares of "
                             "the answers; together at most 1")
        if thinking is None:
            thinking = float(self.format == "think")
        def slip(total):
            return _other_digit(total, generator) if torch.rand((), generator=generator) < careless else total

        texts = []
        for numbers in self._draw(n, generator):
            thinks, errs = torch.rand(2, generator=generator, dtype=torch.float64).tolist()
            format = "think" if thinks < thinking else "direct"
            answer = None
            if errs < (wrong_thinking if format == "think" else wrong):
                answer = _other_digit(sum(numbers), generator)
            elif format == "direct" and errs < wrong + forgetful:
                answer = without_carries(numbers)
            elif format == "direct" and errs < wrong + forgetful + random_answers:
                answer = int(torch.randint(self.terms * self.largest + 1, (), generator=generator))
            texts.append((prompt_of(numbers), self._completion(numbers, format, answer)))
            if careless and format == "think":
                steps = worked_out(numbers, slip)
                texts[-1] = (prompt_of(numbers), thinking_answer(steps, steps.rsplit("=", 1)[1]))
        return texts

    def reward(self, prompts, completions, gold, **columns):
        """1.0 where the completion's answer is the right sum, else 0.0; see `verifiers.answer_reward`."""
        return [answer_reward(completion, right) for completion, right in zip(completions, gold, strict=True)]

    def step_rewards(self, prompts, completions, gold, **columns):
        """Rewards of the reasoning steps of thinking completions, for process supervision.

        The steps are the additions of the thought, separated by commas, and the answer. An addition is right if it is
        the first one of the right way that is still missing: for 3+4+2= first `3+4=7`, then `7+2=9`. So an error may be
        corrected, and saying a right step again earns nothing. What is not in the format of `verifiers.format_reward`
        is one step, as right as its answer.

        Args:
            prompts, completions: lists of strings of equal length.
            gold: the right answers.
        Returns:
            For each completion a list of (end, reward): end counts the completion's characters up to the end of the
            step, its comma or closing tag included; reward is 1.0 or 0.0. Ends increase strictly.
        """
        return [_steps(*row) for row in zip(prompts, completions, gold, strict=True)]

    def _completion(self, numbers, format=None, answer=None):
        """The completion in `format` (default: the task's) with `answer` (default: the right one)."""
        answer = sum(numbers) if answer is None else answer
        if (format or self.format) == "direct":
            return str(answer)
        steps = worked_out(numbers)
        return thinking_answer(steps[: steps.rindex("=") + 1] + str(answer), answer)

    def _asked(self, problems):
        return [prompt_of(numbers) for numbers in problems], {"gold": [sum(numbers) for numbers in problems]}

    def _draw(self, n, generator):
        choice = torch.randint(len(self._training), (n,), generator=generator)
        return [self._numbers(index) for index in self._training[choice].tolist()]

    def _numbers(self, index):
        """Problem number `index`, written in base largest+1: its digits are the terms."""
        base = self.largest + 1
        return tuple(index // base**power % base for power in reversed(range(self.terms)))

    def _same_ending(self, index):
        """Numbers of the problems whose prompt ends with the prompt of problem `index`, which is one of them."""
        place = (self.largest + 1) ** (self.terms - 1)
        first, rest = divmod(index, place)
        period = 10 ** len(str(first))
        return torch.arange(first, self.largest + 1, period) * place + rest


def _steps(prompt, completion, gold):
    """[(end, reward), ...] of one completion; see Arithmetic.step_rewards."""
    asked, right = _SUM.search(prompt), answer_reward(completion, gold)
    if asked is None or not format_reward(completion):
        return [(len(completion), right)]
    missing = worked_out([int(number) for number in asked[0].split("+")]).split(",")
    end, steps = completion.index("<think>") + len("<think>"), []
    for step in completion[end : completion.index("</think>")].split(","):
        good = missing[:1] == ["".join(step.split())]
        end += len(step) + 1
        steps.append((end, float(good)))
        missing = missing[good:]
    steps[-1] = (end + len("</think>") - 1, steps[-1][1])  # it ends in a tag, not in a comma
    return [*steps, (completion.index("</answer>") + len("</answer>"), right)]


def _other_digit(number, generator):
    """`number` with one digit replaced by another; a number of several digits does not get a leading 0."""
    digits = str(number)
    place = int(torch.randint(len(digits), (1,), generator=generator))
    allowed = [d for d in "0123456789" if d != digits[place] and (d != "0" or place > 0 or len(digits) == 1)]
    chosen = allowed[int(torch.randint(len(allowed), (1,), generator=generator))]
    return int(digits[:place] + chosen + digits[place + 1 :])
