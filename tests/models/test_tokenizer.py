"""The tokenizer: trained by hand on a tiny corpus, exact on any text, offline, and the same for ever."""

import base64
import hashlib
import json
import os
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken

import minirl.models.tokenizer as tokenizer_module
from minirl.models.tokenizer import (
    DATA,
    END,
    PAD,
    PATTERN,
    VOCAB_SIZE,
    Tokenizer,
    default_tokenizer,
    load_tokenizer,
    named_tokenizer,
    save_tokenizer,
    train_bpe,
)

BYTES = {bytes([byte]): byte for byte in range(256)}
# The file names that tiktoken looks for: sha1 of each address, noted once from tiktoken 0.14.0.
CACHED_NAMES = {
    "gpt2": ["6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6"],
    "r50k_base": ["0ea1e91bbb3a60f729a8dc8f777fd2fc07cd8df4"],
    "cl100k_base": ["9b5ad71b2ce5302211f9c61530b329a4922fc6a4"],
}
NO_NETWORK = """
import socket
def refuse(*args, **kwargs):
    raise AssertionError("a socket was opened")
socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = socket.create_connection = refuse
"""


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    named_tokenizer.cache_clear()
    yield tmp_path
    named_tokenizer.cache_clear()


def pieces_of(tokenizer, text):
    return [tokenizer.decode([index]) for index in tokenizer.encode(text)]


# --- the trainer


def test_merges_worked_by_hand():
    # Pieces: "aab" x 3, " aab" x 1, " ab" x 2 (a word takes the blank before it).
    # Pairs: (a,b) 3+1+2 = 6, (a,a) 3+1 = 4, (" ",a) 1+2 = 3.                       -> 256 = "ab"
    # Now a.ab x 3, " ".a.ab x 1, " ".ab x 2: (a,ab) 4, (" ",ab) 2, (" ",a) 1.       -> 257 = "aab"
    # Now aab x 3, " ".aab x 1, " ".ab x 2: (" ",ab) 2, (" ",aab) 1.                 -> 258 = " ab", 259 = " aab"
    ranks = train_bpe("aab\naab aab\naab ab ab\n", 300)
    assert list(ranks.items())[256:] == [(b"ab", 256), (b"aab", 257), (b" ab", 258), (b" aab", 259)]


def test_of_equally_frequent_pairs_the_smaller_bytes_merge_first():
    assert list(train_bpe("cd\nab\nca\n", 258))[256:] == [b"ab", b"ca"]
    assert train_bpe("cd\nab\nca\n", 259) == train_bpe("ca\nab\ncd\n", 259)  # the order of the text does not matter


def test_overlapping_pairs_merge_from_the_left():
    # "aaa": (a,a) occurs twice, but only one pair can be merged, the left one; then (aa,a) is the only pair left.
    assert list(train_bpe("aaa\n", 300))[256:] == [b"aa", b"aaa"]


def test_a_larger_vocabulary_extends_a_smaller_one():
    text = (DATA / "sentences.txt").read_text(encoding="utf-8")
    small, large = train_bpe(text, 280), train_bpe(text, 300)
    assert list(large)[:280] == list(small) and len(large) == 300


def test_tiktoken_splits_the_corpus_as_the_trainer_did():
    # Replays the merges one after the other on each word, the definition of BPE, and compares with tiktoken.
    text = (DATA / "sentences.txt").read_text(encoding="utf-8")
    ranks = train_bpe(text, 320)
    tokenizer = Tokenizer("test", PATTERN, ranks, {END: 320})
    for word in {" " + word for word in text.split() if word.isalpha()}:
        parts = list(word)
        for token in [token.decode() for token in list(ranks)[256:]]:
            place = 0
            while place + 1 < len(parts):
                if parts[place] + parts[place + 1] == token:
                    parts[place : place + 2] = [token]
                place += 1
        assert pieces_of(tokenizer, word) == parts


def test_training_again_reproduces_the_committed_vocabulary(tmp_path):
    ranks = train_bpe((DATA / "corpus.txt").read_text(encoding="utf-8"), VOCAB_SIZE - 2)
    save_tokenizer(tmp_path / "again.json", "minirl-512", PATTERN, ranks)
    assert (tmp_path / "again.json").read_bytes() == (DATA / "vocabulary.json").read_bytes()


def test_the_corpus_script_reproduces_the_committed_corpus(tmp_path):
    for name in ("make_corpus.py", "sentences.txt"):
        (tmp_path / name).write_bytes((DATA / name).read_bytes())
    runpy.run_path(str(tmp_path / "make_corpus.py"), run_name="__main__")  # it writes next to itself
    assert (tmp_path / "corpus.txt").read_bytes() == (DATA / "corpus.txt").read_bytes()


