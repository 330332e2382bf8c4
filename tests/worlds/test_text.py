"""The text world: where prompts end, where scores land, and that nothing it measures disturbs what it trains."""

import copy
import math

import pytest
import torch
from torch.distributions import Categorical

from minirl.functional.kl import categorical_kl
from minirl.functional.returns import gae
from minirl.models.policies import TokenPolicy
from minirl.models.tokenizer import END, PAD, Tokenizer
from minirl.worlds.rewards import WeightedRewards
from minirl.worlds.text import TokenWorld, allowed_ids, encode_rows, pack_completions, pack_rows


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected, atol=1e-12):
    expected = tensor(expected) if isinstance(expected, (list, float, int)) else expected
    torch.testing.assert_close(found, expected, rtol=0, atol=atol)


# ---- rows of ids


@pytest.mark.parametrize(
    "prompt, response, obs, mask, joint",
    [("xa", "b", [120, 97, 98], [0, 1, 1], [120, 256]), ("a", "bc", [97, 98, 99], [1, 1, 1], [257])],
)
def test_no_token_straddles_the_seam(prompt, response, obs, mask, joint):
    # bytes, and two merges that would swallow the seam: ab -> 256, abc -> 257
    ranks = {bytes([i]): i for i in range(256)} | {b"ab": 256, b"abc": 257}
    toy = Tokenizer("toy", r"[\s\S]+", ranks, {END: 258, PAD: 259})
    assert toy.encode(prompt + response) == joint
    rows = pack_rows(*encode_rows(toy, [prompt], [response]), toy.pad_id)
    assert [x.tolist() for x in rows] == [[obs], [obs[1:] + [258]], [[bool(m) for m in mask]]]


def test_rows_are_shifted_once_and_padded_on_the_right():
    obs, actions, mask = pack_rows([[1, 2], [3]], [[4, 5, 9], [9]], pad_id=9)
    assert obs.tolist() == [[1, 2, 4, 5], [3, 9, 9, 9]]
    assert actions.tolist() == [[2, 4, 5, 9], [9, 9, 9, 9]]
    assert mask.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert obs.is_contiguous() and actions.is_contiguous() and obs.dtype == torch.long and mask.dtype == torch.bool


def test_an_empty_response_has_no_actions():
    assert pack_rows([[1, 2], [1]], [[], [2, 3]], 0)[2].tolist() == [[False, False], [True, True]]


def test_rows_that_cannot_be_packed():
    with pytest.raises(ValueError, match="prompts has 2 rows, but responses has 1"):
        pack_rows([[1], [2]], [[3]], 0)
    for prompts, responses in (([[1], []], [[2], [3]]), ([], [])):
        with pytest.raises(ValueError, match="a prompt is empty"):
            pack_rows(prompts, responses, 0)


def test_texts_are_packed_with_their_end(letters):
    records = pack_completions(letters, ["a", "bc"], ["d", ""])
    assert records.obs.tolist() == [[0, 3], [1, 2]] and records.actions.tolist() == [[3, 8], [2, 8]]
    assert records.mask.tolist() == [[True, True], [False, True]]


def test_all_ids_but_padding_are_allowed(letters):
    assert allowed_ids(letters).tolist() == [True] * 9 + [False]
    letters.pad_id = letters.eos_id  # as in published encodings: then the end must stay possible
    assert allowed_ids(letters).all()


# ---- collecting


class Scripted:
    """Says what it is told; every token has log-probability −1."""

    def __init__(self, responses):
        self.responses = torch.tensor(responses)

    def generate(self, ids, max_new_tokens, attention_mask, **options):
        self.ids, self.attention_mask, self.options = ids, attention_mask, options
        return torch.cat([ids, self.responses], 1)

    def __call__(self, obs):
        return Constant(-1.0)


class Constant:
    """Gives every action one log-probability, or the one at its place in a table."""

    def __init__(self, value):
        self.value = value

    def log_prob(self, actions):
        return torch.zeros_like(actions, dtype=torch.float64) + self.value


