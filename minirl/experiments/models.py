"""How models, reward models and samples lie in a folder.

A run that ends in a language model keeps it in OUT/model: GPT-2's config.json and model.safetensors, which other
libraries load too, and minirl_tokenizer.json, which says by name and fingerprint what vocabulary its ids mean. A reward
model lies in OUT/reward_model: the same for its trunk, and head.safetensors with its scalar head, mean and deviation;
the guide of Q# lies in OUT/guide, with its head and the outcomes that it knows.

    gpt, tokenizer = load_model("runs/sft")
"""

import copy
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from minirl.algorithms.q_sharp import OutcomeModel
from minirl.algorithms.reward_model import LearnedReward, RewardModel
from minirl.checkpoint import replacing
from minirl.models.gpt import GPT
from minirl.models.policies import TokenCritic, TokenPolicy
from minirl.models.tokenizer import default_tokenizer, named_tokenizer
from minirl.worlds.text import allowed_ids

COMMITTED = Path(__file__).resolve().parents[2] / "data" / "models"


def save_model(folder, gpt, tokenizer):
    """Write gpt and the identity of its tokenizer to folder/model."""
    write_language_model(Path(folder) / "model", gpt, tokenizer)


def write_language_model(folder, gpt, tokenizer):
    """Write gpt and the identity of its tokenizer to this very folder."""
    gpt.save_pretrained(folder)
    with replacing(folder / "minirl_tokenizer.json") as temporary:
        identity = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint}
        temporary.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")


def load_model(path, device="cpu"):
    """The model that a run wrote, and its tokenizer.

    Args:
        path: a run's folder, or a model folder itself. One without minirl_tokenizer.json is taken for OpenAI's GPT-2.
        device: where the model goes.
    Returns:
        (gpt, tokenizer).
    Raises:
        FileNotFoundError: if there is no model.
        ValueError: if the tokenizer of this name has another vocabulary than the one the model was trained with.
    """
    path = Path(path)
    folder = path / "model" if (path / "model").is_dir() else path
    if not all((folder / name).is_file() for name in ("config.json", "model.safetensors")):  # a run has the first, too
        nearby = ", ".join(map(str, models_nearby(path.name)))
        raise FileNotFoundError(f"no model in {path}; {f'there are {nearby} (--init), or ' if nearby else ''}"
                                "make one with python -m minirl pretrain, then sft")
    gpt = GPT.from_pretrained(folder)
    saved = tokenizer_identity(folder)
    if saved is None:
        return gpt.to(device), named_tokenizer("gpt2")
    tokenizer = default_tokenizer()
    if saved["name"] != tokenizer.name:
        tokenizer = named_tokenizer(saved["name"])
    if saved["fingerprint"] != tokenizer.fingerprint:
        raise ValueError(
            f"{folder} was trained with another vocabulary called {saved['name']!r} (fingerprint "
            f"{saved['fingerprint'][:12]}, here {tokenizer.fingerprint[:12]}); its ids would mean other text"
        )
    return gpt.to(device), tokenizer


def tokenizer_identity(folder):
    """Name and fingerprint of a model's vocabulary; None if nothing says them."""
    for name in ("minirl_tokenizer.json", "tokenizer.json"):  # the second of older runs; Hugging Face's says neither
        path = folder / name
        if path.is_file() and "fingerprint" in (found := json.loads(path.read_text(encoding="utf-8"))):
            return found
    return None


def models_nearby(name, most=4):
    """Up to `most` folders with a model, in runs/ and of those in the repository; the ones called `name` first."""
    runs = [file.parents[1] for file in Path("runs").glob("**/model/model.safetensors")]
    ours = [file.parent for file in COMMITTED.glob("*/model.safetensors")]
    ours = [folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder for folder in ours]
    return sorted([*sorted(runs), *sorted(ours)], key=lambda folder: folder.name != name)[:most]


def write_samples(folder, **samples):
    """Write lists of sample completions to folder/samples.json, by name (`before`, `after`)."""
    with replacing(Path(folder) / "samples.json") as temporary:
        temporary.write_text(json.dumps(samples, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def policy_and_reference(gpt, tokenizer, temperature=1.0):
    """(policy, reference): a TokenPolicy of this GPT, and a frozen copy of it as it is now."""
    allowed = allowed_ids(tokenizer, gpt.wte.weight.device)
    reference = TokenPolicy(copy.deepcopy(gpt), temperature, allowed).requires_grad_(False)
    return TokenPolicy(gpt, temperature, allowed), reference


def save_reward_model(folder, reward):
    """Write a LearnedReward to folder/reward_model."""
    folder, critic = Path(folder) / "reward_model", reward.model.critic
    write_language_model(folder, critic.trunk, reward.tokenizer)
    numbers = {name: torch.tensor(getattr(reward, name), dtype=torch.float64) for name in ("mean", "std")}
    with replacing(folder / "head.safetensors") as temporary:
        save_file({name: tensor.contiguous() for name, tensor in critic.head.state_dict().items()} | numbers, temporary)


def load_reward_model(path, device="cpu"):
    """The LearnedReward that python -m minirl reward-model wrote to a run's folder.

    Raises:
        FileNotFoundError, ValueError: as `load_model`.
    """
    folder = Path(path) / "reward_model"
    if not (folder / "head.safetensors").is_file():
        raise FileNotFoundError(f"no reward model in {path}; make one with python -m minirl reward-model")
    trunk, tokenizer = load_model(folder, device)
    critic, head = TokenCritic(trunk).to(device), load_file(folder / "head.safetensors")
    mean, std = float(head.pop("mean")), float(head.pop("std"))
    critic.head.load_state_dict(head)
    return LearnedReward(RewardModel(critic), tokenizer, mean, std)


def save_guide(folder, outcome, tokenizer):
    """Write an OutcomeModel to folder/guide."""
    folder = Path(folder) / "guide"
    write_language_model(folder, outcome.trunk, tokenizer)
    with replacing(folder / "head.safetensors") as temporary:
        save_file({"weight": outcome.head.weight.detach().contiguous(), "support": outcome.support}, temporary)


def load_guide(path, device="cpu"):
    """The OutcomeModel that python -m minirl q-sharp wrote to a run's folder."""
    folder = Path(path) / "guide"
    if not (folder / "head.safetensors").is_file():
        raise FileNotFoundError(f"no guide in {path}; make one with python -m minirl q-sharp")
    head = load_file(folder / "head.safetensors")
    outcome = OutcomeModel(load_model(folder)[0], head.pop("support"))
    outcome.head.load_state_dict(head)
    return outcome.to(device)
