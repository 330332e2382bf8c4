"""The Arithmetic task: right answers are right, held-out problems stay out, and the seed decides everything."""

import hashlib
import random
import re

import pytest
import torch

from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.arithmetic import Arithmetic, prompt_of, thinking_answer, without_carries, worked_out
from minirl.worlds.rewards import off_vocabulary_rate
from minirl.worlds.verifiers import TAGS, answer_reward, format_reward


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def sum_of(prompt):
    return sum(int(number) for number in re.findall("[0-9]+", prompt))


def test_the_texts():
    assert prompt_of((37, 48)) == "37+48="
    assert worked_out((37, 48)) == "37+48=85"
    assert worked_out((3, 4, 2)) == "3+4=7,7+2=9"
    assert worked_out((9, 9, 9, 1)) == "9+9=18,18+9=27,27+1=28"
    assert thinking_answer("3+4=7", 7) == "<think>3+4=7</think><answer>7</answer>"


@pytest.mark.parametrize("format", ["direct", "think"])
@pytest.mark.parametrize(("terms", "largest"), [(2, 99), (3, 20), (4, 9)])
def test_demonstrations_earn_everything(terms, largest, format):
    task = Arithmetic(terms, largest, format)
    prompts, completions = task.demonstrations(200, seeded(1))
    gold = [sum_of(prompt) for prompt in prompts]
    assert task.reward(prompts, completions, gold) == [1.0] * 200
    assert all(len(re.findall("[0-9]+", prompt)) == terms for prompt in prompts)
    assert all(0 <= int(number) <= largest for prompt in prompts for number in re.findall("[0-9]+", prompt))
    if format == "direct":
        assert completions == [str(right) for right in gold]
    else:
        assert all(format_reward(completion) == 1.0 for completion in completions)
        for completion in completions:
            for left, right, total in re.findall("([0-9]+)[+]([0-9]+)=([0-9]+)", completion):
                assert int(left) + int(right) == int(total)


def test_gold_is_the_sum_and_a_wrong_answer_earns_nothing():
    task = Arithmetic()
    prompts, columns = task.sample(100, seeded(2))
    assert columns["gold"] == [sum_of(prompt) for prompt in prompts]
    assert task.reward(prompts, [str(right + 1) for right in columns["gold"]], **columns) == [0.0] * 100
    assert task.reward(prompts, prompts, **columns) == [0.0] * 100  # repeating the question is no answer


def test_reward_ignores_other_columns_and_refuses_unequal_lengths():
    assert Arithmetic().reward(["1+1="], ["2"], gold=[2], source=["book"]) == [1.0]
    with pytest.raises(ValueError):
        Arithmetic().reward(["1+1="], ["2"], gold=[2, 3])


def test_training_and_held_out_problems_cover_all_without_a_common_one():
    task = Arithmetic(terms=2, largest=9, held_out=30)
    held_out, _ = task.held_out()
    training = set(task.sample(5000, seeded(0))[0])
    assert len(held_out) == len(set(held_out)) == 30
    assert training | set(held_out) == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    assert not training & set(held_out)


@pytest.mark.parametrize(("terms", "largest", "held_out"), [(2, 99, 256), (2, 120, 1000), (3, 12, 300)])
def test_no_training_text_contains_a_held_out_problem(terms, largest, held_out):
    task = Arithmetic(terms, largest, "think", held_out)
    generator = seeded(3)
    texts = task.sample(4000, generator)[0] + [prompt + c for prompt, c in task.pretraining_texts(4000, generator)]
    texts += [prompt + completion for prompt, completion in zip(*task.demonstrations(4000, generator), strict=True)]
    text = "\n".join(texts)
    assert not [prompt for prompt in task.held_out()[0] if prompt in text]  # 2+34= would also be found in 12+34=


