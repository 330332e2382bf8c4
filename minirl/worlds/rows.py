"""Texts to rows of ids: prompt then completion, from column 0, padded on the right.

`pack_rows` shifts a row once, obs = ids[:, :-1] and actions = ids[:, 1:], so that position t's distribution is over the
action at t. Nobody else shifts. Causal attention then needs no padding mask; left padding exists only inside
`generate`. Masks come from lengths, never from ids: padding may have the end token's id.
"""

from bisect import bisect_left

import torch

from minirl.worlds.batch import Completions


def encode_rows(tokenizer, prompts, completions):
    """Token ids of prompts and of completions, each encoded by itself, so that no token straddles the seam.

    Args:
        tokenizer: with encode and eos_id.
        prompts, completions: lists of strings of equal length.
    Returns:
        (prompt_ids, response_ids): lists of lists; every response ends with the end token.
    """
    prompt_ids = [tokenizer.encode(prompt) for prompt in prompts]
    response_ids = [tokenizer.encode(completion) + [tokenizer.eos_id] for completion in completions]
    return prompt_ids, response_ids


def pack_rows(prompts, responses, pad_id):
    """Rows of ids, shifted once into states and actions.

    Args:
        prompts, responses: lists of B id lists; a prompt has at least one id.
        pad_id: fills the right side; it may equal the end token's id, for masks come from lengths.
    Returns:
        (obs, actions, mask): (B, T) ids, (B, T) ids, (B, T) bool with 1 where the action is a response token;
        T = longest prompt + response − 1.
    Raises:
        ValueError: if the lists differ in length or a prompt is empty.
    """
    if len(prompts) != len(responses):
        raise ValueError(f"prompts has {len(prompts)} rows, but responses has {len(responses)}")
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError("a prompt is empty; the first token of a response needs a state to be predicted from")
    lengths = [len(p) + len(r) for p, r in zip(prompts, responses, strict=True)]
    width = max(lengths)
    rows = [list(p) + list(r) for p, r in zip(prompts, responses, strict=True)]
    ids = torch.tensor([row + [pad_id] * (width - len(row)) for row in rows], dtype=torch.long, device="cpu")
    column = torch.arange(1, width, device="cpu")  # actions[:, t] is ids[:, t + 1]
    first = torch.tensor([len(p) for p in prompts], device="cpu").unsqueeze(1)
    last = torch.tensor(lengths, device="cpu").unsqueeze(1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), (column >= first) & (column < last)


def pack_completions(tokenizer, prompts, completions, device="cpu"):
    """Completions (a record to imitate) of texts: encoded, ended, packed, on `device`."""
    packed = pack_rows(*encode_rows(tokenizer, prompts, completions), tokenizer.pad_id)
    return Completions(*(tensor.to(device) for tensor in packed))


def allowed_ids(tokenizer, device="cpu"):
    """(V,) bool for TokenPolicy: every id but padding."""
    allowed = torch.ones(tokenizer.vocab_size, dtype=torch.bool, device=device)
    if tokenizer.pad_id != tokenizer.eos_id:
        allowed[tokenizer.pad_id] = False
    return allowed


def place_steps(tokenizer, actions, mask, steps):
    """Rewards per reasoning step, from characters to tokens.

    Args:
        tokenizer: with decode.
        actions, mask: (B, T) as from pack_rows.
        steps: for each row a list of (end, reward), end = characters of the completion up to the end of the step.
    Returns:
        (step_rewards, step_ends): (B, T) float and bool; a step ends with the token that holds its last character, and
        the last step of a row with the row, end token included.
    """
    rewards, ends = (torch.zeros(mask.shape, dtype=kind, device="cpu") for kind in (torch.float32, torch.bool))
    for row, places in enumerate(steps):
        columns = mask[row].nonzero().squeeze(1).tolist()
        ids = actions[row, columns].tolist()

        def reached(count, ids=ids):  # a character may take several tokens, so lengths of single ones do not add up
            return len(tokenizer.decode(ids[:count]))

        for number, (end, reward) in enumerate(places):
            last = number == len(places) - 1
            at = columns[-1] if last else columns[bisect_left(range(1, len(ids)), end, key=reached)]
            rewards[row, at] += reward  # a token may hold the ends of two steps
            ends[row, at] = True
    return rewards.to(mask.device), ends.to(mask.device)
