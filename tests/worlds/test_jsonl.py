"""Data files: each format, each complaint with its place, and that no row is lost, cut or leaked without a word."""

import json

import pytest
import torch

from minirl.models.tokenizer import END, PAD, Tokenizer, default_tokenizer
from minirl.worlds.jsonl import (
    FilePrompts,
    PairTexts,
    chat_text,
    pack_pairs,
    pack_within,
    read_completions,
    read_jsonl,
    read_pairs,
    read_prompts,
    report_skipped,
    write_jsonl,
)
from minirl.worlds.text import TokenWorld

ASK, SAY, OTHER = ({"role": r, "content": c} for r, c in (("user", " Hi\n"), ("assistant", "Yo "), ("assistant", "No")))
BRIEF = {"role": "system", "content": "Be brief."}
TAKES = "sft takes prompt/completion or messages; reward-model, dpo and orpo take prompt/chosen/rejected"


@pytest.fixture
def file(tmp_path):
    """Write bytes, a text, or rows; returns the path."""

    def make(content):
        path = tmp_path / "data.jsonl"
        if isinstance(content, list):
            content = "".join(json.dumps(row) + "\n" for row in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return make


def complaint(read, path, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        read(path, *args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(path), "PATH")


# ---- lines


def test_blank_lines_marks_and_line_ends_do_no_harm(file):
    path = file(b'\xef\xbb\xbf{"a": "x y"}\r\n\r\n  \n {"a": 2}')
    assert read_jsonl(path) == [(1, {"a": "x y"}), (4, {"a": 2})]
    assert read_jsonl(file(b'\xef\xbb\xbf\n{"a": 1}')) == [(2, {"a": 1})]


def test_written_rows_come_back(tmp_path):
    strange = "é 中\u2028\u0085\x0b🙂 \n"  # some of these end a line for str.splitlines
    rows = [{"prompt": strange, "n": [1, None, {"a": 0.5}]}, {"prompt": " "}]
    path = tmp_path / "out.jsonl"
    write_jsonl(path, rows)
    assert [row for _, row in read_jsonl(path)] == rows
    data = path.read_bytes()
    assert data.count(b"\n") == 2 and data.endswith(b"\n") and b"\r" not in data and "中".encode() in data
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_jsonl(tmp_path / "nan.jsonl", [{"a": 1}, {"a": float("nan")}])
    assert not (tmp_path / "nan.jsonl").exists()


GOOD = b'{"a": 1}\n\n'


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"a": 1', "not JSON (Expecting ',' delimiter, column 8); write one whole object a line"),
        (b'{"a": }', "not JSON (Expecting value, column 7); write one whole object a line"),
        (b'{"a": 1} {"a": 2}', "not JSON (Extra data, column 10); write one whole object a line"),
        (b'[{"a": 1}]', "not an object; write one {...} a line"),
        (b'"a"', "not an object; write one {...} a line"),
        (b'{"a": 1, "b": 2, "a": 1}', "a is there twice; keep one"),
        (b'{"m": {"role": "user", "role": "user"}}', "role is there twice; keep one"),
        (b'{"a": "\xe9"}', "not UTF-8, or half of a character (\\ud...); save the file as UTF-8"),
        (b'{"a": ["\\ud83d"]}', "not UTF-8, or half of a character (\\ud...); save the file as UTF-8"),
    ],
)  # fmt: skip
def test_lines_that_are_no_rows(file, line, reason):
    assert complaint(read_jsonl, file(GOOD + line + b"\n" + GOOD)) == f"PATH, line 3: {reason}"


def test_files_without_rows(file, tmp_path):
    for content in (b"", b"\xef\xbb\xbf\r\n \n"):
        assert complaint(read_jsonl, file(content)) == "PATH has no rows; write one JSON object a line"
    with pytest.raises(FileNotFoundError):
        read_jsonl(tmp_path / "nowhere.jsonl")


# ---- completions