def test_only_problems_that_end_like_a_held_out_one_are_missing():
    task = Arithmetic(terms=2, largest=20, held_out=100, seed=5)
    held_out, _ = task.held_out()
    training = set(task.sample(20000, seeded(0))[0])
    for prompt in (f"{a}+{b}=" for a in range(21) for b in range(21)):
        assert (prompt in training) != any(prompt.endswith(other) for other in held_out)


def test_held_out_problems_come_in_a_fixed_order():
    task = Arithmetic()
    prompts, columns = task.held_out()
    assert len(prompts) == 256
    assert task.held_out(10) == (prompts[:10], {"gold": columns["gold"][:10]})
    assert Arithmetic(format="think").held_out() == (prompts, columns)  # the format does not change the split
    assert columns["gold"] == [sum_of(prompt) for prompt in prompts]
    assert Arithmetic(held_out=0).held_out() == ([], {"gold": []})
    with pytest.raises(ValueError, match="257 .* 256"):
        task.held_out(257)


def test_the_seed_decides_the_split_and_the_generator_what_is_drawn():
    assert Arithmetic(seed=1).held_out() == Arithmetic(seed=1).held_out()
    assert Arithmetic(seed=1).held_out() != Arithmetic(seed=2).held_out()
    task = Arithmetic(format="think")
    for draw in (task.sample, task.demonstrations, task.pretraining_texts):
        assert draw(50, seeded(7)) == draw(50, seeded(7))
        assert draw(50, seeded(7)) != draw(50, seeded(8))


def test_the_global_generator_is_left_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    task = Arithmetic(format="think")
    task.sample(5, seeded(0)), task.demonstrations(5, seeded(0)), task.pretraining_texts(5, seeded(0))
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_asks_every_training_problem_once():
    task = Arithmetic(terms=2, largest=9, held_out=30)
    prompts, columns = task.ask(range(len(task)))
    assert columns == {"gold": [sum_of(prompt) for prompt in prompts]}
    drawn = set(task.sample(5000, seeded(0))[0])
    assert len(prompts) == len(task) == len(set(prompts)) and set(prompts) == drawn
    picked = task.ask(torch.tensor([3, 0, 3]))
    assert picked[0] == [prompts[3], prompts[0], prompts[3]] and picked == task.ask([3, 0, 3])
    assert task.ask([]) == ([], {"gold": []})
    with pytest.raises(IndexError):
        task.ask([len(task)])


@pytest.mark.parametrize("format", ["direct", "think"])
def test_the_alphabet_is_what_the_texts_are_made_of(format):
    task = Arithmetic(terms=3, largest=99, format=format)
    texts = [prompt + completion for prompt, completion in task.pretraining_texts(500, seeded(0), thinking=0.5)]
    pieces = {piece for text in texts for piece in re.findall("<[^>]*>|.", text)}
    assert pieces == task.alphabet == {*"0123456789+=,", *TAGS}
    assert all(off_vocabulary_rate(text, task.alphabet) == 0.0 for text in texts)
    assert off_vocabulary_rate("<think>3 + 4 is 7</think><think >", task.alphabet) == 9 / 15


# --- steps