class Asked:
    """A task with the given prompts."""

    def __init__(self, *prompts):
        self.prompts = list(prompts)

    def sample(self, n, generator):
        return self.prompts, {}


def scripted_world(letters, prompts, responses, scores, **settings):
    seen = {}

    def reward(prompts, completions):
        seen.update(prompts=prompts, completions=completions)
        return scores

    world = TokenWorld(Asked(*prompts), letters, reward, 5, **settings)
    policy = Scripted(responses)
    return world.collect(policy), policy, seen


A, END_ID, PAD_ID = 0, 8, 9
RESPONSES = [[A, 1, END_ID, PAD_ID, PAD_ID], [A, 1, 2, 3, 4], [END_ID, PAD_ID, PAD_ID, PAD_ID, PAD_ID]]


def test_score_and_flags_land_on_the_last_real_token(letters):
    # B09: [t0, t1, END, PAD, PAD], a row that fills all five columns, and one that ends at once
    batch, _, seen = scripted_world(letters, ["a", "b", "c"], RESPONSES, [1.0, 2.0, 3.0])
    assert batch.obs.shape == (3, 5) and batch.mask.sum(1).tolist() == [3, 5, 1]
    assert batch.rewards.tolist() == [[0, 0, 1, 0, 0], [0, 0, 0, 0, 2], [3, 0, 0, 0, 0]]
    last = [[0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]
    assert batch.terminated.long().tolist() == last
    assert batch.truncated.long().tolist() == [[0] * 5, last[1], [0] * 5]
    assert seen == {"prompts": ["a", "b", "c"], "completions": ["ab", "abcde", ""]}
    assert batch.metrics == {"score": 2, "response_length": 3, "ended_fraction": pytest.approx(2 / 3), "tokens": 9}
    assert batch.rows_are_sequences and batch.max_length == 5 and batch.kl_in_reward == 0
    assert batch.scores.tolist() == [1, 2, 3] and batch.values is batch.next_values is batch.ref_logprobs is None


def test_token_penalties_and_advantages_of_a_completion(letters):
    # log-ratio to the reference 0.2, −0.1, 0.3 at β 0.1, values 0, γ 1, λ 0.95; beyond the end it may be anything
    ratio = tensor([[0.2, -0.1, 0.3, 5.0, -7.0]] * 3)
    batch, _, _ = scripted_world(
        letters, ["a", "b", "c"], RESPONSES, [1.0, 1.0, 1.0],
        reference=lambda obs: Constant(-1 - ratio), kl_in_reward=0.1,
    )
    close(batch.rewards[0], [-0.02, 0.01, 0.97, 0, 0], 1e-12)
    close(batch.ref_logprobs, -1 - ratio)
    assert batch.kl_in_reward == 0.1
    zeros = torch.zeros_like(batch.rewards)
    advantages, _ = gae(batch.rewards, zeros, zeros, batch.terminated, batch.truncated, 1.0, 0.95)
    close(advantages[0], [0.864925, 0.9315, 0.97, 0, 0], 1e-6)


def test_a_missing_end_is_penalised(letters):
    batch, _, _ = scripted_world(letters, ["a", "b", "c"], RESPONSES, [1.0, 2.0, 3.0], missing_end_penalty=0.5)
    assert batch.scores.tolist() == [1, 1.5, 3] and batch.rewards[1].tolist() == [0, 0, 0, 0, 1.5]


def test_prompts_of_unequal_length_are_padded_on_the_left_for_sampling_only(letters):
    batch, policy, _ = scripted_world(letters, ["fgh", "b"], RESPONSES[:2], [0.0, 0.0])
    assert policy.ids.tolist() == [[5, 6, 7], [9, 9, 1]] and policy.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert policy.options == {"greedy": False, "eos_id": 8, "pad_id": 9}
    assert batch.obs.tolist() == [[5, 6, 7, 0, 1], [1, 0, 1, 2, 3]]
    assert batch.actions.tolist() == [[6, 7, 0, 1, 8], [0, 1, 2, 3, 4]]
    assert batch.mask.long().tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]