def test_texts_to_imitate_stay_as_they_are(file):
    rows = [{"prompt": " 2+3= ", "completion": "\n5 ", "x": 1}, {"completion": "", "prompt": " "},
            {"prompt": "é中", "completion": "🙂", "messages": [ASK, SAY]}]
    assert read_completions(file(rows)) == ([" 2+3= ", " ", "é中"], ["\n5 ", "", "🙂"])


def test_conversations_to_imitate(file):
    empty = {"role": "assistant", "content": " \n"}
    rows = [{"messages": [BRIEF, ASK, SAY, ASK, OTHER], "prompt": "the first question", "prompt_id": 3},
            {"prompt": [ASK], "completion": [SAY]}, {"messages": [ASK, empty]}]
    prompts, completions = read_completions(file(rows))
    assert prompts == ["System: Be brief. User: Hi Assistant: Yo User: Hi Assistant:"] + ["User: Hi Assistant:"] * 2
    assert completions == [" No", " Yo", ""]
    for row, prompt, completion in zip(rows, prompts, completions, strict=True):
        whole = row.get("messages") or row["prompt"] + row["completion"]
        assert prompt + completion == chat_text(whole)


def test_the_template():
    assert chat_text([BRIEF, ASK, SAY]) == "System: Be brief. User: Hi Assistant: Yo"
    assert chat_text([ASK], to_answer=True) == "User: Hi Assistant:" and chat_text([]) == ""
    assert chat_text([{"role": "system", "content": ""}, ASK]) == "System: User: Hi"
    with pytest.raises(ValueError, match="messages is \"Hi\"; it must be a list of messages"):
        chat_text("Hi")


EMPTY = "the prompt is empty; the first token of an answer needs something to follow"
BOTH = "must both be text, or messages and one message with role assistant"


def message(**parts):
    return {"messages": [ASK, parts, SAY]}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "a", "gold": 3}, f"no column completion (found: gold, prompt); {TAKES}"),
        ({"completion": "a"}, f"no column prompt (found: completion); {TAKES}"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"},
         f"no column completion (found: chosen, prompt, rejected); {TAKES}"),
        ({}, f"no column completion (found: ); {TAKES}"),
        ({"prompt": "a", "completion": 5}, "completion is 5; it must be text or a list of messages"),
        ({"prompt": None, "completion": "a"}, "prompt is null; it must be text or a list of messages"),
        ({"messages": "a"}, 'messages is "a"; it must be a list of messages'),
        ({"prompt": "", "completion": "a"}, EMPTY),
        ({"prompt": [], "completion": [SAY]}, EMPTY),
        ({"messages": [SAY]}, EMPTY),
        ({"messages": []}, "messages must end with a message of role assistant"),
        ({"messages": [ASK]}, "messages must end with a message of role assistant"),
        ({"messages": [{"role": "user", "content": " "}, SAY]}, EMPTY),
        ({"messages": [ASK, SAY, OTHER]}, "the prompt ends with role assistant; end it with what is to be answered"),
        ({"messages": [ASK, SAY, ASK]}, "messages must end with a message of role assistant"),
        ({"messages": [BRIEF, ASK]}, "messages must end with a message of role assistant"),
        ({"prompt": "a", "completion": [SAY]}, f"prompt and completion {BOTH}"),
        ({"prompt": [ASK], "completion": "a"}, f"prompt and completion {BOTH}"),
        ({"prompt": [ASK], "completion": [SAY, ASK, OTHER]}, f"prompt and completion {BOTH}"),
        ({"prompt": [ASK], "completion": []}, f"prompt and completion {BOTH}"),
        (message(role="tool", content="x"), "message 2 of messages has role 'tool'; use system, user, assistant"),
        (message(role=["user"], content="x"), "message 2 of messages has role ['user']; use system, user, assistant"),
        (message(content="x"), "message 2 of messages has role None; use system, user, assistant"),
        (message(role="user"), "message 2 of messages has no text as content; write role and content"),
        (message(role="user", content=None), "message 2 of messages has no text as content; write role and content"),
        ({"messages": ["Hi"]}, "message 1 of messages has no text as content; write role and content"),
    ],
)  # fmt: skip
def test_rows_that_cannot_be_imitated(file, row, reason):
    path = file([{"prompt": "a", "completion": "b"}, row])
    assert complaint(read_completions, path) == f"PATH, line 2: {reason}"