STEPS = [  # for 3+4+2=: completion, the pieces that it falls into with their rewards, what is left
    ("<think>3+4=7,7+2=9</think><answer>9</answer>",
     [("<think>3+4=7,", 1), ("7+2=9</think>", 1), ("<answer>9</answer>", 1)], ""),
    ("<think>3+4=8,8+2=10</think><answer>10</answer>",
     [("<think>3+4=8,", 0), ("8+2=10</think>", 0), ("<answer>10</answer>", 0)], ""),
    ("<think>3+4=7,7+2=8</think><answer>9</answer>",
     [("<think>3+4=7,", 1), ("7+2=8</think>", 0), ("<answer>9</answer>", 1)], ""),
    ("<think>3+4=8,3+4=7,7+2=9</think><answer>9</answer>",  # corrected
     [("<think>3+4=8,", 0), ("3+4=7,", 1), ("7+2=9</think>", 1), ("<answer>9</answer>", 1)], ""),
    ("<think>3+4=7,3+4=7,7+2=9,7+2=9</think><answer>9</answer>",  # repeated
     [("<think>3+4=7,", 1), ("3+4=7,", 0), ("7+2=9,", 1), ("7+2=9</think>", 0), ("<answer>9</answer>", 1)], ""),
    ("<think>7+2=9</think><answer>9</answer>", [("<think>7+2=9</think>", 0), ("<answer>9</answer>", 1)], ""),
    ("<think>4+3=7,7+2=9</think><answer>9</answer>",
     [("<think>4+3=7,", 0), ("7+2=9</think>", 0), ("<answer>9</answer>", 1)], ""),
    ("<think></think><answer>9</answer>", [("<think></think>", 0), ("<answer>9</answer>", 1)], ""),
    ("<think>,</think><answer>8</answer>", [("<think>,", 0), ("</think>", 0), ("<answer>8</answer>", 0)], ""),
    (" <think>\n3 + 4 = 7 ,\n7+2=9\n</think>\n<answer> 9 </answer>\n<|endoftext|>",
     [(" <think>\n3 + 4 = 7 ,", 1), ("\n7+2=9\n</think>", 1), ("\n<answer> 9 </answer>", 1)], "\n<|endoftext|>"),
    ("9", [("9", 1)], ""), ("8", [("8", 0)], ""), ("", [("", 0)], ""),
    ("<answer>9</answer>", [("<answer>9</answer>", 1)], ""),
    ("<think>3+4=7,7+2=9<answer>9</answer>", [("<think>3+4=7,7+2=9<answer>9</answer>", 1)], ""),
    ("<think>3+4=7,7+2=9</think>", [("<think>3+4=7,7+2=9</think>", 0)], ""),
]  # fmt: skip


@pytest.mark.parametrize(("completion", "pieces", "rest"), STEPS, ids=[row[0][:60] for row in STEPS])
def test_steps_by_hand(completion, pieces, rest):
    assert "".join(piece for piece, _ in pieces) + rest == completion, "the test itself is wrong"
    ends, end = [], 0
    for piece, reward in pieces:
        end += len(piece)
        ends.append((end, float(reward)))
    assert Arithmetic(3, 9, "think").step_rewards(["3+4+2="], [completion], gold=[9], source=["book"]) == [ends]


@pytest.mark.parametrize(("terms", "largest"), [(2, 99), (4, 9)])
def test_every_step_of_a_demonstration_is_right_and_only_the_last_of_a_wrong_one_is_not(terms, largest):
    task = Arithmetic(terms, largest, "think")
    prompts, completions = task.demonstrations(100, seeded(0))
    gold = [sum_of(prompt) for prompt in prompts]
    for steps, completion in zip(task.step_rewards(prompts, completions, gold), completions, strict=True):
        assert [reward for _, reward in steps] == [1.0] * terms and steps[-1][0] == len(completion)
        assert completion[: steps[-2][0]].endswith("</think>")
        assert all(completion[end - 1] == "," for end, _ in steps[:-2])
    for prompt, completion in task.pretraining_texts(100, seeded(0), wrong_thinking=1.0):
        (steps,) = task.step_rewards([prompt], [completion], [sum_of(prompt)])
        assert [reward for _, reward in steps] == [1.0] * (terms - 2) + [0.0, 0.0]


def test_a_prompt_that_asks_no_sum_has_one_step():
    completion = "<think>3+4=7</think><answer>7</answer>"
    task = Arithmetic()
    for prompt in ("", "7=", "3+4", "what is 3+4?", "+=", "9" * 5000 + "+1"):
        assert task.step_rewards([prompt], [completion], [7]) == [[(len(completion), 1.0)]]
    assert task.step_rewards(["User: 3+4="], [completion], [7]) == [[(20, 1.0), (len(completion), 1.0)]]
    with pytest.raises(ValueError):
        task.step_rewards(["3+4="], [completion, completion], [7, 7])