# --- the default vocabulary


def test_size_and_special_tokens():
    tokenizer = default_tokenizer()
    assert tokenizer.vocab_size == 512
    assert (tokenizer.eos_id, tokenizer.pad_id) == (510, 511)
    assert tokenizer.decode([510, 511]) == END + PAD
    assert default_tokenizer() is tokenizer


@pytest.mark.parametrize("text", [END, PAD, f"a{END}b", f"{END}{PAD}\n", "<|endoftext|", f"<answer>4{END}</answer>"])
def test_encode_never_makes_a_special_token(text):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode(text)
    assert max(ids) < 510
    assert tokenizer.decode(ids) == text


def test_each_digit_is_one_token_whatever_is_around_it():
    tokenizer = default_tokenizer()
    for text in ["37+48=85", "0123456789" * 3, "in 2022.", "a1b2", "1,000.5", "<think>12+3=15</think>", "x 7\n8"]:
        digits = [piece for piece in pieces_of(tokenizer, text) if any(c.isdigit() for c in piece)]
        assert digits == [c for c in text if c.isdigit()]
    assert not any(c.isdigit() and len(t) > 1 for t in map(tokenizer.decode, ([i] for i in range(510))) for c in t)


def test_tags_are_one_token_each():
    text = "<think>37+48=85</think><answer>85</answer>"
    assert pieces_of(default_tokenizer(), text) == [
        "<think>", *"37+48=85", "</think>", "<answer>", *"85", "</answer>"
    ]  # fmt: skip


def test_a_word_takes_the_blank_before_it_and_a_line_break_stands_alone():
    assert pieces_of(default_tokenizer(), "Write about the film:\nThe") == [
        "Write", " about", " the", " film", ":", "\n", "The"
    ]  # fmt: skip


def test_any_text_comes_back():
    tokenizer = default_tokenizer()
    rng = random.Random(0)
    ranges = [(0, 128), (128, 0x800), (0x800, 0xD800), (0xE000, 0x10000), (0x10000, 0x110000)]
    for _ in range(300):
        chosen = [ranges[rng.randrange(5)] for _ in range(rng.randrange(40))]
        text = "".join(chr(rng.randrange(low, high)) for low, high in chosen)
        assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in ["", " ", "\r\n\r\n", "\t \x00\x7f", "e\u0301 \u0967\u0968 \u00e9t\u00e9 _x_", "<a></b> <B>"]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_corpus_comes_back():
    text = (DATA / "corpus.txt").read_text(encoding="utf-8")
    ids = default_tokenizer().encode(text)
    assert default_tokenizer().decode(ids) == text
    assert len(ids) < 0.5 * len(text)


def test_decode_takes_any_ids_in_range():
    tokenizer = default_tokenizer()
    assert isinstance(tokenizer.decode(range(512)), str)
    assert tokenizer.decode([0xFF]) == "\ufffd"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"  # two of the three bytes of the euro sign
    assert tokenizer.decode([0xE2, 0x82, 0xAC]) == "\u20ac"
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("index", [-1, 512])
def test_decode_refuses_ids_out_of_range(index):
    with pytest.raises(ValueError, match=f"id {index} .* 512"):
        default_tokenizer().decode([1, index])


def test_ids_without_a_token_decode_to_a_replacement_character():
    gap = Tokenizer("gap", PATTERN, BYTES, {END: 300})  # as in cl100k_base, whose id 100256 is nobody's
    assert gap.vocab_size == 301
    assert gap.decode([65, 299, 66]) == "A\ufffdB"


def test_without_a_padding_token_padding_is_the_end():
    tokenizer = Tokenizer("plain", PATTERN, BYTES, {END: 256})
    assert tokenizer.pad_id == tokenizer.eos_id == 256


# --- fingerprints


def test_the_fingerprint_of_the_default_vocabulary_never_changes():
    assert default_tokenizer().fingerprint.startswith("e12d257162b3")


def test_whatever_decides_an_id_decides_the_fingerprint():
    ranks, specials = BYTES | {b"ab": 256, b"cd": 257}, {END: 258, PAD: 259}
    first = Tokenizer("x", PATTERN, ranks, specials).fingerprint
    assert Tokenizer("another name", PATTERN, dict(reversed(ranks.items())), specials).fingerprint == first
    others = [
        Tokenizer("x", PATTERN + "|a", ranks, specials),
        Tokenizer("x", PATTERN, BYTES | {b"cd": 256, b"ab": 257}, specials),
        Tokenizer("x", PATTERN, BYTES | {b"ab": 256, b"ce": 257}, specials),
        Tokenizer("x", PATTERN, ranks, {END: 259, PAD: 258}),
        Tokenizer("x", PATTERN, ranks, {END: 258}),
    ]
    assert len({first, *(other.fingerprint for other in others)}) == 6


