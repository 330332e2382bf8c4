"""The text world: prompts in, completions sampled from the policy, rewards for whole completions, a Batch out.

How prompts and completions become rows of states and actions is in worlds.rows; how long a completion may be, who
rewards it and whose language it should not leave is decided here.
"""

import torch
from torch.distributions import kl_divergence

from minirl.functional.kl import k3
from minirl.functional.masked import masked_mean, masked_sum
from minirl.functional.returns import token_rewards
from minirl.worlds.batch import Batch
from minirl.worlds.rows import allowed_ids, encode_rows, pack_completions, pack_rows, place_steps  # noqa: F401 (public)


class TokenWorld:
    """A text task as a place to act: an action is a token, an episode a completion.

    Args:
        task: with sample(n, generator) and held_out(n), both giving (prompts, columns); see worlds.arithmetic. One that
            also has len() and ask(indices) is walked through in epochs, reshuffled each time (Tülu 3, section 6.2).
        policy_tokenizer: the tokenizer of the policies that will act here.
        reward: reward(prompts, completions, **columns) -> list of floats.
        max_new_tokens: longest completion, end token included.
        reference: frozen policy, obs -> Distribution; fills ref_logprobs. None for none.
        kl_in_reward: β of a per-token KL penalty inside the rewards; needs a reference.
        group_size: completions per prompt, in neighbouring rows.
        prompts_per_batch: different prompts in a batch; rows = prompts_per_batch · group_size.
        missing_end_penalty: subtracted from the score of a completion that did not end by itself (Tülu 3 sets the
            score to −10 instead).
        seed: of the prompts' order.
        device: where the tensors of a batch live; the policy must be there too.
        reshuffle: False draws every batch's prompts with replacement instead.
        step_rewards: step_rewards(prompts, completions, **columns) -> for each completion a list of (end, reward), end
            counted in characters; fills the batch's step_rewards and step_ends (process supervision).
        judges: dict name -> a function like reward, for `evaluate`; default {"score": reward}.
    Raises:
        ValueError: if kl_in_reward is set without a reference.
    """

    def __init__(
        self, task, policy_tokenizer, reward, max_new_tokens, reference=None, kl_in_reward=0.0, group_size=1,
        prompts_per_batch=64, missing_end_penalty=0.0, seed=0, device="cpu", reshuffle=True, step_rewards=None,
        judges=None,
    ):  # fmt: skip
        if kl_in_reward and reference is None:
            raise ValueError("kl_in_reward is set but there is no reference to measure the KL to")
        self.task, self.tokenizer, self.reward, self.max_new_tokens = task, policy_tokenizer, reward, max_new_tokens
        self.reference, self.kl_in_reward, self.group_size = reference, kl_in_reward, group_size
        self.prompts_per_batch, self.missing_end_penalty, self.device = prompts_per_batch, missing_end_penalty, device
        self.step_rewards, self.judges = step_rewards, judges
        self.generator = torch.Generator(device="cpu").manual_seed(seed)
        self.reshuffle = reshuffle and hasattr(task, "ask")
        self.waiting = torch.empty(0, dtype=torch.long, device="cpu")  # prompts that this epoch has not asked yet

    def next_prompts(self):
        """(prompts, columns) of the next batch, each prompt group_size times."""
        if self.reshuffle:
            while len(self.waiting) < self.prompts_per_batch:
                epoch = torch.randperm(len(self.task), generator=self.generator, device="cpu")
                self.waiting = torch.cat([self.waiting, epoch])
            now, self.waiting = self.waiting.tensor_split([self.prompts_per_batch])
            prompts, columns = self.task.ask(now.tolist())
        else:
            prompts, columns = self.task.sample(self.prompts_per_batch, self.generator)
        prompts = [prompt for prompt in prompts for _ in range(self.group_size)]
        return prompts, {name: [x for x in column for _ in range(self.group_size)] for name, column in columns.items()}

    @torch.no_grad()
    def collect(self, policy, critic=None):
        """Sample one batch of completions and score them. Returns a Batch of (rows, T)."""
        prompts, columns = self.next_prompts()
        obs, actions, mask, completions, ended = self.complete(policy, prompts)
        scores = self._score(prompts, completions, columns) - self.missing_end_penalty * (~ended).float()

        logprobs = policy(obs).log_prob(actions)
        ref_logprobs = None if self.reference is None else self.reference(obs).log_prob(actions)
        rewards = token_rewards(
            scores, logprobs, logprobs if ref_logprobs is None else ref_logprobs, mask, self.kl_in_reward
        )
        last = mask & (mask.cumsum(1) == mask.sum(1, keepdim=True))  # (B, T) the last real token of each row
        values = next_values = step_rewards = step_ends = None
        if critic is not None:
            values = critic(obs)
            next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
        if self.step_rewards is not None:
            steps = self.step_rewards(prompts, completions, **columns)
            step_rewards, step_ends = place_steps(self.tokenizer, actions, mask, steps)
        metrics = {
            "score": float(scores.mean()),
            "response_length": float(mask.sum(1).float().mean()),
            "ended_fraction": float(ended.float().mean()),
            "tokens": int(mask.sum()),
        } | {f"reward_{name}": value for name, value in getattr(self.reward, "parts", {}).items()}
        if ref_logprobs is not None:
            metrics["kl_policy_ref"] = float(masked_mean(k3(logprobs, ref_logprobs), mask))
        return Batch(
            obs=obs, actions=actions, mask=mask, logprobs=logprobs, ref_logprobs=ref_logprobs,
            rewards=rewards, scores=scores, terminated=last, truncated=last & ~ended.unsqueeze(1),
            values=values, next_values=next_values, step_rewards=step_rewards, step_ends=step_ends,
            rows_are_sequences=True, group_size=self.group_size,
            max_length=self.max_new_tokens, kl_in_reward=self.kl_in_reward,
            metrics=metrics,
        )  # fmt: skip

    def _score(self, prompts, completions, columns):
        """(B,) rewards on the world's device."""
        scores = self.reward(prompts, completions, **columns)
        if len(scores) != len(completions):
            raise ValueError(f"the reward function gave {len(scores)} scores for {len(completions)} completions")
        return torch.tensor(scores, dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def complete(self, policy, prompts, greedy=False):
        """Let a policy complete prompts.

        Args:
            policy: a TokenPolicy, or another with its generate.
            prompts: list of B strings.
            greedy: take the most probable token instead of sampling.
        Returns:
            (obs, actions, mask, completions, ended): three (B, T) tensors, B strings without the end token, and (B,)
            bool, whether a completion ended by itself.
        """
        prompt_ids = [self.tokenizer.encode(prompt) for prompt in prompts]
        responses, ended = self.go_on(policy, prompt_ids, [[] for _ in prompts], greedy)
        completions = self.texts(responses)
        obs, actions, mask = (x.to(self.device) for x in pack_rows(prompt_ids, responses, self.tokenizer.pad_id))
        return obs, actions, mask, completions, torch.tensor(ended, dtype=torch.bool, device=self.device)

    @torch.no_grad()
    def go_on(self, policy, prompt_ids, begun, greedy=False):
        """Let a policy go on with responses that have begun, up to max_new_tokens in all.

        Args:
            policy: as in `complete`.
            prompt_ids, begun: lists of B id lists; none of `begun` ended or is full.
            greedy: as in `complete`.
        Returns:
            (responses, ended): B whole responses as id lists, and B bools.
        """
        eos, pad = self.tokenizer.eos_id, self.tokenizer.pad_id
        rows = [list(p) + list(r) for p, r in zip(prompt_ids, begun, strict=True)]
        width = max(map(len, rows))
        padded = [[pad] * (width - len(ids)) + ids for ids in rows]
        real = [[0] * (width - len(ids)) + [1] * len(ids) for ids in rows]
        new = policy.generate(
            torch.tensor(padded, dtype=torch.long, device=self.device),
            self.max_new_tokens - min(map(len, begun)), greedy=greedy,
            attention_mask=torch.tensor(real, dtype=torch.long, device=self.device), eos_id=eos, pad_id=pad,
        )[:, width:]  # fmt: skip
        responses, ended = [], []
        for start, row in zip(begun, new.tolist(), strict=True):
            row = (list(start) + row)[: self.max_new_tokens]
            ended.append(eos in row)
            responses.append(row[: row.index(eos) + 1] if ended[-1] else row)
        return responses, ended

    def texts(self, responses):
        """The texts of id lists, without their end tokens."""
        eos = self.tokenizer.eos_id
        return [self.tokenizer.decode(row[:-1] if row[-1:] == [eos] else row) for row in responses]

    @torch.no_grad()
    def evaluate(self, policy, count=None, seed=0, reference=None):
        """Judge a policy on held-out prompts, greedy and sampled, without touching any other random stream.

        Args:
            policy: as in `complete`.
            count: prompts; None for all.
            seed: of the sampling.
            reference: measure the KL to this policy; None for the world's own.
        Returns:
            (metrics, samples). metrics: for each judge the means `NAME_greedy` and `NAME_sampled`; `kl_policy_ref`
            (nats per completion: the exact KL(policy‖reference) of every token of the sampled completions, summed; left
            out without a reference), `response_length` (tokens), `ended_fraction`. samples: dicts with `prompt`,
            `completion` (greedy), `score` (of the first judge) and the task's columns. (ControlWorld's evaluate, which
            has no texts to show, returns a dict of metrics alone.)
        """
        prompts, columns = self.task.held_out(count)
        reference = reference or self.reference
        devices = [self.device] if torch.device(self.device).type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(seed)
            obs, _, mask, sampled, ended = self.complete(policy, prompts)
            *_, greedy, _ = self.complete(policy, prompts, greedy=True)
            if reference is not None:  # a policy that keeps its dropout draws here, too
                kl = masked_sum(kl_divergence(policy(obs), reference(obs)), mask, dim=1)
        metrics, scores = {}, {}
        for name, judge in (self.judges or {"score": self.reward}).items():
            scores[name] = judge(prompts, greedy, **columns)
            metrics[f"{name}_greedy"] = sum(scores[name]) / len(prompts)
            metrics[f"{name}_sampled"] = sum(judge(prompts, sampled, **columns)) / len(prompts)
        metrics |= {
            "response_length": float(mask.sum(1).float().mean()),
            "ended_fraction": float(ended.float().mean()),
        }
        if reference is not None:
            metrics["kl_policy_ref"] = float(masked_mean(kl, torch.ones_like(kl)))
        samples = [
            {name: column[index] for name, column in columns.items()}
            | {"prompt": prompt, "completion": completion, "score": score}
            for index, (prompt, completion, score) in enumerate(
                zip(prompts, greedy, next(iter(scores.values())), strict=True)
            )
        ]
        return metrics, samples

    def state_dict(self):
        """The position in the stream of prompts."""
        return {"generator": self.generator.get_state(), "waiting": self.waiting}

    def load_state_dict(self, state):
        """Take back what state_dict gave."""
        self.generator.set_state(state["generator"].cpu())
        self.waiting = state["waiting"].cpu()