# ---- preferences


def test_preferences_as_text_and_as_messages(file):
    rows = [{"prompt": " a", "chosen": "b ", "rejected": "", "id": 4},
            {"prompt": [ASK], "chosen": [SAY], "rejected": [OTHER]},
            {"chosen": [BRIEF, ASK, SAY], "rejected": [BRIEF, {"role": "user", "content": "Hi"}, OTHER]}]
    prompts = [" a", "User: Hi Assistant:", "System: Be brief. User: Hi Assistant:"]
    assert read_pairs(file(rows)) == PairTexts(prompts, ["b ", " Yo", " Yo"], ["", " No", " No"], None, [])


def test_ties_are_named_and_margins_stay_with_their_pairs(file):
    rows = [{"prompt": p, "chosen": c, "rejected": r, "margin": m}
            for p, c, r, m in (("a", "x", "x", 9), ("b", "x", "y", 1), ("c", "y", "y", 9), ("d", "x ", "x", -0.5))]
    pairs = read_pairs(file(rows))
    assert pairs == PairTexts(["b", "d"], ["x", "x "], ["y", "x"], [1.0, -0.5], [1, 3])
    assert all(type(margin) is float for margin in pairs.margins)
    wanted = "PATH: chosen equals rejected in every row; write as chosen what is better"
    assert complaint(read_pairs, file(rows[:1])) == wanted


PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"prompt": "a", "completion": "b"}, f"no column chosen (found: completion, prompt); {TAKES}"),
        ({"messages": [ASK, SAY]}, f"no column chosen (found: messages); {TAKES}"),
        ({"prompt": "a", "chosen": "b"}, f"no column rejected (found: chosen, prompt); {TAKES}"),
        ({"chosen": "b", "rejected": "c"}, f"no column prompt (found: chosen, rejected); {TAKES}"),
        (PAIR | {"prompt": ""}, EMPTY),
        (PAIR | {"rejected": 3}, "rejected is 3; it must be text or a list of messages"),
        (PAIR | {"rejected": [SAY]}, f"prompt and rejected {BOTH}"),
        (PAIR | {"chosen": [ASK, SAY], "rejected": [ASK, OTHER]}, f"prompt and chosen {BOTH}"),
        ({"chosen": [ASK, SAY], "rejected": [BRIEF, OTHER]},
         "chosen and rejected differ before their last messages; write what they share as prompt"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, SAY, ASK, OTHER]},
         "chosen and rejected differ before their last messages; write what they share as prompt"),
        ({"chosen": [ASK, SAY], "rejected": [ASK, ASK]}, "rejected must end with a message of role assistant"),
        (PAIR | {"margin": "1"}, 'margin is "1"; it must be a finite number'),
        (PAIR | {"margin": None}, "margin is null; it must be a finite number"),
        (PAIR | {"margin": True}, "margin is true; it must be a finite number"),
        (PAIR | {"margin": float("nan")}, "margin is NaN; it must be a finite number"),
        (PAIR | {"margin": float("-inf")}, "margin is -Infinity; it must be a finite number"),
        (PAIR | {"margin": 10**39}, f"margin is {10**39}; it must be a finite number"),
    ],
)  # fmt: skip
def test_rows_that_prefer_nothing(file, row, reason):
    assert complaint(read_pairs, file([PAIR, row])) == f"PATH, line 2: {reason}"


def test_margins_are_for_all_or_none(file):
    lines = "\n" + json.dumps(PAIR) + "\n\n" + json.dumps(PAIR | {"margin": 0}) + "\n"
    assert complaint(read_pairs, file(lines)) == "PATH, line 4: a margin, unlike line 2; give all rows one or none"
    wanted = "PATH, line 2: no margin, unlike line 1; give all rows one or none"
    assert complaint(read_pairs, file([PAIR | {"margin": 0}, PAIR])) == wanted


# ---- prompts


