"""Data of your own, as JSON Lines: one object a line, in columns that TRL reads too.

    {"prompt": "2+3=", "completion": "5"}                            to imitate
    {"prompt": "2+3=", "chosen": "5", "rejected": "6", "margin": 1}  preferences; the margin is optional
    {"prompt": "2+3=", "gold": 5}                                    to try, with your own columns for your own reward

Text stays as it is, blanks included. Each may also be a list of messages, {"role": ..., "content": ...}; an answer is
one message of the assistant. Where `messages`, or `chosen` and `rejected` without a prompt, hold whole conversations,
all but the last message is the prompt. `chat_text` makes text of messages.
"""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from minirl.worlds.batch import Pairs
from minirl.worlds.rows import encode_rows, pack_completions

ROLES = ("system", "user", "assistant")
TAKES = "sft takes prompt/completion or messages; reward-model, dpo and orpo take prompt/chosen/rejected"


class PairTexts(NamedTuple):
    """Preferences as lists with one entry a pair."""

    prompts: list
    chosen: list
    rejected: list
    margins: list | None  # floats, by how much chosen is better
    ties: list            # line numbers of the rows left out because chosen equals rejected


def read_jsonl(path, convert=dict):
    """Read a UTF-8 file; blank lines, a byte order mark and Windows line ends do no harm.

    Args:
        path: of the file.
        convert: what to make of a row; it raises ValueError with a reason where it cannot.
    Returns:
        List of (line number from 1, converted row).
    Raises:
        ValueError: in one line, `PATH, line N: what is wrong; what to do`; also if there is no row at all.
    """
    rows = []
    for number, line in enumerate(Path(path).read_bytes().split(b"\n"), 1):  # bytes: bad UTF-8 has a line number, too
        line = line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").rstrip()
        try:
            if line:
                rows.append((number, convert(_object(line))))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows; write one JSON object a line")
    return rows


def write_jsonl(path, rows):
    """Write dicts as UTF-8. ValueError, and no file, if one of them is no JSON (NaN, say, is none)."""
    Path(path).write_bytes("".join(json.dumps(r, ensure_ascii=False, allow_nan=False) + "\n" for r in rows).encode())


def read_completions(path):
    """(prompts, completions) of rows to imitate; other columns are ignored, as is `messages` beside `completion`.

    A completion may be empty: then only the end is learnt. Errors are as in `read_jsonl`, also for other formats.
    """
    rows = read_jsonl(path, lambda row: _texts(row, "completion"))
    return [prompt for _, (prompt, _) in rows], [completion for _, (_, completion) in rows]


def read_pairs(path):
    """PairTexts of preferences; other columns are ignored.

    Errors are as in `read_completions`; also if only some rows have a margin, or if every row is a tie.
    """
    rows = read_jsonl(path, _preference)
    first, (*_, wanted) = rows[0]
    for number, (*_, margin) in rows:
        if (margin is None) != (wanted is None):
            here = "no margin" if margin is None else "a margin"
            raise ValueError(f"{path}, line {number}: {here}, unlike line {first}; give all rows one or none")
    ties = [number for number, (_, chosen, rejected, _) in rows if chosen == rejected]
    if len(ties) == len(rows):
        raise ValueError(f"{path}: chosen equals rejected in every row; write as chosen what is better")
    prompts, chosen, rejected, margins = map(list, zip(*(row for _, row in rows if row[1] != row[2]), strict=True))
    return PairTexts(prompts, chosen, rejected, None if wanted is None else margins, ties)


def read_prompts(path):
    """(prompts, columns) of rows to try: strings, and {name: list} of all other columns, which go to the reward.

    Errors are as in `read_jsonl`; also for a missing or empty prompt, and for rows with different columns.
    """
    rows = read_jsonl(path, lambda row: row | {"prompt": _texts(row)[0]})
    first, names = rows[0][0], rows[0][1].keys()
    for number, row in rows:
        if row.keys() != names:
            other = ", ".join(sorted(row.keys() ^ names))
            raise ValueError(f"{path}, line {number}: {other} only here or only in line {first}; fill all rows alike")
    columns = {name: [row[name] for _, row in rows] for name in names}
    return columns.pop("prompt"), columns


def chat_text(messages, to_answer=False):
    """`System: Be brief. User: Hello! Assistant: Hi.`: plain words, so a user who writes "Assistant:" looks like one.

    Args:
        messages: list of {"role": one of ROLES, "content": text}, else ValueError; contents are stripped.
        to_answer: whether ` Assistant:` follows, for a prompt; the blank after it belongs to the answer.
    """
    parts = [f"{m['role'].capitalize()}: {m['content']}".rstrip() for m in _column({"messages": messages}, "messages")]
    return " ".join(parts + ["Assistant:"] * to_answer)


def pack_within(tokenizer, prompts, completions, block_size, device="cpu"):
    """(Completions, kept): the rows that fit into `block_size` tokens, and their indices; ValueError if none does."""
    kept, (prompts, completions) = _fitting(tokenizer, block_size, prompts, completions)
    return pack_completions(tokenizer, prompts, completions, device), kept


def pack_pairs(tokenizer, pairs, block_size, device="cpu"):
    """(Pairs, kept) of PairTexts, as `pack_within`; a pair is left out if either of its sides does not fit."""
    kept, (prompts, *sides) = _fitting(tokenizer, block_size, pairs.prompts, pairs.chosen, pairs.rejected)
    packed = [pack_completions(tokenizer, prompts, side, device) for side in sides]
    margins = None if pairs.margins is None else [pairs.margins[index] for index in kept]
    return Pairs(*packed, margins and torch.tensor(margins, dtype=torch.float32, device=device)), kept


