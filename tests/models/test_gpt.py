"""The GPT against transformers' GPT-2, against itself computed another way, and against numbers worked out by hand."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from minirl.models import gpt as module
from minirl.models.gpt import GPT, GPTConfig, next_token, next_token_probs, visible_keys

V, BLOCK = 11, 16
IDS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
PROMPTS = [[3, 4, 5], [7], [1, 2, 3, 4, 5], [9, 8]]


def make_gpt(dtype=torch.float64, std=0.4, **changes):
    """A small GPT whose weights are large enough that every part of it matters to the likeliest token."""
    torch.manual_seed(0)
    config = dict(vocab_size=V, block_size=BLOCK, n_layer=2, n_head=2, n_embd=8)
    gpt = GPT(GPTConfig(**{**config, **changes})).to(dtype).eval()
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter += std * torch.randn_like(parameter)
    return gpt


def padded(prompts, width, left=True, pad=0):
    """Rows of ids and their attention mask."""
    ids, mask = torch.full((len(prompts), width), pad), torch.zeros(len(prompts), width, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        columns = slice(width - len(prompt), width) if left else slice(0, len(prompt))
        ids[row, columns], mask[row, columns] = torch.tensor(prompt), True
    return ids, mask


def always(probs):
    """An `adjust` that makes the next token's distribution `probs`, whatever the model says."""
    return lambda logits: torch.tensor(probs, dtype=logits.dtype).log().expand(len(logits), -1)


# ---- the forward pass


def test_logits_are_those_of_gpt2():
    # Parameter number k is sin(1.3 i + k) at its i-th entry. Expected: transformers 5.24.0, GPT2LMHeadModel, float64.
    gpt = GPT(GPTConfig(vocab_size=7, block_size=6, n_layer=2, n_head=2, n_embd=4)).double()
    with torch.no_grad():
        for k, p in enumerate(gpt.parameters()):
            p.copy_(torch.sin(1.3 * torch.arange(p.numel(), dtype=p.dtype) + k).view(p.shape))
    expected = torch.tensor([
        [-0.282584695716, -2.660502362001, -2.210394725548, 0.589288803854, 2.762577983181, 1.999338877921,
         -0.889130791411],
        [-0.307516043345, -2.666551310930, -2.191131444752, 0.613388089176, 2.765896536265, 1.978349187488,
         -0.912117384282],
    ], dtype=torch.float64)
    torch.testing.assert_close(gpt(torch.tensor([[1, 6, 0, 3, 2]]))[0, [0, 4]], expected, rtol=0, atol=1e-11)


def test_no_future_token_changes_past_logits():
    gpt = make_gpt()
    before = gpt(IDS)
    for t in range(1, IDS.shape[1]):
        changed = IDS.clone()
        changed[:, t:] = (changed[:, t:] + 5) % V
        after = gpt(changed)
        torch.testing.assert_close(after[:, :t], before[:, :t], rtol=0, atol=1e-12)
        assert (after[:, t:] - before[:, t:]).abs().amax(-1).min() > 1e-3


def test_every_past_token_and_its_order_counts():
    gpt = make_gpt()
    last = gpt(IDS)[0, -1]
    for t in range(IDS.shape[1]):
        changed = IDS.clone()
        changed[0, t] = 10
        assert (gpt(changed)[0, -1] - last).abs().max() > 1e-4
    swapped = IDS[:, [1, 0, 2, 3, 4, 5]]  # the same set of tokens: only positions and order tell them apart
    assert (gpt(swapped)[0, -1] - last).abs().max() > 1e-4


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_logits_of_a_row_depend_neither_on_padding_nor_on_neighbours(dtype, tolerance):
    gpt = make_gpt(dtype)
    alone = gpt(torch.tensor([[3, 4, 5]]))[0]
    for left in (True, False):
        for pad in (0, 7):
            ids, mask = padded([[3, 4, 5]], 5, left, pad)
            assert (gpt(ids, mask)[mask] - alone).abs().max() <= tolerance
            assert (gpt(ids, mask.long())[mask] - alone).abs().max() <= tolerance
        ids, mask = padded(PROMPTS, 5, left)
        rows = gpt(ids, mask)
        for row, prompt in enumerate(PROMPTS):
            assert (rows[row][mask[row]] - gpt(torch.tensor([prompt]))[0]).abs().max() <= tolerance
    # What the mask is for: without it the same left-padded row is far off.
    ids, _ = padded([[3, 4, 5]], 5)
    assert (gpt(ids)[0, 2:] - alone).abs().max() > 0.1