def test_each_prompt_has_its_group_in_neighbouring_rows(make_text):
    world, policy, _ = make_text(group_size=3)
    batch = world.collect(policy)  # the task's reward checks that columns stay with their prompts
    assert batch.obs.shape[0] == 12 and batch.group_size == 3
    firsts = batch.obs[:, 0].view(4, 3)
    assert (firsts == firsts[:, :1]).all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_each_row_by_itself(make_text, temperature):
    world, policy, critic = make_text(temperature=temperature)
    batch = world.collect(policy, critic)
    assert not ((batch.actions == PAD_ID) & batch.mask).any() and batch.logprobs.isfinite().all()
    for row in range(len(batch.mask)):
        length = int(batch.mask[row].nonzero().max()) + 1
        ids = batch.obs[row : row + 1, :length].clone()
        for found, gpt in ((batch.logprobs, policy.gpt), (batch.ref_logprobs, world.reference.gpt)):
            logits = gpt(ids)[0] / temperature
            logits[:, PAD_ID] = -math.inf
            wanted = logits.log_softmax(-1).gather(1, batch.actions[row, :length, None]).squeeze(1)
            keep = batch.mask[row, :length]
            close(found[row, :length][keep], wanted[keep].detach(), 1e-10)
        close(batch.values[row, :length], critic(ids)[0].detach(), 1e-10)


def test_next_values_are_the_values_one_token_on(make_text):
    world, policy, critic = make_text()
    batch = world.collect(policy, critic)
    assert torch.equal(batch.next_values[:, :-1], batch.values[:, 1:]) and not batch.next_values[:, -1].any()
    assert batch.values.any() and not batch.values.requires_grad and not batch.logprobs.requires_grad


def test_sampling_follows_the_policy(make_text):
    # the first token of 2,000 completions of one prompt against its probabilities
    world, policy, _ = make_text(temperature=0.7, group_size=2000, prompts_per_batch=1)
    torch.manual_seed(0)
    batch = world.collect(policy)
    column = int(batch.mask[0].long().argmax())
    found = batch.actions[:, column].bincount(minlength=10) / 2000
    with torch.no_grad():
        wanted = policy(batch.obs[:1]).probs[0, column]
    assert (found - wanted).abs().max() < 4 * math.sqrt(0.25 / 2000)


def test_the_world_refuses_what_makes_no_sense(letters):
    with pytest.raises(ValueError, match="there is no reference"):
        TokenWorld(Asked("a"), letters, None, 5, kl_in_reward=0.1)
    for scores in ([1.0], [1.0, 1.0]):
        with pytest.raises(ValueError, match=f"gave {len(scores)} scores for 3 completions"):
            scripted_world(letters, ["a", "b", "c"], RESPONSES, scores)


def test_the_stream_of_prompts_is_seeded_and_saved(make_text):
    def prompts(world, policy):
        return world.collect(policy).obs[:, 0].tolist()

    world, policy, _ = make_text(prompts_per_batch=30)
    first = prompts(world, policy)
    state = copy.deepcopy(world.state_dict())
    second = prompts(world, policy)
    other, _, _ = make_text(prompts_per_batch=30)
    assert prompts(other, policy) == first != second
    another = TokenWorld(world.task, world.tokenizer, world.reward, 5, group_size=2, prompts_per_batch=30, seed=1)
    assert prompts(another, policy) != first
    another.load_state_dict(state)
    assert prompts(another, policy) == second


# ---- epochs of prompts


class Numbered:
    """A task of `count` prompts that can be asked one by one; a column says each prompt's number."""

    names = [a + b for a in "abcdefgh" for b in "abcdefgh"]

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def ask(self, indices):
        return [self.names[index] for index in indices], {"number": list(indices)}

    def sample(self, n, generator):
        return self.ask(torch.randint(self.count, (n,), generator=generator).tolist())


