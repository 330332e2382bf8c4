"""A GPT-2 in one sitting: forward pass, generation with a key-value cache, weights in and out in GPT-2's own layout.

    x = wte[ids] + wpe[positions]                   token plus learned position embedding, then n_layer times
    x = x + Attention(LayerNorm(x))                 "pre-LN": the residual stream itself is never normalised
    x = x + MLP(LayerNorm(x))
    logits = LayerNorm(x) · wteᵀ                    the head shares its weights with the token embedding

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners". Letters in shapes: B rows, T tokens,
C = n_embd, H = n_head, D = C / H, V = vocab_size, K tokens to look at (T, and those in the cache).
"""

import json
import math
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minirl.functional.masked import check_same_shape

_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")  # GPT-2 stores them (in, out), nn.Linear (out, in)
_FIELDS = {"vocab_size": "vocab_size", "block_size": "n_positions", "n_layer": "n_layer", "n_head": "n_head",
           "n_embd": "n_embd", "layer_norm_epsilon": "layer_norm_epsilon", "n_inner": "n_inner"}  # ours: config.json's
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_FIXED = {"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True,
          "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False, "add_cross_attention": False}
_DEFAULTS = {**_FIXED, **dict.fromkeys(_DROPOUTS, 0.1), "layer_norm_epsilon": 1e-5, "n_inner": None}  # GPT-2's


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a GPT. GPT-2 small: 50257, 1024, 12, 12, 768."""

    vocab_size: int                   # V, how many token ids there are
    block_size: int                   # most tokens in a row, prompt and completion together
    n_layer: int                      # blocks
    n_head: int                       # attention heads per block; divides n_embd
    n_embd: int                       # C, width of the residual stream
    dropout: float = 0.0              # rate in train mode (GPT-2: 0.1); 0 keeps the first policy ratio at exactly 1
    layer_norm_epsilon: float = 1e-5  # added to the variance in LayerNorm (GPT-2: 1e-5)
    n_inner: int | None = None        # width of the MLP; None: 4 * n_embd (GPT-2)

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd", "n_inner"):
            value = getattr(self, name)
            if not (isinstance(value, int) and value > 0 or name == "n_inner" and value is None):
                raise ValueError(f"{name} is {value!r}; it must be a positive integer")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd is {self.n_embd}, not a multiple of n_head, which is {self.n_head}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1)")


class Attention(nn.Module):
    """Causal self-attention, softmax(q kᵀ / √D) v in each of H heads."""

    def __init__(self, config):
        super().__init__()
        self.n_head, self.dropout = config.n_head, config.dropout
        self.c_attn, self.c_proj = (nn.Linear(config.n_embd, n * config.n_embd) for n in (3, 1))

    def forward(self, x, visible=None, cache=None, start=0):
        B, T, C = x.shape
        qkv = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head)  # (B, T, C) -> (B, T, 3, H, D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)                               # three times (B, H, T, D)
        if cache is not None:                                              # (2, B, H, width, D), filled up to start
            cache[0, :, :, start:start + T], cache[1, :, :, start:start + T] = k, v
            k, v = cache[:, :, :, :start + T]                              # two times (B, H, K, D)
        causal = visible is None and T > 1                                 # one new token may look at all in the cache
        y = F.scaled_dot_product_attention(q, k, v, visible, dropout_p=self.dropout * self.training, is_causal=causal)
        y = y.transpose(1, 2).reshape(B, T, C)                             # (B, H, T, D) -> (B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two layers around GPT-2's GELU (the tanh approximation, "gelu_new")."""

    def __init__(self, config):
        super().__init__()
        width, self.dropout = config.n_inner or 4 * config.n_embd, config.dropout
        self.c_fc, self.c_proj = nn.Linear(config.n_embd, width), nn.Linear(width, config.n_embd)

    def forward(self, x):
        x = F.gelu(self.c_fc(x), approximate="tanh")                       # (B, T, C) -> (B, T, n_inner)
        return F.dropout(self.c_proj(x), self.dropout, self.training)      # (B, T, n_inner) -> (B, T, C)


class Block(nn.Module):
    """Attention, then MLP, each added to the residual stream (B, T, C)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon), Attention(config)
        self.ln_2, self.mlp = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon), MLP(config)

    def forward(self, x, visible=None, cache=None, start=0):
        x = x + self.attn(self.ln_1(x), visible, cache, start)
        return x + self.mlp(self.ln_2(x))


def visible_keys(real, start=0):
    """(B, K) bool -> (B, 1, T, K): what tokens from column `start` on may look at: earlier real ones, themselves."""
    # Always themselves, because padding on the left sees nothing else, and a softmax over nothing is NaN.
    column = torch.arange(real.shape[1], device=real.device)
    past, itself = column < column[start:, None], column == column[start:, None]   # (T, K)
    return ((past & real[:, None, :]) | itself)[:, None]                            # (B, 1, T, K)


def next_token_probs(logits, temperature=1.0, top_k=None, top_p=None):
    """softmax(logits / temperature), cut to the top_k likeliest ids, then to the nucleus; (B, V) in and out.

    top_k keeps exactly that many ids (ties are broken). top_p keeps the smallest set of ids whose mass reaches top_p,
    at least one (Holtzman et al. 2020). None keeps all.
    """
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        best, index = logits.topk(top_k, dim=-1)                                    # (B, top_k)
        logits = torch.full_like(logits, -math.inf).scatter(-1, index, best)        # (B, V)
    probs = F.softmax(logits, dim=-1)
    if top_p is not None and top_p < 1:
        ordered, index = probs.sort(dim=-1, descending=True)
        mass_before = F.pad(ordered.cumsum(-1)[:, :-1], (1, 0))                     # of all likelier ids
        probs = torch.zeros_like(probs).scatter(-1, index, ordered * (mass_before < top_p))
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def next_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None):
    """(B, V) -> (B,): an id drawn from next_token_probs for each row; at temperature 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(-1)
    mass = next_token_probs(logits, temperature, top_k, top_p).double().cumsum(-1)  # (B, V)
    u = 1 - torch.rand(len(mass), 1, dtype=mass.dtype, device=mass.device, generator=generator)  # in (0, 1]
    # The first id whose mass reaches u · total: none of probability 0, none beyond the last. torch.multinomial would
    # draw a random number per id instead of one per row (5 times slower here), and its checks make a GPU wait.
    return torch.searchsorted(mass, u * mass[:, -1:]).squeeze(-1)                   # (B, 1) -> (B,)


class GPT(nn.Module):
    """GPT-2 of any size. gpt(ids) gives logits for the token after each. Parameters carry GPT-2's names."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte, self.wpe = (nn.Embedding(n, config.n_embd) for n in (config.vocab_size, config.block_size))
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)
        for name, parameter in self.named_parameters():  # 0.02: GPT-2. LayerNorms start as the identity
            if parameter.dim() == 2:  # a block adds to the stream twice: √(2 n_layer) keeps the stream's variance
                scale = math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 1.0
                nn.init.normal_(parameter, std=0.02 / scale)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids, attention_mask=None):
        """(B, T) integer ids -> logits (B, T, V).

        attention_mask (B, T) is 0 on padding, on either side: no token sees padding, and positions are counted without
        it. Rows padded only on the right need none, since no real token sees what follows it.
        """
        return F.linear(self.hidden(ids, attention_mask), self.wte.weight)          # (B, T, C) -> (B, T, V)

    def hidden(self, ids, attention_mask=None):
        """(B, T) ids -> states (B, T, C) after the last LayerNorm; what a critic's scalar head reads."""
        self._check_ids(ids, attention_mask)
        return self._trunk(ids, None if attention_mask is None else attention_mask.bool())

    def _trunk(self, ids, real=None, cache=None, start=0):
        """ids (B, T) stand in columns start to start + T; real (B, start + T) is False on padding."""
        if real is None:
            positions, visible = torch.arange(start, start + ids.shape[1], device=ids.device), None
        else:  # the first real token of a row has position 0, wherever it stands
            positions, visible = (real.cumsum(1) - 1).clamp(min=0)[:, start:], visible_keys(real, start)
        try:
            x = F.dropout(self.wte(ids) + self.wpe(positions), self.config.dropout, self.training)  # (B, T, C)
        except IndexError:
            raise ValueError(f"ids holds an id outside [0, {self.config.vocab_size}), the vocabulary") from None
        for layer, block in enumerate(self.h):
            x = block(x, visible, None if cache is None else cache[layer], start)
        return self.ln_f(x)

    @torch.no_grad()
    def generate(self, ids, max_new_tokens, temperature=1.0, top_k=None, top_p=None, attention_mask=None, eos_id=None,
                 pad_id=None, generator=None, use_cache=True, adjust=None):
        """Continue every row: (B, T) -> (B, T + max_new_tokens), without dropout. next_token says how an id is drawn.

        Args:
            ids: (B, T) prompts; the shorter ones padded on the left, with attention_mask (B, T) 0 there.
            eos_id: ends a row; what follows is filled with pad_id (None: with eos_id).
            generator: torch.Generator on the device of ids; None: torch's global one.
            use_cache: False computes every token anew at every step, to compare with.
            adjust: a function from logits (B, V) to logits (B, V), applied first; say, to forbid ids with -inf.
        """
        self._check_ids(ids, attention_mask)
        self._check_request(ids, max_new_tokens, temperature, top_k, top_p, attention_mask, eos_id, pad_id)
        (B, T), c, device = ids.shape, self.config, ids.device
        width, fill = T + max_new_tokens, next((i for i in (pad_id, eos_id) if i is not None), 0)
        rows = F.pad(ids, (0, max_new_tokens), value=fill)                          # (B, T) -> (B, width)
        real = None if attention_mask is None else F.pad(attention_mask.bool(), (0, max_new_tokens), value=True)
        cache = self.wte.weight.new_empty(c.n_layer, 2, B, c.n_head, width, c.n_embd // c.n_head) if use_cache else None
        ended = torch.zeros(B, dtype=torch.bool, device=device)
        start, was_training = 0, self.training  # columns before start are cached
        self.eval()
        try:
            for t in range(T, width):
                states = self._trunk(rows[:, start:t], None if real is None else real[:, :t], cache, start)
                logits = F.linear(states[:, -1], self.wte.weight)                   # (B, C) -> (B, V)
                logits = logits if adjust is None else adjust(logits)
                ask = device.type == "cpu" or (t - T) % 8 == 0  # an answer makes a GPU wait
                if ask and not logits.amax(-1).isfinite().all():
                    raise ValueError("logits of a new token are NaN, infinite or all -inf; nothing to sample")
                rows[:, t] = next_token(logits, temperature, top_k, top_p, generator).masked_fill(ended, fill)
                if eos_id is not None:
                    ended |= rows[:, t] == eos_id
                    if ask and ended.all():
                        break
                start = t if use_cache else 0
        finally:
            self.train(was_training)
        return rows

    def _check_ids(self, ids, attention_mask):
        if ids.dim() != 2 or ids.dtype not in (torch.int32, torch.int64) or ids.shape[1] == 0:
            raise ValueError(f"ids is {ids.dtype} of shape {tuple(ids.shape)}; it must be (B, T) integers with T >= 1")
        if ids.shape[1] > self.config.block_size:
            raise ValueError(f"ids has {ids.shape[1]} tokens a row, more than block_size = {self.config.block_size}")
        check_same_shape(attention_mask=attention_mask, ids=ids)

    def _check_request(self, ids, new, temperature, top_k, top_p, attention_mask, eos_id, pad_id):
        T, most, V = ids.shape[1], self.config.block_size, self.config.vocab_size
        for wrong, message in (
            (not 0 <= new <= most - T,
             f"max_new_tokens is {new}; after {T} tokens, with block_size {most}, it must lie in [0, {most - T}]"),
            (not 0 <= temperature < math.inf, f"temperature is {temperature}; it must be at least 0 (0: likeliest id)"),
            (top_k is not None and top_k < 1, f"top_k is {top_k}; it must be at least 1, or None for all ids"),
            (top_p is not None and not 0 < top_p <= 1, f"top_p is {top_p}; it must lie in (0, 1], or be None"),
            (eos_id is not None and not 0 <= eos_id < V, f"eos_id is {eos_id}; it must lie in [0, {V})"),
            (pad_id is not None and not 0 <= pad_id < V, f"pad_id is {pad_id}; it must lie in [0, {V})"),
            (attention_mask is not None and not attention_mask[:, -1].all(), "attention_mask must pad on the left"),
        ):
            if wrong:
                raise ValueError(message)

    def save_pretrained(self, path):
        """Write config.json and model.safetensors, for us and transformers' GPT2LMHeadModel; each is replaced whole."""
        config = {theirs: getattr(self.config, ours) for ours, theirs in _FIELDS.items()}
        config = {"architectures": ["GPT2LMHeadModel"], **_FIXED, **config, "bos_token_id": None, "eos_token_id": None,
                  **dict.fromkeys(_DROPOUTS, self.config.dropout)}
        tensors = {"transformer." + name: (tensor.t() if name.endswith(_TRANSPOSED) else tensor).contiguous()
                   for name, tensor in self.state_dict().items()}
        Path(path).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path) as unfinished:
            save_file(tensors, Path(unfinished, "model.safetensors"), metadata={"format": "pt"})
            Path(unfinished, "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            for name in ("model.safetensors", "config.json"):
                os.replace(Path(unfinished, name), Path(path, name))

    @classmethod
    def from_pretrained(cls, path):
        """The GPT in a folder that save_pretrained or transformers wrote, on the CPU and in eval mode.

        Dropout is the file's (GPT-2: 0.1), active after `.train()`; weights take torch's default dtype. OSError names
        a missing file, ValueError says what is damaged or what this GPT does not do.
        """
        try:
            found = {**_DEFAULTS, **json.loads(Path(path, "config.json").read_text(encoding="utf-8"))}
            sizes = {ours: found[theirs] for ours, theirs in _FIELDS.items()}
            tensors = load_file(Path(path, "model.safetensors"), device="cpu")
        except (ValueError, TypeError, KeyError, SafetensorError) as error:
            raise ValueError(f"{path} cannot be read: {type(error).__name__} {error}") from None
        for name, value in {**_FIXED, **dict.fromkeys(_DROPOUTS, found[_DROPOUTS[0]])}.items():
            if found[name] != value:
                raise ValueError(f"{path}: config.json has {name} = {found[name]!r}; only {value!r} is supported here")
        with torch.device("meta"):  # no memory and no random numbers: every tensor comes from the file
            model = cls(GPTConfig(**sizes, dropout=found[_DROPOUTS[0]]))
        model.load_state_dict(_fitting_tensors(tensors, model.state_dict(), path), assign=True)
        return model.eval()


def _fitting_tensors(tensors, expected, path):
    """GPT-2's tensors with the names, shapes and dtypes of `expected`; ValueError if they are not those."""
    found = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")
        if not name.endswith((".attn.bias", ".attn.masked_bias")):  # old checkpoints store the causal mask
            found[name] = tensor.transpose(0, -1) if name.endswith(_TRANSPOSED) else tensor
    head = found.pop("lm_head.weight", None)
    for name in sorted(found.keys() | expected.keys()):
        has, wants = (tuple(t[name].shape) if name in t else "absent" for t in (found, expected))
        if has != wants:
            raise ValueError(f"{path}: {name} is {has} in model.safetensors, but {wants} by config.json")
    if head is not None and not torch.equal(head, found["wte.weight"]):
        raise ValueError(f"{path}: lm_head.weight differs from wte.weight; only a tied head is supported")
    return {name: found[name].to(tensor.dtype).contiguous() for name, tensor in expected.items()}