def test_prompts_with_columns(file):
    rows = [{"gold": 5, "prompt": "2+3= "}, {"prompt": [ASK], "gold": None}]
    assert read_prompts(file(rows)) == (["2+3= ", "User: Hi Assistant:"], {"gold": [5, None]})
    assert read_prompts(file([{"prompt": "a"}])) == (["a"], {})


@pytest.mark.parametrize(
    "row, reason",
    [
        ({"gold": 5}, f"no column prompt (found: gold); {TAKES}"),
        ({"prompt": "", "gold": 5}, EMPTY),
        ({"prompt": 3, "gold": 5}, "prompt is 3; it must be text or a list of messages"),
        ({"prompt": [ASK, SAY], "gold": 5}, "the prompt ends with role assistant; end it with what is to be answered"),
        ({"prompt": "a"}, "gold only here or only in line 1; fill all rows alike"),
        ({"prompt": "a", "level": 1}, "gold, level only here or only in line 1; fill all rows alike"),
    ],
)
def test_rows_that_cannot_be_tried(file, row, reason):
    assert complaint(read_prompts, file([{"prompt": "a", "gold": 5}, row])) == f"PATH, line 2: {reason}"


# ---- packing


@pytest.mark.parametrize(
    "prompt, response, obs, mask", [("xa", "b", [120, 97, 98], [0, 1, 1]), ("a", "bc", [97, 98, 99], [1, 1, 1])]
)
def test_no_token_straddles_the_seam(prompt, response, obs, mask):
    # B02: two merges that would swallow the seam, ab -> 256 and abc -> 257; both rows are 4 tokens with their end
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
    toy = Tokenizer("toy", r"[\s\S]+", ranks, {END: 258, PAD: 259})
    rows, kept = pack_within(toy, [prompt], [response], 4)
    pairs, _ = pack_pairs(toy, PairTexts([prompt], [response], ["b"], None, []), 4)
    for found in (rows, pairs.chosen):
        assert found.obs.tolist() == [obs] and found.actions.tolist() == [obs[1:] + [258]]
        assert found.mask.long().tolist() == [mask] and kept == [0]


def test_the_end_is_learnt_where_padding_is_the_same_id(letters):
    letters.pad_id = letters.eos_id  # B01
    rows, _ = pack_within(letters, ["ab", "c"], ["cd", ""], 5)
    assert rows.actions.tolist() == [[1, 2, 3, 8], [8, 8, 8, 8]]
    assert rows.mask.long().tolist() == [[0, 1, 1, 1], [1, 0, 0, 0]]


def test_rows_that_are_too_long_are_counted(letters):
    prompts, completions = ["a", "abc", "b", "abcd"], ["aaa", "a", "", ""]  # 5, 5, 2 and 5 tokens
    rows, kept = pack_within(letters, prompts, completions, 5)
    assert kept == [0, 1, 2, 3] and len(rows) == 4 and report_skipped(4, kept, 5) is None
    rows, kept = pack_within(letters, prompts, completions, 4)
    assert kept == [2] and rows.obs.tolist() == [[1]] and rows.actions.tolist() == [[8]]
    assert report_skipped(4, kept, 4) == "3 of 4 rows are longer than 4 tokens and were left out"
    assert report_skipped(2, kept, 4) == "1 of 2 rows is longer than 4 tokens and was left out"
    with pytest.raises(ValueError, match="^no row fits into block_size=1 tokens; they have 2 to 5$"):
        pack_within(letters, prompts, completions, 1)
    with pytest.raises(ValueError):
        pack_within(letters, ["a", "b"], ["c"], 9)


@pytest.mark.parametrize("margins", [None, [0.5, 1.0, 2.0, 0.25]])
def test_a_pair_is_left_out_if_one_side_is_too_long(letters, margins):
    texts = PairTexts(["a", "b", "c", "d"], ["a", "aaaa", "b", "c"], ["b", "c", "aaaa", ""], margins, [])
    pairs, kept = pack_pairs(letters, texts, 3)
    assert kept == [0, 3] and len(pairs) == 2
    assert pairs.chosen.obs.tolist() == [[0, 0], [3, 2]] and pairs.chosen.actions.tolist() == [[0, 8], [2, 8]]
    assert pairs.rejected.obs.tolist() == [[0, 1], [3, 8]]
    assert pairs.rejected.mask.tolist() == [[True, True], [True, False]]
    if margins:
        assert pairs.margin.tolist() == [0.5, 0.25] and pairs.margin.dtype == torch.float32
    else:
        assert pairs.margin is None