def numbers_asked(world, batches):
    """The numbers of the next prompts, batch after batch in one list; checks that columns stay with their prompts."""
    numbers = []
    for _ in range(batches):
        prompts, columns = world.next_prompts()
        assert prompts == [Numbered.names[number] for number in columns["number"]]
        numbers += columns["number"]
    return numbers


def epochs_world(count, size, seed=0, **settings):
    return TokenWorld(Numbered(count), None, None, 5, prompts_per_batch=size, seed=seed, **settings)


@pytest.mark.parametrize(("count", "size"), [(12, 4), (12, 5), (7, 7), (3, 10), (5, 1)])
def test_every_prompt_is_asked_once_per_epoch(count, size):
    # in batches that divide an epoch, straddle two, are one, are several, or are single prompts
    asked = numbers_asked(epochs_world(count, size), 3 * count)  # 3 · size epochs
    epochs = [asked[first : first + count] for first in range(0, len(asked), count)]
    assert len(epochs) == 3 * size and all(sorted(epoch) == list(range(count)) for epoch in epochs)
    if count > 3:
        assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != list(range(count))


def test_epochs_are_seeded():
    asked = numbers_asked(epochs_world(30, 4), 20)
    assert asked == numbers_asked(epochs_world(30, 4), 20) != numbers_asked(epochs_world(30, 4, seed=1), 20)


def test_a_group_is_one_prompt_of_the_epoch():
    asked = numbers_asked(epochs_world(6, 3, group_size=2), 2)
    assert asked[::2] == asked[1::2] and sorted(asked[::2]) == list(range(6))


def test_an_epoch_goes_on_where_it_was_saved():
    world = epochs_world(11, 4)
    numbers_asked(world, 2)
    state = copy.deepcopy(world.state_dict())
    assert len(state["waiting"]) == 3  # 11 − 2 · 4
    wanted = numbers_asked(world, 9)
    other = epochs_world(11, 4, seed=9)
    numbers_asked(other, 1)
    other.load_state_dict(state)
    assert numbers_asked(other, 9) == wanted
    assert len(state["waiting"]) == 3  # what was saved is not consumed


def test_without_reshuffling_prompts_are_drawn_with_replacement():
    # 12 of 12 with replacement are all different with probability 12!/12^12 = 5e-5 only, 20 times over never
    world = epochs_world(12, 12, reshuffle=False)
    batches = [numbers_asked(world, 1) for _ in range(20)]
    assert all(len(set(batch)) < 12 for batch in batches) and set(sum(batches, [])) == set(range(12))
    assert not len(world.state_dict()["waiting"])
    assert batches[0] == Numbered(12).sample(12, torch.Generator().manual_seed(0))[1]["number"]


def test_a_task_that_cannot_be_asked_is_sampled(make_text):
    assert not make_text()[0].reshuffle and epochs_world(3, 1).reshuffle


# ---- rewards of steps, and of several parts


def test_rewards_of_steps_lie_where_the_steps_end(letters):
    # a letter is a token: steps after 1 letter (0.5) and at the row's end (2); after 2 and 4 letters, and at the end
    # of a row that has no end token; and one step in a row that is its end token alone
    steps = [[(1, 0.5), (2, 2.0)], [(2, 1.0), (4, -1.0), (5, 0.25)], [(0, 3.0)]]

    def step_rewards(prompts, completions):
        assert prompts == ["a", "b", "c"] and completions == ["ab", "abcde", ""]
        return steps

    batch, _, _ = scripted_world(letters, ["a", "b", "c"], RESPONSES, [9.0, 8.0, 7.0], step_rewards=step_rewards)
    assert batch.step_rewards.tolist() == [[0.5, 0, 2, 0, 0], [0, 1, 0, -1, 0.25], [3, 0, 0, 0, 0]]
    assert batch.step_ends.long().tolist() == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 1], [1, 0, 0, 0, 0]]
    assert batch.rewards.sum(1).tolist() == [9, 8, 7]  # the outcome is another matter