def report_skipped(total, kept, block_size):
    """`3 of 200 rows are longer than 64 tokens and were left out`; None if all are in the list `kept`."""
    count = total - len(kept)
    be, was = ("is", "was") if count == 1 else ("are", "were")
    return f"{count} of {total} rows {be} longer than {block_size} tokens and {was} left out" if count else None


class FilePrompts:
    """A file of prompts as a task for TokenWorld. Rows with the same prompt are on the same side of the split.

    Args:
        path: see `read_prompts`.
        held_out: how many different prompts are kept for evaluation; None for a tenth of them, from 1 to 256.
        seed: of the split; sampling uses the generator that is passed in.
    """

    def __init__(self, path, held_out=None, seed=0):
        self._prompts, self._columns = read_prompts(path)
        different = list(dict.fromkeys(self._prompts))  # in the file's order
        held_out = min(256, max(1, len(different) // 10)) if held_out is None else held_out
        if not 1 <= held_out < len(different):
            raise ValueError(f"{path}: held_out={held_out} of {len(different)} different prompts; each side needs one")
        order = torch.randperm(len(different), generator=torch.Generator().manual_seed(seed), device="cpu").tolist()
        away = {different[index] for index in order[:held_out]}
        self._training = [row for row, prompt in enumerate(self._prompts) if prompt not in away]
        self._held_out = [row for row, prompt in enumerate(self._prompts) if prompt in away]

    def __len__(self):
        return len(self._training)

    def ask(self, indices):
        """(prompts, columns) of the training rows with these numbers."""
        return self._rows([self._training[index] for index in indices])

    def sample(self, n, generator):
        """n training rows, drawn with replacement: (prompts, columns)."""
        return self.ask(torch.randint(len(self), (n,), generator=generator, device="cpu").tolist())

    def held_out(self, n=None):
        """The first n held-out rows (all, where there are fewer or n is None), always in the same order."""
        return self._rows(self._held_out[:n])

    def _rows(self, rows):
        return [self._prompts[row] for row in rows], {k: [v[row] for row in rows] for k, v in self._columns.items()}


def _object(line):
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_once_each)
        json.dumps(row, ensure_ascii=False).encode("utf-8")  # JSON can say "\ud83d", half of a character
    except UnicodeError:
        raise ValueError("not UTF-8, or half of a character (\\ud...); save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg}, column {error.colno}); write one whole object a line") from None
    if not isinstance(row, dict):
        raise ValueError("not an object; write one {...} a line")
    return row


def _once_each(pairs):
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{twice[0]} is there twice; keep one")
    return dict(pairs)


def _column(row, name):
    """What the row has there: text as it is, or messages, checked and with their contents stripped."""
    if name not in row:
        raise ValueError(f"no column {name} (found: {', '.join(sorted(row))}); {TAKES}")
    value, wanted = row[name], "a list of messages" if name == "messages" else "text or a list of messages"
    if isinstance(value, str) and name != "messages":
        return value
    if not isinstance(value, list):
        raise ValueError(f"{name} is {json.dumps(value):.40}; it must be {wanted}")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise ValueError(f"message {number} of {name} has no text as content; write role and content")
        if message.get("role") not in ROLES:
            raise ValueError(f"message {number} of {name} has role {message.get('role')!r:.40}; use {', '.join(ROLES)}")
    return [{"role": message["role"], "content": message["content"].strip()} for message in value]


def _texts(row, *names):
    """[prompt, answer in each of the columns `names`] as text; without a prompt, of whole conversations."""
    if names == ("completion",) and "messages" in row and "completion" not in row:
        row, names = {"messages": row["messages"]}, ("messages",)
    answers = [_column(row, name) for name in names]
    whole = "prompt" not in row and answers and all(isinstance(answer, list) for answer in answers)
    if whole and any(answer[:-1] != answers[0][:-1] for answer in answers):
        raise ValueError("chosen and rejected differ before their last messages; write what they share as prompt")
    prompt = answers[0][:-1] if whole else _column(row, "prompt")
    answers = [answer[-1:] if whole else answer for answer in answers]
    plain = isinstance(prompt, str)
    for name, answer in zip(names, answers, strict=True):
        if plain != isinstance(answer, str) or not plain and [m["role"] for m in answer] != ["assistant"]:
            both = f"prompt and {name} must both be text, or messages and one message with role assistant"
            raise ValueError(f"{name} must end with a message of role assistant" if whole else both)
    if not (prompt if plain else any(message["content"] for message in prompt)):
        raise ValueError("the prompt is empty; the first token of an answer needs something to follow")
    if not plain and prompt[-1]["role"] == "assistant":
        raise ValueError("the prompt ends with role assistant; end it with what is to be answered")
    replies = answers if plain else [f" {answer[0]['content']}".rstrip() for answer in answers]
    return [prompt if plain else chat_text(prompt, to_answer=True), *replies]


def _preference(row):
    margin = row.get("margin")
    if "margin" in row and (type(margin) not in (int, float) or not abs(margin) < 1e38):  # NaN is not smaller either
        raise ValueError(f"margin is {json.dumps(margin):.40}; it must be a finite number")
    return *_texts(row, "chosen", "rejected"), margin if margin is None else float(margin)


def _fitting(tokenizer, block_size, prompts, *sides):
    encoded = [zip(*encode_rows(tokenizer, prompts, side), strict=True) for side in sides]
    lengths = [max(len(p) + len(r) for p, r in row) for row in zip(*encoded, strict=True)]
    kept = [index for index, length in enumerate(lengths) if length <= block_size]
    if not kept:
        raise ValueError(f"no row fits into block_size={block_size} tokens; they have {min(lengths)} to {max(lengths)}")
    return kept, [[texts[index] for index in kept] for texts in (prompts, *sides)]