def test_positions_start_at_the_first_real_token():
    gpt, used = make_gpt(), []
    gpt.wpe.register_forward_hook(lambda _, args, __: used.append(args[0]))
    gpt(IDS[:, :5], torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]))
    assert used[0][0, 2:].tolist() == [0, 1, 2] and used[0][1].tolist() == [0, 1, 2, 3, 4]


def test_visible_keys_by_hand():
    real = torch.tensor([[False, False, True, True], [True, True, True, False]])
    expected = torch.tensor([[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]],   # padding sees itself only
                             [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]])  # and is seen by itself only
    assert torch.equal(visible_keys(real), expected[:, None].bool())
    assert torch.equal(visible_keys(real, start=3), expected[:, None, 3:].bool())


def test_a_mask_of_ones_is_no_mask():
    gpt = make_gpt()
    torch.testing.assert_close(gpt(IDS, torch.ones_like(IDS)), gpt(IDS), rtol=0, atol=1e-12)


def test_padding_gives_no_nan_forward_or_backward():
    gpt = make_gpt()
    mask = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0]])
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        gpt.zero_grad()
        with sdpa_kernel(backend):
            logits = gpt(IDS, mask)
            logits.square().sum().backward()
        assert logits.isfinite().all()
        assert all(p.grad.isfinite().all() for p in gpt.parameters())


def test_hidden_is_what_the_tied_head_reads():
    gpt = make_gpt()
    assert gpt.hidden(IDS).shape == (2, 6, 8)
    torch.testing.assert_close(gpt.hidden(IDS) @ gpt.wte.weight.T, gpt(IDS))
    norm = gpt.ln_f
    plain = (gpt.hidden(IDS) - norm.bias) / norm.weight  # undo the last LayerNorm's scale and shift
    torch.testing.assert_close(plain.mean(-1), torch.zeros(2, 6, dtype=torch.float64), rtol=0, atol=1e-9)
    # V C + block C, n_layer (12 C² + 13 C) with n_inner = 4 C, and the last LayerNorm's 2 C; the head adds none.
    assert sum(p.numel() for p in gpt.parameters()) == V * 8 + BLOCK * 8 + 2 * (12 * 64 + 13 * 8) + 2 * 8


def test_initial_weights_and_loss():
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(vocab_size=300, block_size=32, n_layer=8, n_head=4, n_embd=64))
    for name, p in gpt.named_parameters():
        if p.dim() == 2:  # GPT-2: 0.02, and on the two residual projections of a block 0.02 / √(2 · 8) = 0.005
            assert p.std().item() == pytest.approx(0.005 if "c_proj" in name else 0.02, rel=0.06), name
        else:
            assert (p == (1.0 if ".weight" in name else 0.0)).all(), name
    ids = torch.randint(0, 300, (8, 32))
    loss = F.cross_entropy(gpt(ids)[:, :-1].reshape(-1, 300), ids[:, 1:].reshape(-1))
    assert loss.item() == pytest.approx(math.log(300), abs=0.1)


