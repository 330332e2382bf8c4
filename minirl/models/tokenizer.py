"""Text to token ids and back: a byte-level BPE that we train ourselves and tiktoken runs; nothing needs the network.

Byte-pair encoding starts from the 256 bytes and merges the most frequent neighbours into a new token, again and again
(Sennrich et al. 2016; on bytes: GPT-2, Radford et al. 2019). Merges never cross the pieces that PATTERN cuts a text
into: a tag like <think>, a word with the blank before it, or any other single character. So every digit is a token of
its own, and 37+48=85 is eight tokens whatever the corpus was.

    python -m minirl.models.tokenizer        trains again from data/tokenizer/corpus.txt, bit for bit the same
"""

import hashlib
import json
import os
import re
import tempfile
from collections import Counter
from functools import lru_cache
from pathlib import Path

import tiktoken
from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

DATA = Path(__file__).resolve().parents[2] / "data" / "tokenizer"
PATTERN = r"</?[a-z]+>| ?[^\W\d_]+|[\s\S]"  # a tag | a word with its blank | any one character: every text is covered
END, PAD = "<|endoftext|>", "<|pad|>"
VOCAB_SIZE = 512  # 256 bytes, 254 merges, END, PAD

# The files each named encoding is read from, and their sha256 (both from tiktoken 0.14.0's openai_public.py).
_HOST = "https://openaipublic.blob.core.windows.net/"
_R50K = "encodings/r50k_base.tiktoken", "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930"
_P50K = "encodings/p50k_base.tiktoken", "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069"
_CL100K = "encodings/cl100k_base.tiktoken", "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7"
_O200K = "encodings/o200k_base.tiktoken", "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
NAMED_FILES = {
    "gpt2": (
        ("gpt-2/encodings/main/vocab.bpe", "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        ("gpt-2/encodings/main/encoder.json", "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ),
    "r50k_base": (_R50K,),
    "p50k_base": (_P50K,),
    "cl100k_base": (_CL100K,),
    "o200k_base": (_O200K,),
}


class Tokenizer:
    """A byte-level BPE vocabulary with its special tokens.

    `encode` never makes a special token, whatever the text says; who wants one writes `eos_id` or `pad_id`.

    Args:
        name: for messages and checkpoints.
        pattern: the regular expression that cuts a text into the pieces within which merges happen.
        ranks: bytes of every ordinary token -> id; a lower id is merged earlier.
        special_tokens: text -> id, END among them. Without PAD the padding id is the end id, which is safe in this
            package because masks come from lengths, never from ids; but do not forbid it when sampling.
    """

    def __init__(self, name, pattern, ranks, special_tokens):
        self.name = name
        self.eos_id = special_tokens[END]
        self.pad_id = special_tokens.get(PAD, self.eos_id)
        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )
        self.vocab_size = self._encoding.n_vocab  # one more than the largest id
        named = {index: token for token, index in ranks.items()}
        named |= {index: text.encode() for text, index in special_tokens.items()}
        self._bytes = [named.get(index, "\ufffd".encode()) for index in range(self.vocab_size)]
        content = [pattern, [token.hex() for token in self._bytes], sorted(special_tokens.items())]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def encode(self, text):
        """The ids of `text`, a list of ints. The characters of `<|endoftext|>` are encoded like any others."""
        return self._encoding.encode_ordinary(text)

    def decode(self, ids):
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, special tokens show as their text.

        Raises:
            ValueError: if an id is negative or not below `vocab_size`.
        """
        ids = [int(index) for index in ids]
        for index in ids:
            if not 0 <= index < self.vocab_size:
                raise ValueError(f"id {index} is not in the vocabulary of {self.name}, which has {self.vocab_size} ids")
        return b"".join(self._bytes[index] for index in ids).decode("utf-8", errors="replace")

    def __repr__(self):
        return f"Tokenizer({self.name!r}, vocab_size={self.vocab_size}, fingerprint={self.fingerprint[:12]})"


def train_bpe(text, vocab_size, pattern=PATTERN):
    """Learn a byte-level BPE: merge the most frequent pair of neighbours until there are `vocab_size` tokens.

    Of equally frequent pairs the one with the smaller bytes is merged (first by left part, then by right part).

    Args:
        text: the corpus.
        vocab_size: ordinary tokens wanted, the 256 bytes included and special tokens not.
        pattern: cuts the text into the pieces within which merges happen.
    Returns:
        {bytes of a token: id}. Ids 0 to 255 are the bytes, then the merges in order; fewer than `vocab_size` if the
        corpus runs out of pairs.
    """
    pieces = Counter(piece.encode() for piece in re.findall(pattern, text))
    words = [([bytes([byte]) for byte in piece], count) for piece, count in pieces.items()]
    ranks = {bytes([byte]): byte for byte in range(256)}
    while len(ranks) < vocab_size:
        pairs = Counter()
        for parts, count in words:
            for pair in zip(parts, parts[1:], strict=False):
                pairs[pair] += count
        if not pairs:
            break
        left, right = min(pairs, key=lambda pair: (-pairs[pair], pair))
        ranks[left + right] = len(ranks)
        words = [(_merge(parts, left, right), count) for parts, count in words]
    return ranks


def _merge(parts, left, right):
    """`parts` with every `left`, `right` joined, from the left."""
    merged = []
    for part in parts:
        if part == right and merged and merged[-1] == left:
            merged[-1] = left + right
        else:
            merged.append(part)
    return merged


def save_tokenizer(path, name, pattern, ranks):
    """Write a vocabulary with END and PAD after its ordinary tokens as readable JSON (bytes shown as Latin-1)."""
    special_tokens = {END: len(ranks), PAD: len(ranks) + 1}
    merges = [token.decode("latin-1") for token in sorted(ranks, key=ranks.get)[256:]]
    record = {
        "name": name,
        "fingerprint": Tokenizer(name, pattern, ranks, special_tokens).fingerprint,
        "pattern": pattern,
        "special_tokens": special_tokens,
        "merges": merges,  # the token that merge 256 + i makes
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8", newline="\n")


def load_tokenizer(path):
    """Read what `save_tokenizer` wrote.

    Raises:
        ValueError: if the content does not have the fingerprint that stands in the file.
    """
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    ranks = {bytes([byte]): byte for byte in range(256)}
    for merge in record["merges"]:
        ranks[merge.encode("latin-1")] = len(ranks)
    tokenizer = Tokenizer(record["name"], record["pattern"], ranks, record["special_tokens"])
    if tokenizer.fingerprint != record["fingerprint"]:
        raise ValueError(f"{path} was changed: its fingerprint is not that of its content; restore or retrain it")
    return tokenizer


@lru_cache(maxsize=1)
def default_tokenizer():
    """The package's own vocabulary of 512 tokens, from data/tokenizer/vocabulary.json."""
    path = DATA / "vocabulary.json"
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; install minirl from a clone with: pip install -e .")
    return load_tokenizer(path)