def test_a_changed_file_is_refused(tmp_path):
    record = json.loads((DATA / "vocabulary.json").read_text(encoding="utf-8"))
    record["merges"][0], record["merges"][1] = record["merges"][1], record["merges"][0]
    (tmp_path / "changed.json").write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ValueError, match="fingerprint"):
        load_tokenizer(tmp_path / "changed.json")


def test_bytes_that_are_no_text_survive_the_file(tmp_path):
    ranks = train_bpe("\u20ac\u20ac\u20ac", 258)  # the merges are parts of a euro sign
    save_tokenizer(tmp_path / "euro.json", "euro", PATTERN, ranks)
    loaded = load_tokenizer(tmp_path / "euro.json")
    assert loaded.encode("\u20ac") == [257] and loaded.decode([257]) == "\u20ac"


# --- offline


def test_nothing_touches_the_network(tmp_path):
    code = NO_NETWORK + (
        "from minirl.models.tokenizer import default_tokenizer, named_tokenizer\n"
        "assert default_tokenizer().encode('37+48=') == [51, 55, 43, 52, 56, 61]\n"
        "try:\n    named_tokenizer('gpt2')\nexcept FileNotFoundError:\n    print('refused')\n"
    )
    environment = os.environ | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(DATA.parents[1])}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert (result.returncode, result.stdout.strip()) == (0, "refused"), result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", CACHED_NAMES)
def test_a_named_encoding_that_is_not_there_is_one_clear_line(name, empty_cache):
    with pytest.raises(FileNotFoundError) as error:
        named_tokenizer(name)
    message = str(error.value)
    assert "\n" not in message and "TIKTOKEN_CACHE_DIR" in message and str(empty_cache) in message
    assert all(file in message for file in CACHED_NAMES[name])


def test_a_cache_that_is_switched_off_is_the_same_error(empty_cache, monkeypatch):
    (empty_cache / CACHED_NAMES["r50k_base"][0]).write_bytes(b"right")
    files = (("encodings/r50k_base.tiktoken", hashlib.sha256(b"right").hexdigest()),)
    monkeypatch.setitem(tokenizer_module.NAMED_FILES, "r50k_base", files)
    monkeypatch.chdir(empty_cache)  # no name for a folder does not mean this one
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    with pytest.raises(FileNotFoundError, match="TIKTOKEN_CACHE_DIR"):
        named_tokenizer("r50k_base")


def test_a_damaged_file_is_neither_used_nor_removed(empty_cache):
    # tiktoken itself would delete it and download it again
    path = empty_cache / CACHED_NAMES["r50k_base"][0]
    path.write_bytes(b"damaged")
    with pytest.raises(FileNotFoundError, match="not intact"):
        named_tokenizer("r50k_base")
    assert path.read_bytes() == b"damaged"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="choose one of .*gpt2"):
        named_tokenizer("gpt-2")


def test_a_file_in_the_cache_is_used(empty_cache, monkeypatch):
    # A stand-in for r50k_base of 257 tokens, in tiktoken's file format, under the name that tiktoken looks for.
    content = b"".join(b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in (BYTES | {b"ab": 256}).items())
    (empty_cache / CACHED_NAMES["r50k_base"][0]).write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    monkeypatch.setitem(tokenizer_module.NAMED_FILES, "r50k_base", (("encodings/r50k_base.tiktoken", sha256),))
    url = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"

    def constructor():
        ranks = tiktoken.load.load_tiktoken_bpe(url, expected_hash=sha256)
        return {"name": "r50k_base", "pat_str": PATTERN, "mergeable_ranks": ranks, "special_tokens": {END: 257}}

    monkeypatch.setitem(tokenizer_module.ENCODING_CONSTRUCTORS, "r50k_base", constructor)
    tokenizer = named_tokenizer("r50k_base")
    assert tokenizer.encode("abc") == [256, 99]
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id) == (258, 257, 257)


def test_the_table_of_files_is_tiktokens_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "tiktoken.load.read_file_cached", lambda url, expected_hash=None: asked.append((url, expected_hash)) or b""
    )
    for name, files in tokenizer_module.NAMED_FILES.items():
        asked.clear()
        try:
            tokenizer_module.ENCODING_CONSTRUCTORS[name]()
        except Exception:  # the empty file that we hand it is no vocabulary
            pass
        assert asked and all((url.removeprefix(tokenizer_module._HOST), sha256) in files for url, sha256 in asked)


def test_data_files_are_found_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Path(DATA, "vocabulary.json").is_file()
    assert load_tokenizer(DATA / "vocabulary.json").vocab_size == 512