def test_no_text_makes_the_steps_raise_and_their_ends_increase():
    rng = random.Random(0)
    parts = [*TAGS, *TAGS, "3+4=7", "7+2=9", ",", "+", "=", " ", "\n", "9", "\u0669", "<|endoftext|>", "\ud800"]
    texts = ["".join(rng.choice(parts) for _ in range(rng.randrange(12))) for _ in range(3000)]
    texts += [f"<think>{a}</think><answer>{b}</answer>" for a, b in zip(texts, texts[1:], strict=False)]
    texts += ["<think>" + "," * 100_000 + "</think><answer>9</answer>", "<think>" * 50_000, "9" * 100_000]
    found = Arithmetic(3, 9, "think").step_rewards(["3+4+2="] * len(texts), texts, [9] * len(texts))
    assert sum(len(steps) > 1 for steps in found) > 100
    for text, steps in zip(texts, found, strict=True):
        ends = [end for end, _ in steps]
        assert ends and ends == sorted(set(ends)) and ends[-1] <= len(text) and (ends[0] > 0 or not text)
        assert all(type(end) is int and reward in (0.0, 1.0) for end, reward in steps)
        assert steps[-1][1] == answer_reward(text, 9) and sum(reward for _, reward in steps) <= 3


# --- the shares of what is wrong


def test_pretraining_texts_are_wrong_as_asked():
    # 2,000 draws with chance p: a share more than 5 deviations, 5 sqrt(p (1 - p) / 2000) <= 0.056, off is a fault.
    task = Arithmetic()
    texts = task.pretraining_texts(2000, seeded(0), forgetful=0.3, wrong=0.5)
    no_carry = [all(int(a) + int(b) < 10 for a, b in zip(x.zfill(2), y.zfill(2), strict=True))
                for x, y in (prompt[:-1].split("+") for prompt, _ in texts)]  # fmt: skip
    right = [int(completion) == sum_of(prompt) for prompt, completion in texts]
    # right: a fifth of all, and the forgetful three tenths where there is nothing to forget
    assert abs(sum(right) / 2000 - (0.2 + 0.3 * sum(no_carry) / 2000)) < 0.056
    right_texts = task.pretraining_texts(500, seeded(0), forgetful=0.0, wrong=0.0)
    assert all(int(c) == sum_of(p) for p, c in right_texts)
    assert all(int(c) != sum_of(p) for p, c in task.pretraining_texts(500, seeded(0), forgetful=0.0, wrong=1.0))
    with pytest.raises(ValueError, match="at most 1"):
        task.pretraining_texts(1, seeded(0), forgetful=0.6, wrong=0.5)


def test_random_answers_are_all_alike_and_leave_the_other_texts_as_they_were():
    task = Arithmetic(terms=2, largest=9, held_out=0)
    texts = task.pretraining_texts(6000, seeded(0), forgetful=0.0, wrong=0.0, random_answers=1.0)
    answers = [int(completion) for _, completion in texts]
    assert set(answers) == set(range(19))
    # 6,000 draws of chance 1/19: 316 of each; five deviations are 5 sqrt(6000 · 18) / 19 = 87
    assert all(abs(answers.count(number) - 6000 / 19) < 87 for number in range(19))
    mixed = task.pretraining_texts(4000, seeded(0), forgetful=0.0, wrong=0.25, random_answers=0.5)
    right = [int(completion) == sum_of(prompt) for prompt, completion in mixed]
    assert abs(sum(right) / 4000 - (0.25 + 0.5 / 19)) < 0.04  # one random answer in nineteen is right
    thinking = task.pretraining_texts(200, seeded(0), thinking=1.0, wrong_thinking=0.0, random_answers=0.2)
    assert all(answer_reward(completion, sum_of(prompt)) for prompt, completion in thinking)
    with pytest.raises(ValueError, match="random_answers=0.3 are shares .* at most 1"):
        task.pretraining_texts(1, seeded(0), random_answers=0.3)


