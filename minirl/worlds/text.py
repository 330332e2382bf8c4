"""The text world: prompts in, completions sampled from the policy, rewards for whole completions, a Batch out.

A row of ids is prompt then completion, from column 0, padded on the right. `pack_rows` shifts it once:
obs = ids[:, :-1], actions = ids[:, 1:], so that position t's distribution is over the action at t. Nobody else shifts.
Causal attention then needs no padding mask; left padding exists only inside `generate`.
"""

import torch
from torch.distributions import kl_divergence

from minirl.functional.kl import k3
from minirl.functional.masked import masked_mean, masked_sum
from minirl.functional.returns import token_rewards
from minirl.worlds.batch import Batch, Completions


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


class TokenWorld:
    """A text task as a place to act: an action is a token, an episode a completion.

    Args:
        task: with sample(n, generator) and held_out(n), both giving (prompts, columns); see worlds.arithmetic.
        policy_tokenizer: the tokenizer of the policies that will act here.
        reward: reward(prompts, completions, **columns) -> list of floats.
        max_new_tokens: longest completion, end token included.
        reference: frozen policy, obs -> Distribution; fills ref_logprobs. None for none.
        kl_in_reward: β of a per-token KL penalty inside the rewards; needs a reference.
        group_size: completions per prompt, in neighbouring rows.
        prompts_per_batch: different prompts in a batch; rows = prompts_per_batch · group_size.
        missing_end_penalty: subtracted from the score of a completion that did not end by itself.
        seed: of the prompts' order.
        device: where the tensors of a batch live; the policy must be there too.
    Raises:
        ValueError: if kl_in_reward is set without a reference.
    """

    def __init__(
        self, task, policy_tokenizer, reward, max_new_tokens, reference=None, kl_in_reward=0.0, group_size=1,
        prompts_per_batch=64, missing_end_penalty=0.0, seed=0, device="cpu",
    ):  # fmt: skip
        if kl_in_reward and reference is None:
            raise ValueError("kl_in_reward is set but there is no reference to measure the KL to")
        self.task, self.tokenizer, self.reward, self.max_new_tokens = task, policy_tokenizer, reward, max_new_tokens
        self.reference, self.kl_in_reward, self.group_size = reference, kl_in_reward, group_size
        self.prompts_per_batch, self.missing_end_penalty, self.device = prompts_per_batch, missing_end_penalty, device
        self.generator = torch.Generator(device="cpu").manual_seed(seed)

    @torch.no_grad()
    def collect(self, policy, critic=None):
        """Sample one batch of completions and score them. Returns a Batch of (rows, T)."""
        prompts, columns = self.task.sample(self.prompts_per_batch, self.generator)
        prompts = [prompt for prompt in prompts for _ in range(self.group_size)]
        columns = {name: [x for x in column for _ in range(self.group_size)] for name, column in columns.items()}
        obs, actions, mask, completions, ended = self.complete(policy, prompts)
        scores = self.reward(prompts, completions, **columns)
        if len(scores) != len(completions):
            raise ValueError(f"the reward function gave {len(scores)} scores for {len(completions)} completions")
        scores = torch.tensor(scores, dtype=torch.float32, device=self.device)
        scores = scores - self.missing_end_penalty * (~ended).float()

        logprobs = policy(obs).log_prob(actions)
        ref_logprobs = None if self.reference is None else self.reference(obs).log_prob(actions)
        rewards = token_rewards(
            scores, logprobs, logprobs if ref_logprobs is None else ref_logprobs, mask, self.kl_in_reward
        )
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # (B, T) the last real token of each row
        values = next_values = None
        if critic is not None:
            values = critic(obs)
            next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        metrics = {
            "score": float(scores.mean()),
            "response_length": float(mask.sum(1).float().mean()),
            "ended_fraction": float(ended.float().mean()),
            "tokens": int(mask.sum()),
        }
        if ref_logprobs is not None:
            metrics["kl_policy_ref"] = float(masked_mean(k3(logprobs, ref_logprobs), mask))
        return Batch(
            obs=obs, actions=actions, mask=mask, logprobs=logprobs, ref_logprobs=ref_logprobs,
            rewards=rewards, scores=scores, terminated=last, truncated=last & ~ended.unsqueeze(1),
            values=values, next_values=next_values, rows_are_sequences=True, group_size=self.group_size,
            max_length=self.max_new_tokens, kl_in_reward=self.kl_in_reward,
            metrics=metrics,
        )  # fmt: skip

    @torch.no_grad()
    def complete(self, policy, prompts, greedy=False):
        """Let a policy complete prompts.

        Args:
            policy: a TokenPolicy.
            prompts: list of B strings.
            greedy: take the most probable token instead of sampling.
        Returns:
            (obs, actions, mask, completions, ended): three (B, T) tensors, B strings without the end token, and (B,)
            bool, whether a completion ended by itself.
        """
        tokenizer, prompt_ids = self.tokenizer, [self.tokenizer.encode(prompt) for prompt in prompts]
        width = max(len(ids) for ids in prompt_ids)
        padded = [[tokenizer.pad_id] * (width - len(ids)) + ids for ids in prompt_ids]
        real = [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompt_ids]
        out = policy.generate(
            torch.tensor(padded, dtype=torch.long, device=self.device), self.max_new_tokens, greedy=greedy,
            attention_mask=torch.tensor(real, dtype=torch.long, device=self.device),
            eos_id=tokenizer.eos_id, pad_id=tokenizer.pad_id,
        )  # fmt: skip
        responses, ended = [], []
        for row in out[:, width:].tolist():
            ended.append(tokenizer.eos_id in row)
            responses.append(row[: row.index(tokenizer.eos_id) + 1] if ended[-1] else row)
        completions = [tokenizer.decode(r[:-1] if e else r) for r, e in zip(responses, ended, strict=True)]
        obs, actions, mask = (x.to(self.device) for x in pack_rows(prompt_ids, responses, tokenizer.pad_id))
        return obs, actions, mask, completions, torch.tensor(ended, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def evaluate(self, policy, count=None, seed=0, reference=None):
        """Score a policy on held-out prompts, greedy and sampled, without touching any other random stream.

        Args:
            policy: a TokenPolicy.
            count: prompts; None for all.
            seed: of the sampling.
            reference: measure the KL to this policy; None for the world's own.
        Returns:
            (metrics, samples). metrics: `accuracy_greedy`, `accuracy_sampled` (mean rewards), `kl_policy_ref` (nats per
            completion: the exact KL(policy‖reference) of every token of the sampled completions, summed; left out
            without a reference), `response_length` (tokens), `ended_fraction`. samples: dicts with `prompt`,
            `completion` (greedy), `score` and the task's columns.
        """
        prompts, columns = self.task.held_out(count)
        reference = reference or self.reference
        devices = [self.device] if torch.device(self.device).type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            obs, _, mask, sampled, ended = self.complete(policy, prompts)
            *_, greedy, _ = self.complete(policy, prompts, greedy=True)
        greedy_scores = self.reward(prompts, greedy, **columns)
        sampled_scores = self.reward(prompts, sampled, **columns)
        metrics = {
            "accuracy_greedy": sum(greedy_scores) / len(prompts),
            "accuracy_sampled": sum(sampled_scores) / len(prompts),
            "response_length": float(mask.sum(1).float().mean()),
            "ended_fraction": float(ended.float().mean()),
        }
        if reference is not None:
            kl = masked_sum(kl_divergence(policy(obs), reference(obs)), mask, dim=1)
            metrics["kl_policy_ref"] = float(masked_mean(kl, torch.ones_like(kl)))
        samples = [
            {"prompt": prompt, "completion": completion, "score": score}
            | {name: column[index] for name, column in columns.items()}
            for index, (prompt, completion, score) in enumerate(zip(prompts, greedy, greedy_scores, strict=True))
        ]
        return metrics, samples

    def state_dict(self):
        """The position in the stream of prompts."""
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state):
        """Take back what state_dict gave."""
        self.generator.set_state(state["generator"].cpu())
