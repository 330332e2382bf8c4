"""From settings to worlds: critics that start as reward models, rules, judges, dropout, and what text_setup joins."""

import copy
import json

import pytest
import torch

from minirl.algorithms.reward_model import LearnedReward, RewardModel
from minirl.experiments.models import save_model, save_reward_model
from minirl.experiments.settings import ArithmeticSettings, ReviewsSettings, SumsSettings
from minirl.experiments.tasks import critic_of, judges_of, reward_of, set_dropout, text_setup, thinks, wants_steps
from minirl.models.policies import TokenCritic
from minirl.models.tokenizer import default_tokenizer
from minirl.worlds.jsonl import FilePrompts
from minirl.worlds.reviews import Reviews
from minirl.worlds.rows import encode_rows, pack_rows

PROMPTS = ["Write on the film!", "Write about the book:", "Please see the game:"]
TEXTS = [" I loved it.", " The book was really dull. Go away.", ""]
THINK = ArithmeticSettings(terms=2, format="think", held_out=10)


def tiny(make_gpt, seed=0, **changes):
    return make_gpt(torch.float32, seed, **{"vocab_size": 512, "block_size": 64, **changes}).eval()


@pytest.fixture
def learned(make_gpt):
    """A LearnedReward whose mean and deviation are far from 0 and 1."""
    critic = TokenCritic(tiny(make_gpt, seed=1))
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.normal_(critic.head.bias)
    return LearnedReward(RewardModel(critic), default_tokenizer(), mean=1.75, std=0.4)


@pytest.fixture
def start(tmp_path, make_gpt):
    """A run's folder with a model."""
    save_model(tmp_path / "sft", tiny(make_gpt), default_tokenizer())
    return tmp_path / "sft"


# ---- critics


@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_a_critic_starts_as_the_normalised_reward(make_gpt, learned, scale):
    before = copy.deepcopy(learned.model.critic.state_dict())
    critic = critic_of(tiny(make_gpt), learned, scale, "cpu")
    for prompt, text in zip(PROMPTS, TEXTS, strict=True):
        # one row by itself: its ids in full, end token last, so that the last value is the one after it
        prompt_ids, response_ids = encode_rows(default_tokenizer(), [prompt], [text])
        value = critic(torch.tensor([prompt_ids[0] + response_ids[0]]))[0, -1].item()
        raw = learned.raw([prompt], [text])[0]
        assert value == pytest.approx(scale * (raw - 1.75) / 0.4, abs=2e-5)
        assert value == pytest.approx(scale * learned([prompt], [text])[0], abs=2e-5)
    assert all(torch.equal(value, before[name]) for name, value in learned.model.critic.state_dict().items())


def test_a_critic_learns_and_leaves_the_reward_alone(make_gpt, learned):
    learned.model.critic.requires_grad_(False)  # frozen or not
    scores = learned(PROMPTS, TEXTS)
    critic = critic_of(tiny(make_gpt), learned, 1.0, "cpu")
    assert all(parameter.requires_grad for parameter in critic.parameters())
    critic(torch.tensor([[1, 2, 3]])).sum().backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter += 1.0
    assert learned(PROMPTS, TEXTS) == scores


def test_without_a_reward_model_a_critic_starts_from_the_policys_trunk(make_gpt):
    gpt = tiny(make_gpt)
    critic, ids = critic_of(gpt, None, 3.0, "cpu"), torch.tensor([[1, 2, 3]])
    assert not critic(ids).any()  # says 0 everywhere
    assert critic.trunk is not gpt and torch.equal(critic.trunk.hidden(ids), gpt.hidden(ids))


# ---- dropout