def test_the_stream_of_texts_stays_what_it_was():
    # published runs repeat to the bit only as long as the same seed gives the same texts
    generator = seeded(3)
    texts = Arithmetic(terms=3, largest=9).pretraining_texts(500, generator, thinking=0.3)
    stream = repr(texts) + repr(torch.rand(2, generator=generator, dtype=torch.float64).tolist())
    assert hashlib.sha256(stream.encode()).hexdigest()[:16] == "e685b6313446ff56"  # of the version without the option


@pytest.mark.parametrize(
    ("numbers", "answer"), [((37, 48), 75), ((12, 34), 46), ((99, 1), 90), ((5, 5), 0), ((8, 7, 9), 4), ((60, 70), 30)]
)
def test_forgotten_carries(numbers, answer):
    # 37 + 48: 7 + 8 = 15 leaves 5, 3 + 4 = 7 without the carried 1: 75
    assert without_carries(numbers) == answer
    if len(numbers) == 2:
        texts = Arithmetic().pretraining_texts(300, seeded(0), forgetful=1.0, wrong=0.0)
        assert all(int(c) == without_carries(tuple(map(int, p[:-1].split("+")))) for p, c in texts)


def test_a_wrong_answer_differs_in_one_digit():
    places = set()
    for prompt, completion in Arithmetic().pretraining_texts(2000, seeded(0), forgetful=0.0, wrong=1.0):
        right = str(sum_of(prompt))
        assert len(right) == len(completion) and not (len(right) > 1 and completion[0] == "0")
        differing = [i for i in range(len(right)) if right[i] != completion[i]]
        assert len(differing) == 1
        places |= {(len(right), differing[0])}
    assert places == {(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)}


def test_a_mixture_for_r1_zero():
    # a quarter thinks, always rightly; three quarters of the direct answers are wrong
    task = Arithmetic(terms=3, largest=9, format="think")
    texts = task.pretraining_texts(4000, seeded(0), thinking=0.25, forgetful=0.0, wrong=0.75, wrong_thinking=0.0)
    thinking = [(p, c) for p, c in texts if format_reward(c)]
    direct = [(p, c) for p, c in texts if not format_reward(c)]
    assert abs(len(thinking) / 4000 - 0.25) < 0.035
    for prompt, completion in thinking:
        numbers = [int(number) for number in re.findall("[0-9]+", prompt)]
        assert completion == thinking_answer(worked_out(numbers), sum(numbers))
    assert abs(sum(int(c) != sum_of(p) for p, c in direct) / len(direct) - 0.75) < 0.04


def test_a_wrong_thought_errs_in_its_last_step_and_repeats_the_error_in_the_answer():
    task = Arithmetic(terms=3, largest=9, format="think")
    for prompt, completion in task.pretraining_texts(200, seeded(0), wrong_thinking=1.0):
        first, second, answer = re.fullmatch("<think>(.+),(.+)</think><answer>(.+)</answer>", completion).groups()
        a, b, c = map(int, re.findall("[0-9]+", prompt))
        assert first == f"{a}+{b}={a + b}"
        assert second == f"{a + b}+{c}={answer}" and int(answer) != a + b + c


@pytest.mark.parametrize("format", ["direct", "think"])
@pytest.mark.parametrize(("terms", "largest"), [(2, 9), (2, 99), (4, 9)])
def test_max_new_tokens_is_the_longest_right_completion_with_its_end(terms, largest, format):
    task = Arithmetic(terms, largest, format, held_out=0)
    _, completions = task.demonstrations(20000, seeded(0))
    assert max(len(default_tokenizer().encode(c)) for c in set(completions)) + 1 == task.max_new_tokens


@pytest.mark.parametrize(
    "settings",
    [{"terms": 1}, {"largest": 0}, {"format": "Think"}, {"held_out": -1}, {"held_out": 5001}, {"terms": 4}],
)
def test_settings_out_of_range_are_one_clear_line(settings):
    with pytest.raises(ValueError) as error:
        Arithmetic(**settings)
    assert "\n" not in str(error.value) and next(iter(settings)) in str(error.value)