def test_steps_stand_behind_prompts_of_unequal_length(letters):
    batch, _, _ = scripted_world(
        letters, ["fgh", "b"], RESPONSES[:2], [0.0, 0.0],
        step_rewards=lambda prompts, completions: [[(1, 1.0), (2, 2.0)], [(3, 3.0), (5, 4.0)]],
    )  # fmt: skip
    # actions are g h a b END and a b c d e
    assert batch.step_rewards.tolist() == [[0, 0, 1, 0, 2], [0, 0, 3, 0, 4]]
    assert batch.step_ends.long().tolist() == [[0, 0, 1, 0, 1], [0, 0, 1, 0, 1]]


def test_steps_get_their_columns_in_groups(make_text):
    world, policy, _ = make_text(group_size=3)

    def step_rewards(prompts, completions, first):
        assert [prompt[0] for prompt in prompts] == first and len(completions) == 12
        return [[(len(text), 1.0)] for text in completions]

    world.step_rewards = step_rewards
    batch = world.collect(policy)
    assert torch.equal(batch.step_ends, batch.terminated) and batch.step_rewards.sum() == 12
    assert (batch.step_rewards == batch.step_ends).all()
    world.step_rewards = None
    assert world.collect(policy).step_rewards is None


def test_parts_of_a_reward_are_logged(letters):
    reward = WeightedRewards({
        "length": (2.0, lambda prompts, texts: [float(len(text)) for text in texts]),
        "empty": (0.0, lambda prompts, texts: [float(not text) for text in texts]),
    })  # fmt: skip
    world = TokenWorld(Asked("a", "b", "c"), letters, reward, 5)
    batch = world.collect(Scripted(RESPONSES))
    # completions of 2, 5 and 0 letters: scores 4, 10, 0; the parts are means without weights
    assert batch.scores.tolist() == [4, 10, 0]
    assert batch.metrics["reward_length"] == pytest.approx(7 / 3) and batch.metrics["reward_empty"] == 1 / 3
    assert batch.metrics["score"] == pytest.approx(14 / 3)


# ---- going on


def test_going_on_by_hand(letters):
    # five tokens in all: [0] may get four more, [1, 2, 3] two; what is drawn beyond that is cut, as is what follows END
    world = TokenWorld(Asked(), letters, None, 5)
    new = [[4, 5, END_ID, PAD_ID], [6, 7, END_ID, PAD_ID], [6, END_ID, PAD_ID, PAD_ID], [4, 5, 6, 7]]
    policy, asked = Scripted(new), {}
    generate = policy.generate
    policy.generate = lambda ids, count, **options: asked.update(count=count) or generate(ids, count, **options)
    responses, ended = world.go_on(policy, [[0, 1], [2], [3], [4, 5, 6]], [[0], [1, 2, 3], [], [7]], greedy=True)
    assert responses == [[0, 4, 5, END_ID], [1, 2, 3, 6, 7], [6, END_ID], [7, 4, 5, 6, 7]]
    assert ended == [True, False, True, False] and policy.options["greedy"]
    assert asked["count"] == 5  # for the row that has not begun
    assert policy.ids.tolist() == [[9, 0, 1, 0], [2, 1, 2, 3], [9, 9, 9, 3], [4, 5, 6, 7]]
    assert policy.attention_mask.tolist() == [[0, 1, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1], [1, 1, 1, 1]]
    assert world.texts(responses) == ["aef", "bcdgh", "g", "hefgh"]
    policy.responses = policy.responses[:1, :3]
    world.go_on(policy, [[0]], [[1, 2]])
    assert asked["count"] == 3  # no more than can be used


def test_going_on_greedily_repeats_the_whole(make_text):
    # cut a greedy response anywhere: the rest is the same, whatever stands beside it
    world, policy, _ = make_text()
    prompts = [[0], [6, 7], [2, 0, 1], [5]]
    whole, ended = world.go_on(policy, prompts, [[]] * 4, greedy=True)
    for cut in ([0, 1, 2, 3], [3, 0, 1, 2], [1, 1, 1, 1]):
        begun = [row[: min(c, len(row) - 1)] for row, c in zip(whole, cut, strict=True)]
        assert world.go_on(policy, prompts, begun, greedy=True) == (whole, ended)
        assert all(len(row) <= 5 for row in whole)