def test_a_conversation_is_learnt_from_its_blank_to_its_end(file):
    tokenizer = default_tokenizer()
    rows, _ = pack_within(tokenizer, *read_completions(file([{"messages": [ASK, SAY]}])), 64)
    assert tokenizer.decode(rows.actions[rows.mask]) == " Yo" + END
    assert tokenizer.decode(rows.obs[0]) == "User: Hi Assistant: Yo"


# ---- a task


def prompts_file(file, different=40):
    """Every prompt in two rows, far apart; `gold` tells the row."""
    return file([{"prompt": f"p{row % different}", "gold": row} for row in range(2 * different)])


def test_the_split_keeps_all_rows_and_leaks_none(file):
    path = prompts_file(file)
    task = FilePrompts(path, held_out=15, seed=3)
    training, held_out = task.ask(range(len(task))), task.held_out()
    assert len(set(held_out[0])) == 15 and not set(held_out[0]) & set(training[0])
    assert sorted(training[1]["gold"] + held_out[1]["gold"]) == list(range(80))
    for prompts, columns in (training, held_out):
        assert prompts == [f"p{row % 40}" for row in columns["gold"]]
    again = FilePrompts(path, held_out=15, seed=3)
    assert again.held_out() == held_out and FilePrompts(path, held_out=15, seed=4).held_out() != held_out
    assert task.held_out(2) == (held_out[0][:2], {"gold": held_out[1]["gold"][:2]}) and task.held_out(999) == held_out
    assert len(set(FilePrompts(path).held_out()[0])) == 4  # a tenth


def test_prompts_are_asked_and_drawn(file):
    task = FilePrompts(prompts_file(file), held_out=15)
    everything, columns = task.ask(range(len(task)))
    prompt, gold = everything, columns["gold"]
    assert task.ask([3, 0, 3]) == ([prompt[3], prompt[0], prompt[3]], {"gold": [gold[3], gold[0], gold[3]]})
    draw = task.sample(500, torch.Generator().manual_seed(0))
    assert draw == task.sample(500, torch.Generator().manual_seed(0)) != task.sample(500, torch.Generator())
    assert set(draw[1]["gold"]) == set(columns["gold"])  # (1 − 1/50)^500 · 50 = 0.002 rows missing in expectation
    assert draw[0] == [f"p{row % 40}" for row in draw[1]["gold"]]


def test_a_split_needs_both_sides(file):
    twice = file([{"prompt": "a"}, {"prompt": "a"}])
    wanted = "PATH: held_out=1 of 1 different prompts; each side needs one"
    assert complaint(FilePrompts, twice) == wanted
    path = file([{"prompt": p} for p in "abca"])
    for held_out in (0, -1, 3):
        wanted = f"PATH: held_out={held_out} of 3 different prompts; each side needs one"
        assert complaint(FilePrompts, path, held_out=held_out) == wanted
    assert len(FilePrompts(path).held_out()[0]) in (1, 2) and len(FilePrompts(path, held_out=2)) in (1, 2)


def test_a_file_is_a_task_for_the_text_world(file, letters, make_text):
    _, policy, _ = make_text()
    task = FilePrompts(file([{"prompt": p, "gold": p} for p in ("a", "bc", "def", "gh")]), held_out=1)

    def reward(prompts, completions, gold):
        assert prompts == gold
        return [float(len(completion)) for completion in completions]

    world = TokenWorld(task, letters, reward, 5, prompts_per_batch=6, group_size=2)
    assert world.collect(policy).mask.shape[0] == 12
    metrics, samples = world.evaluate(policy, count=8)
    assert [sample["prompt"] for sample in samples] == task.held_out()[0] and metrics["response_length"] > 0
