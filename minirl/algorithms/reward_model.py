"""Reward model: a score for whole answers, learned from which of two was preferred, and then used as a reward.

    P(y_w ≻ y_l | x) = σ( r(x, y_w) − r(x, y_l) )                                        Bradley and Terry 1952
    L(φ) = −E[ log σ( r_φ(x, y_w) − r_φ(x, y_l) ) ]                         InstructGPT (Ouyang et al. 2022), eq. 1

r_φ is a GPT with one scalar per position, read at the last real token of the answer, the only one that has seen all of
it. The loss knows differences only, so a constant can be added to every score: `centering` holds their mean near 0
while training, and LearnedReward.calibrate sets it afterwards, as InstructGPT does with its demonstrations.

Left out against the paper: K = 4 to 9 ranked answers per prompt with weight 1/(K choose 2); every pair stands alone.
"""

import statistics
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minirl.algorithms.optimize import Stateful, trainable
from minirl.algorithms.settings import NonNegative, Positive, Settings
from minirl.functional.masked import check_same_shape
from minirl.worlds.rows import encode_rows, pack_rows


@dataclass(frozen=True)
class RewardModelConfig(Settings):
    """Settings of the reward model's training."""

    lr: NonNegative = 2e-3
    """AdamW step size (InstructGPT, appendix C: 9e-6 for a model of 6 billion parameters)."""
    lr_decay: bool = True
    """Let the step size fall to 0 over the run (InstructGPT: to a tenth, along a cosine)."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this norm."""
    centering: NonNegative = 0.01
    """Weight of the squared sum of a pair's scores (Eisenstein et al. 2023: 0.01; InstructGPT: 0)."""


def bradley_terry_loss(chosen_scores, rejected_scores, margin=None, centering=0.0):
    """Logistic loss of the difference of two scores.

        L = mean( −log σ(r_w − r_l − m) ) + c mean( (r_w + r_l)² )

    InstructGPT (Ouyang et al. 2022), eq. 1, for m = c = 0; m: Llama 2 (Touvron et al. 2023), eq. 2, larger where the
    preference is clearer; c: Eisenstein et al. 2023.

    Args:
        chosen_scores, rejected_scores: (B,) in units of reward; carry the gradient.
        margin: (B,) in units of reward, how far apart the scores should be at least; a constant. None for 0.
        centering: c, holds the mean score near 0.
    Returns:
        (loss, stats): a scalar in nats per pair, and the means over pairs `loss`, `accuracy` (chosen has the higher
        score, whatever the margin; a tie is half), `margin` (r_w − r_l), `score_mean` (of all 2B scores), and `count`
        (pairs).
    Raises:
        ValueError: if the shapes differ or are not (B,).
    """
    check_same_shape(chosen_scores=chosen_scores, rejected_scores=rejected_scores, margin=margin)
    if chosen_scores.dim() != 1:
        raise ValueError(f"chosen_scores has shape {tuple(chosen_scores.shape)}; it must be (B,), one score per answer")
    difference, total = chosen_scores - rejected_scores, chosen_scores + rejected_scores
    wanted = difference if margin is None else difference - margin.detach()
    loss = -F.logsigmoid(wanted).mean() + centering * total.square().mean()
    means = {"accuracy": (1 + difference.sign()) / 2, "margin": difference, "score_mean": total / 2}
    stats = {"loss": loss.detach()} | {name: value.detach().mean() for name, value in means.items()}
    return loss, stats | {"count": torch.ones_like(total, dtype=torch.long).sum()}


class RewardModel(Stateful):
    """A TokenCritic that scores whole answers, trained on Pairs; training.fit drives it.

    Args:
        critic: TokenCritic; the model takes it over.
        config: RewardModelConfig.
    """

    def __init__(self, critic, config=None):
        self.critic, self.config = critic, config or RewardModelConfig()
        self.optimizer = torch.optim.AdamW(trainable(critic), lr=self.config.lr, weight_decay=self.config.weight_decay)

    def score(self, obs, actions, mask):
        """r(x, y) of whole rows: the critic's value *after* the last token that counts.

        Args:
            obs, actions: (B, T) ids as pack_rows gives them.
            mask: (B, T), 1 on the answer. Where it ends the answer ends, whatever the ids of the padding are.
        Returns:
            (B,) in units of reward.
        Raises:
            ValueError: if the shapes differ, or a row has no token that counts.
        """
        check_same_shape(obs=obs, actions=actions, mask=mask)
        ids = torch.cat([obs[:, :1], actions], dim=1)  # (B, T + 1): obs alone lacks the last token
        column = torch.arange(1, ids.shape[1], device=ids.device)  # actions[:, t] stands in column t + 1 of ids
        last = (mask.bool() * column).amax(1)  # (B,)
        if not last.all():
            raise ValueError(f"row {int((last == 0).nonzero()[0])} of mask is empty; an answer has at least one token")
        return self.critic(ids).gather(1, last.unsqueeze(1)).squeeze(1)

    def loss(self, pairs):
        """(loss, stats) of Pairs."""
        chosen, rejected = (self.score(side.obs, side.actions, side.mask) for side in (pairs.chosen, pairs.rejected))
        return bradley_terry_loss(chosen, rejected, getattr(pairs, "margin", None), self.config.centering)


class LearnedReward:
    """A reward model as the reward function of a text world: (r(x, y) − mean) / std.

    Text becomes ids here exactly as in training (encode_rows): an end token closes every answer, also one that did not
    end by itself; punishing that is the world's missing_end_penalty. An answer too long for the critic is cut, its end
    token kept.

    Args:
        model: RewardModel.
        tokenizer: the critic's own.
        mean, std: of the raw scores, see calibrate.
        batch_size: answers scored at a time.
    Raises:
        ValueError: if std or batch_size is not positive.
    """

    def __init__(self, model, tokenizer, mean=0.0, std=1.0, batch_size=256):
        if not std > 0 or batch_size < 1:
            raise ValueError(f"std is {std} and batch_size {batch_size}; both must be positive")
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.mean, self.std = mean, std

    def __call__(self, prompts, completions, **columns):
        """Normalised scores of completions, a list of floats; columns of the task are not looked at."""
        return [(score - self.mean) / self.std for score in self.raw(prompts, completions)]

    @torch.no_grad()
    def raw(self, prompts, completions):
        """r(x, y) of completions before mean and std.

        Args:
            prompts, completions: lists of strings of equal length.
        Returns:
            list of floats; empty lists give an empty list.
        Raises:
            ValueError: if the lists differ in length, or a prompt leaves no room for an end token.
        """
        critic = self.model.critic
        device, limit = critic.head.weight.device, critic.trunk.config.block_size
        rows = []
        for prompt, response in zip(*encode_rows(self.tokenizer, prompts, completions), strict=True):
            room = limit - len(prompt)
            if room < 1:
                raise ValueError(f"a prompt has {len(prompt)} tokens; the reward model reads {limit}, end included")
            rows.append((prompt, response if len(response) <= room else response[: room - 1] + response[-1:]))
        scores = []
        for first in range(0, len(rows), self.batch_size):
            packed = pack_rows(*zip(*rows[first : first + self.batch_size], strict=True), self.tokenizer.pad_id)
            scores += self.model.score(*(tensor.to(device) for tensor in packed)).tolist()
        return scores

    def calibrate(self, scores):
        """Take mean and sample deviation from a list of raw scores; a deviation of 1 where they do not vary."""
        self.mean = statistics.fmean(scores)
        deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
        noise = 1e-6 * max(1.0, *(abs(score) for score in scores))  # what equal scores differ by in float32
        self.std = deviation if deviation > noise else 1.0