def test_dropout_is_set_everywhere_and_there_only(make_gpt):
    gpt, ids = tiny(make_gpt, n_layer=2), torch.arange(12).view(1, 12)
    other, shared = copy.deepcopy(gpt), gpt.config  # a config may belong to several models
    set_dropout(gpt, 0.25)
    assert gpt.config.dropout == 0.25 and other.config.dropout == shared.dropout == 0.0
    rates = [module.dropout for module in gpt.modules() if hasattr(module, "dropout")]
    assert rates == [0.25] * 4  # attention and MLP of each block
    assert torch.equal(gpt(ids), other(ids))  # in eval mode
    assert not torch.equal(gpt.train()(ids), other(ids)) and torch.equal(other.train()(ids), gpt.eval()(ids))
    set_dropout(gpt, 0.0)
    assert torch.equal(gpt.train()(ids), gpt.eval()(ids))


def test_kept_dropout_is_on_in_the_policy_alone(start):
    settings = SumsSettings(init=start, keep_dropout=0.5, arithmetic=ArithmeticSettings(terms=2, held_out=10))
    world, policy, make_critic = text_setup("arithmetic", settings, 0, "cpu")
    ids = torch.arange(12).view(1, 12)
    assert not torch.equal(policy(ids).logits, policy(ids).logits)  # also of a model that was saved without dropout
    critic = make_critic()
    torch.nn.init.normal_(critic.head.weight)
    for still in (lambda: world.reference(ids).logits, lambda: critic(ids), lambda: policy.mode(ids)):
        assert torch.equal(still(), still())
    assert world.reference.gpt.config.dropout == 0.0
    state = torch.get_rng_state()
    first = world.evaluate(policy, 3)
    assert torch.equal(torch.get_rng_state(), state) and world.evaluate(policy, 3) == first


def test_no_dropout_unless_it_is_asked_for(start):
    world, policy, _ = text_setup("arithmetic", SumsSettings(init=start), 0, "cpu")
    assert not policy.keep_dropout and policy.gpt.config.dropout == 0.0
    ids = torch.arange(12).view(1, 12)
    assert torch.equal(policy(ids).logits, world.reference(ids).logits)


# ---- rewards and judges


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (" The film was great. I loved it. That is all.", 3),                 # 10 words, names the film, ends
        (" The film was great.", 2),                                          # 4 words: too short
        (" The book was great. I loved it. That is all.", 2),                 # another topic
        (" The film was great. I loved it. That is all. and then", 2),        # breaks off
        (" I loved it. and then", 0),                                         # 5 words, no film, breaks off
        ("", 0),
        (" film" * 20 + ".", 3),                                              # 20 words are not too many, and
        (" film" * 21 + ".", 2),                                              # 21 are
    ],
)  # fmt: skip
def test_rules_are_worth_a_third_each(text, kept):
    for scale in (1.0, 10.0):
        reward, learned = reward_of("reviews", ReviewsSettings(reward="rules", reward_scale=scale), "cpu")
        assert learned is None
        assert reward(["Write on the film!"], [text], asked=["film"]) == pytest.approx([scale * kept / 3], abs=1e-14)
    assert reward.parts.keys() == {"asked", "length", "ending"}
    assert sum(reward.parts.values()) == kept  # without weights


def test_the_true_reward_is_scaled():
    reward, _ = reward_of("reviews", ReviewsSettings(reward="true", reward_scale=3.0), "cpu")
    # cheerful about the film 1.5 and unknown −1, times 3
    assert reward(["Write on the film!"] * 2, [" The film was great.", " Hm."], asked=["film"] * 2) == [4.5, -3.0]
    assert reward.parts == {"true": 0.25}


def test_the_learned_reward_is_scaled(tmp_path, learned):
    save_reward_model(tmp_path, learned)
    reward, found = reward_of("reviews", ReviewsSettings(reward_model=tmp_path, reward_scale=2.0), "cpu")
    assert isinstance(found, LearnedReward) and (found.mean, found.std) == (1.75, 0.4)
    assert reward(PROMPTS, TEXTS, asked=["film", "book", "game"]) == [2 * s for s in learned(PROMPTS, TEXTS)]
    with pytest.raises(FileNotFoundError, match="no reward model"):
        reward_of("reviews", ReviewsSettings(reward_model=tmp_path / "nowhere"), "cpu")


