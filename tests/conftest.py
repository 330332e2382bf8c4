"""What the tests share: one thread, a skip where there is no CUDA device, and small models and worlds to act with."""

import pytest
import torch

from minirl.models.gpt import GPT, GPTConfig
from minirl.models.policies import GaussianPolicy, TokenCritic, TokenPolicy, ValueNetwork
from minirl.worlds.batch import Batch
from minirl.worlds.text import TokenWorld, allowed_ids

torch.set_num_threads(1)  # tensors this small are slower on several threads, and other processes want the cores too


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


class Letters:
    """A tokenizer of eight letters, an end token and padding."""

    eos_id, pad_id, vocab_size = 8, 9, 10

    def encode(self, text):
        return ["abcdefgh".index(letter) for letter in text]

    def decode(self, ids):
        return "".join("abcdefgh."[index] for index in ids)


class LettersTask:
    """Prompts of one to three letters; the reward is the share of `a` among the letters of the completion."""

    prompts = ["a", "bc", "def", "gh", "cab", "f"]

    def sample(self, n, generator):
        return self._asked([self.prompts[i] for i in torch.randint(6, (n,), generator=generator, device="cpu")])

    def held_out(self, n=None):
        return self._asked(["bb", "e", "hag"][:n])

    def _asked(self, prompts):
        return prompts, {"first": [prompt[0] for prompt in prompts]}

    def reward(self, prompts, completions, first, **columns):
        assert [prompt[0] for prompt in prompts] == first, "columns do not belong to their prompts"
        return [completion.count("a") / max(1, len(completion)) for completion in completions]


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def make_gpt():
    """A small GPT with weights large enough to matter; other settings by keyword."""

    def make(dtype=torch.float64, seed=0, std=0.3, **changes):
        torch.manual_seed(seed)
        sizes = dict(vocab_size=10, block_size=12, n_layer=1, n_head=2, n_embd=8)
        gpt = GPT(GPTConfig(**{**sizes, **changes})).to(dtype)
        with torch.no_grad():
            for parameter in gpt.parameters():
                parameter += std * torch.randn_like(parameter)
        return gpt

    return make


@pytest.fixture
def make_text(make_gpt):
    """(world, policy, critic) of the letters task; the world's reference is another policy."""

    def make(dtype=torch.float64, dropout=0.0, temperature=1.0, device="cpu", reference=True, seed=0, **world):
        allowed = allowed_ids(Letters(), device)
        policy = TokenPolicy(make_gpt(dtype, seed, dropout=dropout).to(device), temperature, allowed)
        frozen = TokenPolicy(make_gpt(dtype, seed + 1, dropout=dropout).to(device), temperature, allowed)
        critic = TokenCritic(make_gpt(dtype, seed + 2, dropout=dropout)).to(dtype).to(device)
        torch.nn.init.normal_(critic.head.weight)  # a fresh critic says 0 everywhere
        task = LettersTask()
        settings = dict(group_size=2, prompts_per_batch=4, device=device, reference=frozen if reference else None)
        return TokenWorld(task, Letters(), task.reward, 5, **{**settings, **world}), policy, critic

    return make


@pytest.fixture
def make_control():
    """(batch, policy, critic) as of four walkers with five steps each, and whole episodes of unequal length."""

    def make(dtype=torch.float64, device="cpu", seed=0, episodes=False):
        generator = torch.Generator().manual_seed(seed)
        torch.manual_seed(seed)
        policy = GaussianPolicy(3, 2, hidden=(8,)).to(dtype).to(device)
        critic = ValueNetwork(3, hidden=(8,)).to(dtype).to(device)
        obs = torch.randn(4, 6, 3, generator=generator, dtype=dtype).to(device)
        rewards, scores = torch.randn(4, 5, generator=generator, dtype=dtype).to(device), torch.zeros(4, device=device)
        terminated = torch.zeros(4, 5, dtype=torch.bool, device=device)
        truncated, mask = terminated.clone(), ~terminated
        terminated[1, 2] = truncated[2, 4] = truncated[3, 1] = True
        if episodes:
            truncated[0, 4] = True
            mask[1, 3:] = mask[3, 2:] = False
            scores = torch.where(mask, rewards, 0).sum(1)
        with torch.no_grad():
            distribution = policy(obs[:, :5])
            actions = distribution.sample()
            batch = Batch(
                obs=obs[:, :5], actions=actions, logprobs=distribution.log_prob(actions), rewards=rewards,
                scores=scores, terminated=terminated, truncated=truncated, mask=mask,
                values=critic(obs[:, :5]), next_values=critic(obs[:, 1:]), max_length=5,
                group_size=2 if episodes else 1,
            )  # fmt: skip
        return batch, policy, critic

    return make


@pytest.fixture
def foreign_default_device():
    """New tensors land on no device: whoever forgets to say where a tensor belongs is found out on a CPU already."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