def test_going_on_keeps_what_was_begun(make_text):
    world, policy, _ = make_text()
    begun = [[0, 1], [], [3, 3, 3, 3], [2]]
    torch.manual_seed(1)
    responses, ended = world.go_on(policy, [[0], [6, 7], [1], [5]], begun)
    for start, row, end in zip(begun, responses, ended, strict=True):
        assert row[: len(start)] == start and len(start) < len(row) <= 5
        assert end == (row[-1] == END_ID) and END_ID not in row[:-1] and (end or len(row) == 5)


# ---- evaluating


def test_evaluation_leaves_no_trace(make_text):
    world, policy, _ = make_text(dropout=0.3)
    policy.train()
    random, prompts = torch.get_rng_state(), world.generator.get_state()
    first, samples = world.evaluate(policy)
    assert torch.equal(torch.get_rng_state(), random) and torch.equal(world.generator.get_state(), prompts)
    assert policy.training and policy.gpt.training
    torch.rand(7)
    assert world.evaluate(policy) == (first, samples)
    assert world.evaluate(policy, seed=1)[0] != first


def test_evaluation_measures_what_it_says(make_text):
    world, policy, _ = make_text()
    world.reward = lambda prompts, texts, first: [sum(map(ord, text)) for text in texts]
    metrics, samples = world.evaluate(policy, count=2, seed=3)
    prompts = ["bb", "e"]
    assert [sample["prompt"] for sample in samples] == prompts and [s["first"] for s in samples] == ["b", "e"]
    torch.manual_seed(3)
    obs, _, mask, sampled, ended = world.complete(policy, prompts)
    *_, greedy, _ = world.complete(policy, prompts, greedy=True)
    assert [sample["completion"] for sample in samples] == greedy
    score = {name: world.reward(prompts, texts, first=["b", "e"]) for name, texts in (("g", greedy), ("s", sampled))}
    assert [sample["score"] for sample in samples] == score["g"] and sum(score["g"]) != sum(score["s"])
    assert metrics["score_greedy"] == sum(score["g"]) / 2 and metrics["score_sampled"] == sum(score["s"]) / 2
    assert metrics["response_length"] == mask.sum() / 2 and metrics["ended_fraction"] == ended.float().mean()
    kl = categorical_kl(policy.logits(obs), world.reference.logits(obs)) * mask
    assert abs(metrics["kl_policy_ref"] - kl.sum() / 2) < 1e-10 and metrics["kl_policy_ref"] > 0.01


def test_judges_measure_side_by_side(make_text):
    world, policy, _ = make_text()

    def longest(prompts, texts, first):
        assert first == [prompt[0] for prompt in prompts]
        return [len(text) for text in texts]

    world.judges = {"length": longest, "as": lambda prompts, texts, first: [text.count("a") for text in texts]}
    metrics, samples = world.evaluate(policy, seed=3)
    prompts = ["bb", "e", "hag"]
    torch.manual_seed(3)
    sampled = world.complete(policy, prompts)[3]
    greedy = world.complete(policy, prompts, greedy=True)[3]
    for kind, texts in (("greedy", greedy), ("sampled", sampled)):
        assert metrics[f"length_{kind}"] == sum(map(len, texts)) / 3
        assert metrics[f"as_{kind}"] == sum(text.count("a") for text in texts) / 3
    assert not any(name.startswith("score") for name in metrics)  # the reward is no judge here
    assert [sample["score"] for sample in samples] == [len(text) for text in greedy]  # the first judge's