def test_sums_are_rewarded_for_answers():
    reward, learned = reward_of("arithmetic", SumsSettings(reward_scale=10.0), "cpu")
    assert learned is None and reward(["3+4="] * 2, ["7", "8"], gold=[7, 7]) == [10.0, 0.0]
    assert reward.parts == {"accuracy": 0.5}


def test_thoughtful_sums_are_rewarded_for_their_form_too():
    settings = SumsSettings(arithmetic=THINK, format_weight=0.2, reward_scale=10.0)
    reward, _ = reward_of("arithmetic", settings, "cpu")
    texts = ["<think>3+4=7</think><answer>7</answer>", "<think>3+4=8</think><answer>8</answer>", "7", "seven"]
    # answer 10, form 0.2 · 10
    assert reward(["3+4="] * 4, texts, gold=[7] * 4) == pytest.approx([12.0, 2.0, 10.0, 0.0], abs=1e-12)
    # of `seven` every piece is none of the task's, of the others none: 1/4, with a weight of 0
    assert reward.parts == {"accuracy": 0.5, "format": 0.5, "off_vocabulary": 0.25}


def test_judges_say_more_than_the_reward():
    settings = ReviewsSettings(reward="rules")
    judges = judges_of("reviews", settings, "the reward")
    assert list(judges) == ["score", "true_score"] and judges["score"] == "the reward"
    assert judges["true_score"](["Write on the film!"], [" The film was great."], asked=["film"]) == [1.5]
    assert judges_of("reviews", ReviewsSettings(data="mine.jsonl"), "the reward") == {"score": "the reward"}
    direct, think = SumsSettings(), SumsSettings(arithmetic=THINK)
    assert list(judges_of("arithmetic", direct, None)) == ["accuracy"]
    judges = judges_of("arithmetic", think, None)
    assert list(judges) == ["accuracy", "format"]
    texts = ["<think>3+4=7</think><answer>7</answer>", "7"]
    assert judges["accuracy"](["3+4="] * 2, texts, gold=[7, 7]) == [1.0, 1.0]
    assert judges["format"](["3+4="] * 2, texts, gold=[7, 7]) == [1.0, 0.0]


def test_who_thinks():
    direct, think, rewarded = SumsSettings(), SumsSettings(arithmetic=THINK), SumsSettings(format_weight=0.1)
    assert [thinks(s) for s in (direct, think, rewarded)] == [False, True, True]
    assert wants_steps("arithmetic", think) and not wants_steps("arithmetic", direct)
    assert not wants_steps("arithmetic", SumsSettings(arithmetic=THINK, data="mine.jsonl"))
    assert not wants_steps("reviews", ReviewsSettings())


# ---- the whole


def test_a_world_of_reviews(start, tmp_path, learned):
    save_reward_model(tmp_path / "rm", learned)
    settings = ReviewsSettings(
        init=start, reward_model=tmp_path / "rm", prompts_per_batch=3, group_size=2, max_new_tokens=6,
        reward_scale=2.0, kl_coef=0.05, temperature=0.8, missing_end_penalty=0.5,
    )  # fmt: skip
    world, policy, make_critic = text_setup("reviews", settings, 7, "cpu")
    critic = make_critic()
    torch.manual_seed(0)
    batch = world.collect(policy, critic)
    assert batch.obs.shape[0] == 6 and batch.group_size == 2 and batch.kl_in_reward == 0.05 and batch.max_length == 6
    assert policy.temperature == world.reference.temperature == 0.8
    assert torch.equal(batch.logprobs, batch.ref_logprobs)  # both start from the same model
    texts, prompts = [], []
    for row in range(6):
        prompt = batch.obs[row, : int(batch.mask[row].long().argmax()) + 1].tolist()
        prompts.append(default_tokenizer().decode(prompt))
        texts.append(world.texts([batch.actions[row, batch.mask[row]].tolist()])[0])
    ended = ~batch.truncated.any(1)
    wanted = torch.tensor(learned(prompts, texts)) * 2 - 0.5 * (~ended).float()
    torch.testing.assert_close(batch.scores, wanted, rtol=0, atol=1e-4)
    raw = sum(learned(prompts, texts)) / 6
    assert batch.metrics["reward_learned"] == pytest.approx(raw, abs=1e-4)  # without its weight
    assert batch.step_rewards is None
    # as the reward model in its own units: after the whole row and its end, that is the reward
    ids = [p + r for p, r in zip(*encode_rows(default_tokenizer(), prompts[:1], texts[:1]), strict=True)]
    assert critic(torch.tensor(ids))[0, -1].item() == pytest.approx(2 * learned(prompts[:1], texts[:1])[0], abs=1e-4)
    metrics, samples = world.evaluate(policy, 4)
    assert {"score_greedy", "score_sampled", "true_score_greedy", "true_score_sampled"} <= metrics.keys()
    assert metrics["kl_policy_ref"] == 0 and len(samples) == 4
    held_out = Reviews().held_out(4)[0]
    truth = Reviews().reward(held_out, [sample["completion"] for sample in samples])
    assert metrics["true_score_greedy"] == sum(truth) / 4