@lru_cache(maxsize=2)
def named_tokenizer(name):
    """A published encoding, such as `gpt2`, from tiktoken's cache folder; never from the network.

    These have no padding token, so `pad_id` is `eos_id` (see `Tokenizer`), and so `vocab_size` fits published weights.

    Raises:
        ValueError: if the name is unknown.
        FileNotFoundError: if a file is not in the cache or is damaged: which one, and where it belongs.
    """
    if name not in NAMED_FILES:
        raise ValueError(f"no encoding is named {name!r}; choose one of {', '.join(sorted(NAMED_FILES))}")
    folder = _cache_folder()
    for source, sha256 in NAMED_FILES[name]:
        url = _HOST + source
        path = Path(folder, hashlib.sha1(url.encode()).hexdigest())  # the name under which tiktoken looks for it
        if not folder or not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
            raise FileNotFoundError(_how_to_provide(name, folder))
    parts = ENCODING_CONSTRUCTORS[name]()
    return Tokenizer(name, parts["pat_str"], parts["mergeable_ranks"], parts["special_tokens"])


def _cache_folder():
    """Where tiktoken looks: the first of the two variables that is set ('' switches the cache off), else a default."""
    default = os.environ.get("DATA_GYM_CACHE_DIR", os.path.join(tempfile.gettempdir(), "data-gym-cache"))
    return os.environ.get("TIKTOKEN_CACHE_DIR", default)


def _how_to_provide(name, folder):
    urls = [_HOST + source for source, _ in NAMED_FILES[name]]
    files = " and ".join(f"{url} saved as {hashlib.sha1(url.encode()).hexdigest()}" for url in urls)
    return (
        f"the encoding {name!r} is not (or not intact) in {folder or 'any cache folder'}: set TIKTOKEN_CACHE_DIR to a "
        f"folder that holds {files}; nothing is downloaded for you"
    )


def main():
    """Train the default vocabulary again from the committed corpus and write it."""
    corpus = (DATA / "corpus.txt").read_text(encoding="utf-8")
    ranks = train_bpe(corpus, VOCAB_SIZE - 2)
    save_tokenizer(DATA / "vocabulary.json", "minirl-512", PATTERN, ranks)
    print(f"wrote {DATA / 'vocabulary.json'}: {load_tokenizer(DATA / 'vocabulary.json')}")


if __name__ == "__main__":
    main()