def test_columns_of_a_samples_own_names_give_way(make_text):
    # a file may have columns called so; the judge gets them, the sample shows what the policy wrote and what it earned
    world, policy, _ = make_text()

    def held_out(n=None):
        return ["bb", "e"], {"completion": ["gold b", "gold e"], "score": [-7, -8], "hint": ["x", "y"]}

    def judge(prompts, texts, completion, score, hint):
        assert completion == ["gold b", "gold e"] and score == [-7, -8]
        return [float(len(text)) for text in texts]

    world.task.held_out, world.judges = held_out, {"length": judge}
    _, samples = world.evaluate(policy)
    greedy = world.complete(policy, ["bb", "e"], greedy=True)[3]
    assert samples == [
        {"prompt": prompt, "completion": text, "score": float(len(text)), "hint": hint}
        for prompt, text, hint in zip(["bb", "e"], greedy, ["x", "y"], strict=True)
    ]


def test_evaluation_leaves_no_trace_where_dropout_is_kept(make_text):
    world, policy, _ = make_text(dropout=0.3)
    policy.train().keep_dropout = True
    random = torch.get_rng_state()
    first = world.evaluate(policy)
    assert torch.equal(torch.get_rng_state(), random) and world.evaluate(policy) == first


def test_kl_to_the_reference(make_text):
    world, policy, _ = make_text()
    assert world.evaluate(policy, reference=copy.deepcopy(policy))[0]["kl_policy_ref"] == 0
    world, policy, _ = make_text(reference=False)
    assert "kl_policy_ref" not in world.evaluate(policy)[0]


def test_greedy_takes_the_likeliest_token(make_text):
    world, policy, _ = make_text()
    obs, actions, mask, _, _ = world.complete(policy, ["a", "gh"], greedy=True)
    assert torch.equal(policy.mode(obs)[mask], actions[mask])


# ---- the policy's side of it


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_slices_of_columns_are_refused(make_text, rows, kind):
    _, policy, critic = make_text()
    model, ids = {"policy": policy, "critic": critic}[kind], torch.randint(8, (rows, 6))
    for column in (1, 3, 5):
        with pytest.raises(ValueError, match="slice of columns"):
            model(ids[:, column:])
    inside = torch.cat([ids.new_zeros(4), ids.flatten()])[4:].view(rows, 6)
    for whole in (ids, ids[:, :4], ids[rows - 1 :], ids[rows - 1 :, :4], ids[::2], inside, inside[0, 1:].unsqueeze(0)):
        model(whole)
    for wrong in (ids[0], ids.double(), ids.unsqueeze(2)):
        with pytest.raises(ValueError, match=r"obs has shape .* it must be \(B, T\) token ids"):
            model(wrong)


def test_a_distribution_has_no_dropout_and_leaves_the_mode_alone(make_text):
    _, policy, critic = make_text(dropout=0.5)
    ids = torch.randint(8, (2, 6))
    for model, value in ((policy, lambda: policy(ids).logits), (critic, lambda: critic(ids)),
                         (policy, lambda: policy.mode(ids))):
        for mode in (True, False):
            model.train(mode)
            assert torch.equal(value(), value())
            assert all(module.training is mode for module in model.modules())
    policy.train()
    assert not torch.equal(policy.logits(ids), policy.logits(ids))  # what supervised losses use
    with pytest.raises(ValueError):
        policy(ids[0])
    assert policy.gpt.training  # also after an error


def test_the_distribution_is_tempered_and_forbids(make_gpt, letters):
    policy = TokenPolicy(make_gpt(), 0.5, allowed_ids(letters))
    ids = torch.randint(8, (2, 6))
    wanted = policy.gpt(ids) / 0.5
    wanted[..., PAD_ID] = -math.inf
    found = policy(ids)
    close(found.probs, wanted.softmax(-1), 1e-14)
    assert not found.probs[..., PAD_ID].any() and isinstance(found, Categorical)
    assert found.entropy().isfinite().all()
    for temperature in (0, -1.0):
        with pytest.raises(ValueError, match=f"temperature is {temperature}"):
            TokenPolicy(policy.gpt, temperature)