def test_dropout_acts_in_train_mode_only_and_in_gpt2s_places():
    gpt = make_gpt(dropout=0.5)
    torch.testing.assert_close(gpt(IDS), make_gpt()(IDS), rtol=0, atol=0)
    gpt.train()
    block, seen = gpt.h[0], []
    block.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for layer, value in ((block.attn.c_attn, 1.0), (block.mlp.c_proj, 1.0), (block.attn.c_proj, 0.0)):
            layer.weight.zero_()
            layer.bias.fill_(value)
        block.attn.c_proj.weight.copy_(torch.eye(8))
        torch.manual_seed(0)
        gpt(IDS.repeat(100, 1))
        x = torch.randn(1000, 6, 8, dtype=torch.float64)
        # A dropped entry is 0, a kept one is doubled. The first token has attention weight 1 on itself and v = 1 here:
        # dropped or kept in the weights, then once more on the way out: 4 with probability 1/4.
        places = {"embeddings": (seen[0], 0.5), "attention": (block.attn(x)[:, 0], 0.75), "MLP": (block.mlp(x), 0.5)}
    for place, (out, dropped) in places.items():
        assert (out == 0).double().mean().item() == pytest.approx(dropped, abs=0.05), place
    assert places["attention"][0].unique().tolist() == [0, 4] and places["MLP"][0].unique().tolist() == [0, 2]


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])])
def test_second_derivatives_through_attention_match_finite_differences(mask):
    # H v by differentiating twice, against (∇L(θ + h v) − ∇L(θ − h v)) / 2h; its error is of order h² = 1e-10.
    gpt = make_gpt()
    parameters = list(gpt.parameters())
    torch.manual_seed(3)
    vector = [torch.randn_like(p) for p in parameters]

    def gradient(create_graph=False):
        with sdpa_kernel(SDPBackend.MATH):
            logits = gpt(IDS, mask)
        loss = F.cross_entropy(logits[:, 2:].reshape(-1, V), IDS[:, 2:].reshape(-1))
        return torch.autograd.grad(loss, parameters, create_graph=create_graph)

    product = torch.autograd.grad(gradient(create_graph=True), parameters, grad_outputs=vector)

    def moved(step):
        with torch.no_grad():
            for p, v in zip(parameters, vector, strict=True):
                p += step * v
        out = gradient()
        with torch.no_grad():
            for p, v in zip(parameters, vector, strict=True):
                p -= step * v
        return out

    h = 1e-5
    for up, down, exact in zip(moved(h), moved(-h), product, strict=True):
        torch.testing.assert_close((up - down) / (2 * h), exact, rtol=1e-5, atol=1e-6)
    assert max(p.abs().max() for p in product) > 0.1


# ---- choosing a token


def test_next_token_probs_by_hand():
    logits = torch.tensor([[0.5, 0.1, 0.25, 0.15]], dtype=torch.float64).log()

    def probs(**options):
        return [round(p, 12) for p in next_token_probs(logits, **options)[0].tolist()]

    assert probs() == [0.5, 0.1, 0.25, 0.15]
    # temperature 1/2 squares and rescales: .25, .01, .0625, .0225 over .345
    assert probs(temperature=0.5) == [round(x / 0.345, 12) for x in (0.25, 0.01, 0.0625, 0.0225)]
    assert probs(top_k=2) == [round(x, 12) for x in (2 / 3, 0, 1 / 3, 0)]
    assert probs(top_k=4) == probs(top_k=99) == probs(top_p=1.0) == probs()
    assert probs(top_k=1) == probs(top_p=1e-9) == probs(top_p=0.4) == [1, 0, 0, 0]
    # masses from the likeliest down: .5, .75, .9, 1; the smallest set that *reaches* p
    assert probs(top_p=0.74) == [round(x, 12) for x in (2 / 3, 0, 1 / 3, 0)]
    assert probs(top_p=0.76) == [round(x / 0.9, 12) for x in (0.5, 0, 0.25, 0.15)]
    assert probs(top_p=0.95) == probs()
    # top_k first, then the nucleus of what it left (2/3, 1/3); temperature before both: .25/.3125 = .8 reaches .7 alone
    assert probs(top_k=2, top_p=0.7) == [round(x, 12) for x in (2 / 3, 0, 1 / 3, 0)]
    assert probs(temperature=0.5, top_k=2, top_p=0.7) == [1, 0, 0, 0]


