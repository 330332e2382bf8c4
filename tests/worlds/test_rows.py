"""Rewards of reasoning steps, from characters to tokens: places by hand, and by decoding every prefix."""

import pytest
import torch

from minirl.models.tokenizer import END, PAD, Tokenizer, default_tokenizer
from minirl.worlds.arithmetic import Arithmetic
from minirl.worlds.rows import encode_rows, pack_rows, place_steps

# bytes, and two longer tokens: "ab" and "cde"; so abcde is two tokens, and a step may end inside one
RANKS = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"de": 257, b"cde": 258}
TOY = Tokenizer("toy", r"[\s\S]+", RANKS, {END: 259, PAD: 260})


def placed(tokenizer, prompts, completions, steps):
    _, actions, mask = pack_rows(*encode_rows(tokenizer, prompts, completions), tokenizer.pad_id)
    rewards, ends = place_steps(tokenizer, actions, mask, steps)
    assert rewards.shape == ends.shape == mask.shape and ends.dtype == torch.bool and not (ends & ~mask).any()
    return rewards.tolist(), ends.long().tolist()


def test_places_by_hand():
    # rows are x|ab cde f END and xyz|f END; actions start at the second token: [ab, cde, f, END, pad],
    # [y, z, f, END]; characters end after 2, 5, 6. A step that ends with character 2 ends with ab, the last with END.
    rewards, ends = placed(TOY, ["x", "xyz"], ["abcdef", "f"], [[(2, 0.5), (6, 2.0)], [(1, -1.0)]])
    assert rewards == [[0.5, 0, 0, 2.0], [0, 0, 0, -1.0]]
    assert ends == [[1, 0, 0, 1], [0, 0, 0, 1]]


@pytest.mark.parametrize(("end", "column"), [(1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)])
def test_a_step_ends_with_the_token_that_holds_its_last_character(end, column):
    rewards, ends = placed(TOY, ["x"], ["abcdefg"], [[(end, 1.0), (7, 0.0)]])  # ab cde f g END
    assert rewards[0] == [float(i == column) for i in range(5)]
    assert ends[0] == [int(i in (column, 4)) for i in range(5)]


def test_steps_that_end_in_one_token_share_it():
    rewards, ends = placed(TOY, ["x"], ["abcdef"], [[(3, 1.0), (4, 0.25), (6, 0.0)]])  # both end inside cde
    assert rewards == [[0, 1.25, 0, 0]] and ends == [[0, 1, 0, 1]]


def test_a_response_without_an_end_closes_with_its_last_token():
    _, actions, mask = pack_rows([[120]], [[256, 258]], 260)  # ab cde, cut off
    rewards, ends = place_steps(TOY, actions, mask, [[(2, 1.0), (5, 3.0)]])
    assert rewards.tolist() == [[1.0, 3.0]] and ends.tolist() == [[True, True]]


def test_a_row_without_steps_stays_empty():
    rewards, ends = placed(TOY, ["x", "x"], ["ab", "f"], [[], [(1, 1.0)]])
    assert rewards == [[0, 0], [0, 1]] and ends == [[0, 0], [0, 1]]


def test_an_empty_completion_has_its_end_token():
    assert placed(TOY, ["x"], [""], [[(0, -2.0)]]) == ([[-2.0]], [[1]])


def test_characters_of_several_tokens_count_once():
    # € is three bytes, here three tokens, and one character: actions [e2, 82, ac, ',', f, END]
    rewards, ends = placed(TOY, ["x"], ["€,f"], [[(2, 1.0), (3, 0.0)]])
    assert rewards == [[0, 0, 0, 1, 0, 0]] and ends == [[0, 0, 0, 1, 0, 1]]


def test_bytes_that_are_no_text_count_as_they_are_shown():
    # e2 82 begins a € that never comes and shows as one U+FFFD: the text is "�," and the comma ends at 2 characters
    _, actions, mask = pack_rows([[120]], [[0xE2, 0x82, ord(","), ord("f"), 259]], 260)
    assert len(TOY.decode([0xE2, 0x82])) == 1
    rewards, ends = place_steps(TOY, actions, mask, [[(2, 1.0), (3, 0.0)]])
    assert rewards.tolist() == [[0, 0, 1, 0, 0]] and ends.long().tolist() == [[0, 0, 1, 0, 1]]


def test_steps_of_sums_end_at_their_commas_and_tags():
    # in the default vocabulary a tag and any other character of a sum is one token, so the tokens can be read off
    task, tokenizer = Arithmetic(3, 9, "think", held_out=10), default_tokenizer()
    prompts, completions = ["3+4+2=", "1+1+1="], [
        "<think>3+4=7,7+2=9</think><answer>9</answer>", "<think>1+1=2,2+1=4</think><answer>4</answer>",
    ]  # fmt: skip
    steps = task.step_rewards(prompts, completions, gold=[9, 3])
    _, actions, mask = pack_rows(*encode_rows(tokenizer, prompts, completions), tokenizer.pad_id)
    rewards, ends = place_steps(tokenizer, actions, mask, steps)
    for row, right in enumerate(([1, 1, 1], [1, 0, 0])):
        tokens = [tokenizer.decode([index]) for index in actions[row].tolist()]
        assert [tokens[i] for i in ends[row].nonzero().flatten().tolist()] == [",", "</think>", END]
        assert rewards[row][ends[row]].tolist() == right and rewards[row].sum() == sum(right)


def test_places_agree_with_decoding_every_prefix():
    # random ids, half of them no UTF-8: the end of a step is the first prefix whose text is long enough
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(259, (12,), generator=generator).tolist()
        length = len(TOY.decode(ids))
        where = sorted(set((torch.randint(length, (3,), generator=generator) + 1).tolist()) - {length})
        steps = [(end, 1.0 + index) for index, end in enumerate(where)] + [(length, 0.0)]
        wanted = [0.0] * 13
        for end, reward in steps[:-1]:
            wanted[next(i for i in range(12) if len(TOY.decode(ids[: i + 1])) >= end)] += reward
        _, actions, mask = pack_rows([[120]], [[*ids, 259]], 260)
        assert place_steps(TOY, actions, mask, [steps])[0].tolist() == [wanted]


def test_steps_stay_where_the_mask_is(foreign_default_device):
    _, actions, mask = pack_rows([[120]], [[97, 259]], 260)
    rewards, ends = place_steps(TOY, actions, mask, [[(1, 1.0)]])
    assert rewards.device == ends.device == mask.device