def test_a_critic_from_the_policy_where_that_is_wanted(start, tmp_path, learned):
    save_reward_model(tmp_path / "rm", learned)
    settings = ReviewsSettings(init=start, reward_model=tmp_path / "rm", critic_from="policy")
    world, policy, make_critic = text_setup("reviews", settings, 0, "cpu")
    assert not make_critic()(torch.tensor([[1, 2]])).any()
    rules = ReviewsSettings(init=start, reward="rules")  # there is no reward model to start from
    assert not text_setup("reviews", rules, 0, "cpu")[2]()(torch.tensor([[1, 2]])).any()
    assert world.max_new_tokens == Reviews.max_new_tokens and world.reshuffle


def test_a_world_of_thoughtful_sums_rewards_steps(start):
    settings = SumsSettings(init=start, arithmetic=THINK, prompts_per_batch=4, reshuffle=False)
    world, policy, _ = text_setup("arithmetic", settings, 0, "cpu")
    torch.manual_seed(0)
    batch = world.collect(policy)
    # an untrained model keeps no form: each row is one step, which ends with the row
    assert torch.equal(batch.step_ends, batch.terminated) and not batch.step_rewards.any()
    assert {"reward_accuracy", "reward_format", "reward_off_vocabulary"} <= batch.metrics.keys()
    assert not world.reshuffle
    plain = SumsSettings(init=start, prompts_per_batch=4)
    assert text_setup("arithmetic", plain, 0, "cpu")[0].collect(policy).step_ends is None


def test_prompts_of_ones_own(start, tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"{a}+{b}=", "gold": a + b} for a in range(5) for b in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    world, _, _ = text_setup("arithmetic", SumsSettings(init=start, data=path), 0, "cpu")
    assert isinstance(world.task, FilePrompts) and list(world.judges) == ["accuracy"]
    # a digit, +, a digit and = are a token each, and the model reads 64
    assert world.max_new_tokens == 64 - 4
    world, _, _ = text_setup("arithmetic", SumsSettings(init=start, data=path, max_new_tokens=9), 0, "cpu")
    assert world.max_new_tokens == 9


def test_seeds_order_the_prompts(start):
    def prompts(seed):
        return text_setup("arithmetic", SumsSettings(init=start, prompts_per_batch=8), seed, "cpu")[0].next_prompts()

    assert prompts(0) == prompts(0) != prompts(1)


def test_where_there_is_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="no model"):
        text_setup("reviews", ReviewsSettings(init=tmp_path), 0, "cpu")


def test_the_critic_reads_the_rows_of_a_world(make_gpt, learned):
    # padding on the right changes nothing: packed rows of unequal length, each read after its last real token
    packed = pack_rows(*encode_rows(default_tokenizer(), PROMPTS, TEXTS), default_tokenizer().pad_id)
    critic = critic_of(tiny(make_gpt), learned, 2.0, "cpu")
    values = RewardModel(critic).score(*packed)
    torch.testing.assert_close(values, 2 * torch.tensor(learned(PROMPTS, TEXTS)), rtol=0, atol=2e-5)