def test_nucleus_boundary_ties_and_forbidden_ids():
    half = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]], dtype=torch.float64)  # 1/2, 1/2, 0, 0 exactly
    assert sorted(next_token_probs(half, top_p=0.5)[0].tolist()) == [0, 0, 0, 1]  # a half reaches 0.5
    assert next_token_probs(half, top_p=0.6)[0].tolist() == [0.5, 0.5, 0, 0]
    assert next_token_probs(half, top_k=3)[0].tolist() == [0.5, 0.5, 0, 0]
    tied = torch.zeros(1, 5, dtype=torch.float64)
    assert sorted(next_token_probs(tied, top_k=2)[0].tolist()) == [0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize("options, expected", [
    ({}, [0.5, 0.0, 0.3, 0.2, 0.0]),
    ({"temperature": 0.5}, [25 / 38, 0, 9 / 38, 4 / 38, 0]),
    ({"top_k": 2}, [5 / 8, 0, 3 / 8, 0, 0]),
    ({"top_p": 0.6}, [5 / 8, 0, 3 / 8, 0, 0]),
    ({"temperature": 0}, [1, 0, 0, 0, 0]),
])
def test_generate_samples_the_stated_distribution(options, expected):
    rows = 20_000
    gpt = make_gpt(torch.float32, vocab_size=5, n_layer=1)
    out = gpt.generate(torch.zeros(rows, 1, dtype=torch.long), 2, adjust=always([0.5, 0.0, 0.3, 0.2, 0.0]),
                       generator=torch.Generator().manual_seed(5), **options)
    for column in (1, 2):
        counts = torch.bincount(out[:, column], minlength=5) / rows
        for frequency, p in zip(counts.tolist(), expected, strict=True):
            assert abs(frequency - p) <= 4 * math.sqrt(p * (1 - p) / rows)  # four standard errors; exact at 0 and 1
    if options == {}:  # the two columns are independent draws: P(0, 0) = 1/4
        assert ((out[:, 1] == 0) & (out[:, 2] == 0)).double().mean().item() == pytest.approx(0.25, abs=0.013)


@pytest.mark.parametrize("u, expected", [(0.0, 3), (1 - 2.0 ** -53, 1), (0.6, 1), (0.4, 3)])
def test_an_id_of_probability_zero_is_never_drawn(monkeypatch, u, expected):
    # torch.rand lies in [0, 1). At neither end may an id at the rim of the vocabulary appear: both are forbidden here.
    monkeypatch.setattr(torch, "rand", lambda *shape, **kw: torch.full(shape, u, dtype=kw["dtype"]))
    logits = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    assert next_token(logits).tolist() == [expected]


def test_a_generator_decides_the_draws_and_leaves_the_global_one_alone():
    gpt = make_gpt()

    def draw(seed):
        return gpt.generate(IDS, 8, generator=torch.Generator().manual_seed(seed)).tolist()

    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert draw(1) == first and draw(2) != first
    torch.manual_seed(7)
    one = gpt.generate(IDS, 8)
    torch.manual_seed(7)
    assert torch.equal(gpt.generate(IDS, 8), one)


# ---- generation


@pytest.mark.parametrize("options", [
    {"temperature": 0}, {"temperature": 1.3}, {"top_k": 4}, {"top_p": 0.8}, {"eos_id": 3, "pad_id": 0},
])
@pytest.mark.parametrize("pad", [False, True])
def test_cached_is_uncached(options, pad):
    gpt = make_gpt()
    ids, mask = padded(PROMPTS, 5) if pad else (IDS, None)
    cached, uncached = (
        gpt.generate(ids, 9, attention_mask=mask, use_cache=use_cache, generator=torch.Generator().manual_seed(2),
                     **options)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert cached.shape == (len(ids), ids.shape[1] + 9) and torch.equal(cached[:, :ids.shape[1]], ids)


def test_the_cache_spares_the_work():
    gpt, widths = make_gpt(), []
    gpt.ln_f.register_forward_hook(lambda _, args, __: widths.append(args[0].shape[1]))
    gpt.generate(IDS, 4)
    gpt.generate(IDS, 4, use_cache=False)
    assert widths == [6, 1, 1, 1, 6, 7, 8, 9]


def test_greedy_takes_the_likeliest_token_of_forward():
    gpt = make_gpt()
    out = gpt.generate(IDS, 6, temperature=0)
    for t in range(6, 12):
        assert torch.equal(out[:, t], gpt(out[:, :t])[:, -1].argmax(-1))


def test_a_left_padded_batch_gives_what_each_row_gives_alone():
    gpt = make_gpt()
    ids, mask = padded(PROMPTS, 5, pad=6)
    out = gpt.generate(ids, BLOCK - 5, temperature=0, attention_mask=mask)
    for row, prompt in enumerate(PROMPTS):
        alone = gpt.generate(torch.tensor([prompt]), BLOCK - 5, temperature=0)[0]
        assert out[row, 5 - len(prompt):].tolist() == alone.tolist()
    unmasked = gpt.generate(ids, BLOCK - 5, temperature=0)
    assert not torch.equal(unmasked, out)  # so the mask does something here


def scripted(rows):
    """An `adjust` that dictates the new tokens: rows[b][step]; and a list with one entry per step that was made."""
    steps = []

    def adjust(logits):
        wanted = torch.tensor([row[len(steps)] for row in rows])
        steps.append(len(steps))
        return torch.zeros_like(logits).scatter(1, wanted[:, None], 100.0)

    return adjust, steps


@pytest.mark.parametrize("use_cache", [True, False])
def test_rows_end_at_the_end_token_and_are_filled(use_cache):
    rows = [[4, 9, 5, 5, 5, 5], [1, 2, 3, 9, 5, 5]]
    for pad_id, fill in ((0, 0), (None, 9), (9, 9)):
        adjust, steps = scripted(rows)
        out = make_gpt().generate(IDS, 6, eos_id=9, pad_id=pad_id, adjust=adjust, use_cache=use_cache)
        assert out[:, 6:].tolist() == [[4, 9] + 4 * [fill], [1, 2, 3, 9] + 2 * [fill]]
        assert len(steps) == 4  # both rows have ended: nothing more is computed
    adjust, steps = scripted(rows)
    assert make_gpt().generate(IDS, 6, pad_id=0, adjust=adjust)[:, 6:].tolist() == rows  # without eos_id 9 is a token
    assert 9 in IDS[0] and len(steps) == 6  # and a 9 in the prompt ended nothing above


def test_adjust_comes_before_temperature_and_forbids():
    gpt = make_gpt()
    forbid = torch.zeros(V, dtype=torch.float64).index_fill(0, torch.tensor([0, 2, 4, 6, 8, 10]), -math.inf)
    for temperature in (0, 5.0):
        out = gpt.generate(IDS.repeat(50, 1), 5, temperature=temperature, adjust=lambda logits: logits + forbid)
        assert (out[:, 6:] % 2 == 1).all()
    # At temperature 1/2 the adjusted (1/2, 1/2 + ...) distribution .6, .4 becomes .36/.52 = .6923
    probs = [0.6, 0.4] + 9 * [0.0]
    out = gpt.generate(torch.zeros(4000, 1, dtype=torch.long), 1, temperature=0.5, adjust=always(probs),
                       generator=torch.Generator().manual_seed(0))
    assert (out[:, 1] == 0).double().mean().item() == pytest.approx(0.36 / 0.52, abs=0.03)


def test_contexts_reach_exactly_to_the_block_size():
    gpt = make_gpt()
    assert gpt.generate(IDS, BLOCK - 6).shape == (2, BLOCK)
    assert torch.equal(gpt.generate(IDS, 0), IDS)
    assert gpt(torch.zeros(1, BLOCK, dtype=torch.long)).shape == (1, BLOCK, V)
    with pytest.raises(ValueError, match="block_size"):
        gpt.generate(IDS, BLOCK - 5)
    with pytest.raises(ValueError, match="block_size"):
        gpt(torch.zeros(1, BLOCK + 1, dtype=torch.long))


def test_generate_neither_drops_out_nor_keeps_a_graph_and_restores_the_mode():
    gpt = make_gpt(dropout=0.5)
    expected = gpt.generate(IDS, 8, temperature=0)
    assert not gpt.training
    gpt.train()
    seen = []

    def adjust(logits):
        seen.append((gpt.training, gpt.h[0].attn.training, logits.requires_grad))
        return logits

    assert torch.equal(gpt.generate(IDS, 8, temperature=0, adjust=adjust), expected)
    assert set(seen) == {(False, False, False)}
    assert gpt.training and gpt.h[1].mlp.training
    with pytest.raises(ZeroDivisionError):
        gpt.generate(IDS, 8, adjust=lambda logits: 1 / 0)
    assert gpt.training  # restored after an error, too


def test_nothing_is_made_on_the_default_device():
    gpt = make_gpt(torch.float32)
    ids, mask = padded(PROMPTS, 5)
    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):  # a tensor made without device= would land on meta, and mixing devices fails
        for m in (None, mask):
            assert gpt(ids, m).isfinite().all()
            for use_cache in (True, False):
                out = gpt.generate(ids, 4, top_k=5, top_p=0.9, attention_mask=m, eos_id=1, pad_id=0,
                                   generator=generator, use_cache=use_cache)
                assert out.device.type == "cpu" and out.tolist()


@pytest.mark.parametrize("changes, match", [
    ({"ids": torch.tensor([1, 2])}, "ids"),
    ({"ids": torch.tensor([[1.0, 2.0]])}, "ids"),
    ({"ids": torch.zeros(1, 0, dtype=torch.long)}, "ids"),
    ({"ids": torch.tensor([[1, V]])}, "vocabulary"),
    ({"ids": torch.tensor([[1, -1]])}, "vocabulary"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"top_k": 0}, "top_k"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"eos_id": V}, "eos_id"),
    ({"pad_id": -1}, "pad_id"),
    ({"attention_mask": torch.ones(2, 5)}, "attention_mask"),
    ({"attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]])}, "left"),
    ({"adjust": lambda logits: logits * math.nan}, "logits"),
    ({"adjust": lambda logits: torch.full_like(logits, -math.inf)}, "logits"),
])
def test_wrong_arguments_are_named_in_one_line(changes, match):
    with pytest.raises(ValueError, match=match) as error:
        make_gpt().generate(**{"ids": IDS, "max_new_tokens": 3, **changes})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("changes", [
    {"n_layer": 0}, {"vocab_size": 2.5}, {"n_head": 3}, {"dropout": 1.0}, {"dropout": -0.1}, {"n_inner": 0},
])
def test_a_wrong_config_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        GPTConfig(**{**dict(vocab_size=5, block_size=4, n_layer=1, n_head=2, n_embd=4), **changes})


# ---- weights in and out


@pytest.fixture
def folder(tmp_path):
    make_gpt(torch.float32).save_pretrained(tmp_path / "gpt")
    return tmp_path / "gpt"


def rewrite(folder, change_tensors=None, **config):
    """Change the files of a folder in place."""
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**found, **config}), encoding="utf-8")
    if change_tensors:
        save_file(change_tensors(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def test_save_then_load_changes_nothing(tmp_path):
    gpt = make_gpt(torch.float32, dropout=0.1, layer_norm_epsilon=1e-6, n_inner=20)
    gpt.save_pretrained(tmp_path / "a" / "b")
    state = torch.get_rng_state()
    again = GPT.from_pretrained(tmp_path / "a" / "b")
    assert torch.equal(torch.get_rng_state(), state)
    assert again.config == gpt.config and not again.training
    assert {n: p.tolist() for n, p in again.named_parameters()} == {n: p.tolist() for n, p in gpt.named_parameters()}
    assert sorted(p.name for p in (tmp_path / "a" / "b").iterdir()) == ["config.json", "model.safetensors"]
    again.train()(IDS).sum().backward()
    assert all(p.grad is not None for p in again.parameters())


def test_the_file_has_gpt2s_names_and_layout(folder):
    tensors = load_file(folder / "model.safetensors")
    gpt = make_gpt(torch.float32)
    assert tensors["transformer.h.1.mlp.c_fc.weight"].shape == (8, 32)
    assert torch.equal(tensors["transformer.h.0.attn.c_attn.weight"], gpt.h[0].attn.c_attn.weight.T)
    assert torch.equal(tensors["transformer.wte.weight"], gpt.wte.weight)
    assert len(tensors) == 2 + 2 * 12 + 2 and "lm_head.weight" not in tensors


@pytest.mark.parametrize("where", ["writing", "replacing"])
def test_a_failed_save_leaves_the_old_files(folder, monkeypatch, where):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    def broken(tensors, path, metadata=None):
        if where == "writing":
            path.write_bytes(b"half a file")
        raise OSError("disk full")

    monkeypatch.setattr(*((module, "save_file") if where == "writing" else (module.os, "replace")), broken)
    with pytest.raises(OSError, match="disk full"):
        make_gpt(torch.float32, std=0.1).save_pretrained(folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


@pytest.mark.parametrize("change", [
    lambda t: {name.removeprefix("transformer."): x for name, x in t.items()},
    lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"].clone()},
    lambda t: {**t, "transformer.h.0.attn.bias": torch.ones(1, 1, BLOCK, BLOCK),
               "transformer.h.1.attn.masked_bias": torch.tensor(-1e4)},
], ids=["no prefix", "head", "mask buffers"])
def test_other_forms_of_the_same_checkpoint_load(folder, change):
    rewrite(folder, change)
    assert torch.equal(GPT.from_pretrained(folder)(IDS), make_gpt(torch.float32)(IDS))


def test_half_precision_files_load_as_float32_and_rates_as_gpt2_has_them(folder):
    rewrite(folder, lambda t: {name: x.half() for name, x in t.items()})
    gpt = GPT.from_pretrained(folder)
    assert {p.dtype for p in gpt.parameters()} == {torch.float32}
    torch.testing.assert_close(gpt(IDS), make_gpt(torch.float32)(IDS), rtol=0, atol=0.05)
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    small = {name: found[name] for name in ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd")}
    (folder / "config.json").write_text(json.dumps(small), encoding="utf-8")  # what is missing has GPT-2's value
    assert GPT.from_pretrained(folder).config == GPTConfig(V, BLOCK, 2, 2, 8, dropout=0.1)


@pytest.mark.parametrize("spoil, match", [
    (lambda f: rewrite(f, lambda t: {n: x for n, x in t.items() if "ln_f.bias" not in n}), "ln_f.bias is absent"),
    (lambda f: rewrite(f, lambda t: {**t, "transformer.extra": torch.ones(3)}), r"extra is \(3,\)"),
    (lambda f: rewrite(f, lambda t: {**t, "transformer.wpe.weight": torch.ones(3, 8)}), r"wpe.weight is \(3, 8\)"),
    (lambda f: rewrite(f, lambda t: {n: x.T.contiguous() if "c_fc.weight" in n else x for n, x in t.items()}), "c_fc"),
    (lambda f: rewrite(f, lambda t: {**t, "lm_head.weight": torch.ones(V, 8)}), "lm_head"),
    (lambda f: rewrite(f, n_layer=3), "h.2"),
    (lambda f: rewrite(f, activation_function="relu"), "activation_function.*gelu_new"),
    (lambda f: rewrite(f, model_type="gpt_neo"), "model_type"),
    (lambda f: rewrite(f, scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx"),
    (lambda f: rewrite(f, attn_pdrop=0.3), "attn_pdrop"),
    (lambda f: rewrite(f, n_embd="8"), "n_embd"),
    (lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "config.json|JSON"),
    (lambda f: (f / "config.json").write_text("{}", encoding="utf-8"), "vocab_size"),
    (lambda f: (f / "model.safetensors").write_bytes(b"nonsense"), "Safetensor"),
    (lambda f: (f / "model.safetensors").unlink(), "model.safetensors"),
    (lambda f: (f / "config.json").unlink(), "config.json"),
])
def test_a_folder_that_does_not_fit_is_refused_in_one_line(folder, spoil, match):
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=match) as error:
        GPT.from_pretrained(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value) or "n_embd" in str(error.value)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        GPT.from_pretrained(tmp_path / "nowhere")


@pytest.mark.cuda
def test_on_a_gpu(tmp_path):
    gpt = make_gpt(torch.float32)
    expected = gpt(IDS)
    gpt.cuda().save_pretrained(tmp_path)
    torch.testing.assert_close(GPT.from_pretrained(tmp_path)(IDS), expected)
    ids, mask = (x.cuda() for x in padded(PROMPTS, 5))
    generator = torch.Generator("cuda").manual_seed(0)
    out = gpt.generate(ids, 10, attention_mask=mask, eos_id=3, pad_id=0, generator=generator)
    assert out.device.type == "cuda" and out.shape == (4, 15)


@pytest.fixture(scope="module")
def transformers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("TRANSFORMERS_VERBOSITY", "error")
        yield pytest.importorskip("transformers")


def assert_same_model(ours, theirs):
    theirs.eval()
    with torch.no_grad():
        assert (ours(IDS) - theirs(IDS).logits).abs().max() <= 1e-4
        ids, mask = padded(PROMPTS, 5)
        positions = torch.tensor([[0, 0, 0, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4], [0, 0, 0, 0, 1]])
        logits = theirs(ids, attention_mask=mask.long(), position_ids=positions).logits
        assert (ours(ids, mask) - logits)[mask].abs().max() <= 1e-4
    for prompt, prompt_mask, end in ((IDS, torch.ones_like(IDS), None), (ids, mask.long(), 3)):
        expected = theirs.generate(
            prompt, attention_mask=prompt_mask, max_new_tokens=10, do_sample=False, eos_token_id=end, pad_token_id=0
        )
        got = ours.generate(prompt, 10, temperature=0, attention_mask=prompt_mask, eos_id=end, pad_id=0)
        assert got[:, :expected.shape[1]].tolist() == expected.tolist()


def test_transformers_loads_ours(transformers, tmp_path):
    ours = make_gpt(torch.float32, n_inner=20, layer_norm_epsilon=1e-3)
    ours.save_pretrained(tmp_path)
    theirs, report = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())  # no missing, unexpected or mismatched keys
    assert theirs.config.eos_token_id is None  # transformers' default, 50256, would lie outside a small vocabulary
    assert_same_model(ours, theirs)


def test_we_load_transformers(transformers, tmp_path):
    torch.manual_seed(4)
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=V, n_positions=BLOCK, n_layer=3, n_head=4, n_embd=12, initializer_range=0.4,
                                bos_token_id=None, eos_token_id=None)
    )
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert ours.config == GPTConfig(V, BLOCK, n_layer=3, n_head=4, n_embd=12, dropout=0.1)
    assert_same_model(ours, theirs)
