"""From settings to a text world: the task, who rewards, who judges, the policy, its reference and its critic."""

import copy

import torch

from minirl.experiments.models import load_model, load_reward_model, policy_and_reference
from minirl.models.policies import TokenCritic
from minirl.worlds.jsonl import FilePrompts
from minirl.worlds.reviews import Reviews
from minirl.worlds.rewards import (
    WeightedRewards,
    each,
    ending_reward,
    includes_reward,
    length_reward,
    off_vocabulary_rate,
)
from minirl.worlds.text import TokenWorld
from minirl.worlds.verifiers import answer_reward, format_reward

RULES = {  # a reward of 1 for a text that keeps all of them
    "asked": (1 / 3, each(includes_reward, "asked")),
    "length": (1 / 3, each(length_reward, low=8, high=20)),
    "ending": (1 / 3, each(ending_reward)),
}


def judges_of(task, settings, reward):
    """What an evaluation measures: dict name -> reward function; the reward itself first."""
    if task == "reviews":
        return {"score": reward} if settings.data else {"score": reward, "true_score": Reviews().reward}
    judges = {"accuracy": each(answer_reward, "gold")}
    return judges | ({"format": each(format_reward)} if thinks(settings) else {})


def reward_of(task, settings, device):
    """The reward function that settings ask for, on their task; its LearnedReward, or None, comes with it."""
    learned = None
    if task == "arithmetic":
        parts = {"accuracy": (settings.reward_scale, each(answer_reward, "gold"))}
        if thinks(settings):  # a weight of 0 only watches
            parts["format"] = (settings.format_weight * settings.reward_scale, each(format_reward))
            alphabet = settings.arithmetic.task().alphabet
            parts["off_vocabulary"] = (0.0, each(off_vocabulary_rate, vocabulary=alphabet))
        return WeightedRewards(parts), learned
    if settings.reward == "learned":
        learned = load_reward_model(settings.reward_model, device)
        return WeightedRewards({"learned": (settings.reward_scale, learned)}), learned
    if settings.reward == "rules":
        return WeightedRewards({name: (w * settings.reward_scale, rule) for name, (w, rule) in RULES.items()}), learned
    return WeightedRewards({"true": (settings.reward_scale, Reviews().reward)}), learned


def critic_of(gpt, learned, scale, device):
    """A TokenCritic that starts from the policy's trunk, or, given a LearnedReward, as that reward in its own units."""
    if learned is None:
        return TokenCritic(copy.deepcopy(gpt)).to(device)
    critic = copy.deepcopy(learned.model.critic).requires_grad_(True)
    with torch.no_grad():
        critic.head.weight *= scale / learned.std
        critic.head.bias.copy_((critic.head.bias - learned.mean) * scale / learned.std)
    return critic.to(device)


def set_dropout(gpt, rate):
    """Give a GPT a dropout rate, whatever it had."""
    for module in gpt.modules():
        if hasattr(module, "dropout"):
            module.dropout = rate
    gpt.config = copy.copy(gpt.config)
    object.__setattr__(gpt.config, "dropout", rate)


def text_setup(task, settings, seed, device):
    """(world, policy, make_critic) of a text task; the policy starts from `init`, and so does its frozen reference.

    Raises:
        ValueError, FileNotFoundError: if a model or a file is missing or does not fit.
    """
    if settings.init is None:
        raise ValueError("init is None; give --init a run to start from")
    gpt, tokenizer = load_model(settings.init, device)
    policy, reference = policy_and_reference(gpt, tokenizer, settings.temperature)
    if settings.keep_dropout:
        set_dropout(gpt, settings.keep_dropout)
        policy.keep_dropout = True
        policy.train()  # a loaded model is in eval mode, where it has none
    made = settings.arithmetic.task() if task == "arithmetic" else Reviews()
    longest = settings.max_new_tokens or made.max_new_tokens
    if settings.data:
        made = check_data(settings, task)
        prompts = made.ask(range(len(made)))[0] + made.held_out()[0]
        read, room = max(len(tokenizer.encode(prompt)) for prompt in prompts), gpt.config.block_size
        if read >= room:
            raise ValueError(f"{settings.data}: a prompt has {read} tokens; the model takes at most {room - 1}")
        longest = settings.max_new_tokens or room - read
    reward, learned = reward_of(task, settings, device)
    world = TokenWorld(
        made, tokenizer, reward, longest, reference=reference, kl_in_reward=settings.kl_coef,
        group_size=settings.group_size, prompts_per_batch=settings.prompts_per_batch,
        missing_end_penalty=settings.missing_end_penalty, seed=seed, device=device, reshuffle=settings.reshuffle,
        step_rewards=getattr(made, "step_rewards", None) if wants_steps(task, settings) else None,
        judges=judges_of(task, settings, reward),
    )  # fmt: skip
    starts_as = learned if getattr(settings, "critic_from", "policy") == "reward-model" else None
    return world, policy, lambda: critic_of(gpt, starts_as, settings.reward_scale, device)


def check_data(settings, task):
    """The FilePrompts of `settings.data`, None without; ValueError if nothing here can reward a text on them."""
    if settings.data is None:
        return None
    made = FilePrompts(settings.data)
    known = settings.reward == "learned" if task == "reviews" else "gold" in made.ask([0])[1]
    if not known:
        raise ValueError(f"{settings.data} has prompts of your own; their reward is --reward learned on --task "
                         "reviews, or a column gold on --task arithmetic")
    return made


def thinks(settings):
    """Whether answers are wanted in think and answer tags."""
    return settings.arithmetic.format == "think" or settings.format_weight > 0


def wants_steps(task, settings):
    """Whether the world should reward reasoning steps: on sums that are thought through."""
    return task == "arithmetic" and settings.arithmetic.format == "think" and not settings.data
