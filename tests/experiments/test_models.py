"""What lies in a run's folder, and that it comes back as it was."""

import json
import statistics

import pytest
import torch
from safetensors.torch import load_file

from minirl.algorithms.q_sharp import OutcomeModel
from minirl.algorithms.reward_model import LearnedReward, RewardModel
from minirl.experiments.models import (
    load_guide,
    load_model,
    load_reward_model,
    policy_and_reference,
    save_guide,
    save_model,
    save_reward_model,
    write_language_model,
    write_samples,
)
from minirl.models.policies import TokenCritic
from minirl.models.tokenizer import default_tokenizer

PROMPTS = ["Write on the film!", "Write about the book:", "Please see the game:"]
TEXTS = [" I loved it.", " The book was really dull. Go away.", ""]


@pytest.fixture
def gpt(make_gpt):
    return make_gpt(torch.float32, vocab_size=512, block_size=48, dropout=0.1).eval()


@pytest.fixture
def learned(gpt):
    """A LearnedReward with a head that says something, calibrated."""
    critic = TokenCritic(gpt)
    torch.nn.init.normal_(critic.head.weight)
    torch.nn.init.normal_(critic.head.bias)
    reward = LearnedReward(RewardModel(critic), default_tokenizer())
    reward.calibrate(reward.raw(PROMPTS, TEXTS))
    return reward


IDS = torch.randint(512, (3, 11), generator=torch.Generator().manual_seed(0))


# ---- language models


def test_a_language_model_comes_back(tmp_path, gpt):
    save_model(tmp_path, gpt, default_tokenizer())
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == [
        "config.json", "minirl_tokenizer.json", "model.safetensors",
    ]  # fmt: skip
    for path in (tmp_path, str(tmp_path), tmp_path / "model"):
        found, tokenizer = load_model(path)
        assert torch.equal(found(IDS), gpt(IDS)) and found.config == gpt.config
        assert tokenizer is default_tokenizer()


def test_saving_replaces_what_was_there(tmp_path, make_gpt, gpt):
    save_model(tmp_path, gpt, default_tokenizer())
    other = make_gpt(torch.float32, vocab_size=512, block_size=16, n_layer=2, seed=5).eval()
    save_model(tmp_path, other, default_tokenizer())
    found, _ = load_model(tmp_path)
    assert found.config == other.config and torch.equal(found(IDS), other(IDS))
    assert len(list((tmp_path / "model").iterdir())) == 3


def test_where_there_is_no_model(tmp_path):
    (tmp_path / "config.json").write_text('{"settings": {}}', encoding="utf-8")  # a run that was stopped leaves this
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no model in .*minirl pretrain"):
            load_model(path)


def test_models_nearby_are_named_the_one_of_that_name_first(tmp_path, gpt, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("minirl.experiments.models.COMMITTED", tmp_path / "data")
    with pytest.raises(FileNotFoundError, match="no model in runs/sft; make one with python -m minirl pretrain"):
        load_model("runs/sft")
    for run in ("a", "b/ppo", "b/sft", "c"):
        save_model(tmp_path / "runs" / run, gpt, default_tokenizer())
    write_language_model(tmp_path / "data" / "sft", gpt, default_tokenizer())
    nearby = "there are runs/b/sft, data/sft, runs/a, runs/b/ppo [(]--init[)], or make"
    with pytest.raises(FileNotFoundError, match=nearby):
        load_model("runs/sft")


def test_another_vocabulary_of_the_same_name_is_refused(tmp_path, gpt):
    save_model(tmp_path, gpt, default_tokenizer())
    path = tmp_path / "model" / "minirl_tokenizer.json"
    identity = json.loads(path.read_text(encoding="utf-8"))
    assert identity == {"name": default_tokenizer().name, "fingerprint": default_tokenizer().fingerprint}
    path.write_text(json.dumps(identity | {"fingerprint": "0" * 64}), encoding="utf-8")
    with pytest.raises(ValueError, match="another vocabulary called 'minirl-512'.*000000000000, here"):
        load_model(tmp_path)
    path.write_text(json.dumps(identity | {"name": "somebody's"}), encoding="utf-8")
    with pytest.raises(ValueError, match='no encoding is named "somebody\'s"'):
        load_model(tmp_path)


def test_a_folder_without_tokenizer_is_gpt2s(tmp_path, gpt, monkeypatch):
    write_language_model(tmp_path, gpt, default_tokenizer())
    path = tmp_path / "minirl_tokenizer.json"
    path.unlink()
    monkeypatch.setattr("minirl.experiments.models.named_tokenizer", lambda name: f"the encoding {name}")
    assert load_model(tmp_path)[1] == "the encoding gpt2"
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"vocab": {}}}', encoding="utf-8")
    assert load_model(tmp_path)[1] == "the encoding gpt2"  # Hugging Face's file of this name


def test_the_file_of_older_runs_is_read_and_not_written_under_the_name_of_hugging_faces(tmp_path, gpt):
    write_language_model(tmp_path, gpt, default_tokenizer())
    assert not (tmp_path / "tokenizer.json").exists()  # there Hugging Face's AutoTokenizer expects its own content
    (tmp_path / "minirl_tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert load_model(tmp_path)[1] is default_tokenizer()


def test_a_policy_and_its_frozen_reference(gpt):
    policy, reference = policy_and_reference(gpt, default_tokenizer(), 0.7)
    assert policy.gpt is gpt and policy.temperature == reference.temperature == 0.7
    assert torch.equal(policy(IDS).logits, reference(IDS).logits)
    assert not policy(IDS).probs[..., default_tokenizer().pad_id].any()
    before = reference(IDS).logits
    with torch.no_grad():
        gpt.wte.weight += 0.3
    assert torch.equal(reference(IDS).logits, before) and not torch.equal(policy(IDS).logits, before)
    assert not any(p.requires_grad for p in reference.parameters()) and all(p.requires_grad for p in gpt.parameters())


# ---- reward models


def test_a_reward_model_comes_back(tmp_path, learned):
    save_reward_model(tmp_path, learned)
    found = load_reward_model(tmp_path)
    assert (found.mean, found.std) == (learned.mean, learned.std) != (0.0, 1.0)  # to the last bit of a float
    assert found.raw(PROMPTS, TEXTS) == learned.raw(PROMPTS, TEXTS)
    scores = found(PROMPTS, TEXTS)
    assert scores == learned(PROMPTS, TEXTS) and len(set(scores)) == 3
    # calibrated on these very texts: mean 0 and sample deviation 1
    assert statistics.fmean(scores) == pytest.approx(0, abs=1e-12) and statistics.stdev(scores) == pytest.approx(1)
    assert found.tokenizer is default_tokenizer()


def test_a_reward_model_without_calibration_comes_back(tmp_path, learned):
    learned.mean, learned.std = 0.0, 1.0
    save_reward_model(tmp_path, learned)
    assert load_reward_model(str(tmp_path))(PROMPTS, TEXTS) == learned.raw(PROMPTS, TEXTS)


def test_a_reward_models_folder(tmp_path, learned):
    save_reward_model(tmp_path, learned)
    folder = tmp_path / "reward_model"
    assert {p.name for p in folder.iterdir()} == {
        "config.json", "model.safetensors", "minirl_tokenizer.json", "head.safetensors",
    }  # fmt: skip
    assert load_file(folder / "head.safetensors").keys() == {"weight", "bias", "mean", "std"}
    trunk = learned.model.critic.trunk.eval()  # it has dropout
    assert torch.equal(load_model(folder)[0].hidden(IDS), trunk.hidden(IDS))


def test_where_there_is_no_reward_model(tmp_path, gpt):
    save_model(tmp_path, gpt, default_tokenizer())  # a language model is none
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match="no reward model in .*minirl reward-model"):
            load_reward_model(path)


# ---- guides


@pytest.mark.parametrize("support", [[0.0, 1.0], [-1.5, 0.0, 0.25, 2.0]])
def test_a_guide_comes_back(tmp_path, gpt, support):
    outcome = OutcomeModel(gpt, support)
    torch.nn.init.normal_(outcome.head.weight)
    save_guide(tmp_path, outcome, default_tokenizer())
    found = load_guide(tmp_path)
    assert found.support.tolist() == support
    assert torch.equal(found.log_probs(IDS), outcome.log_probs(IDS))
    assert torch.equal(found.q(IDS, 0.1), outcome.q(IDS, 0.1)) and found.q(IDS, 0.1).std() > 0.01


def test_where_there_is_no_guide(tmp_path, gpt):
    save_model(tmp_path, gpt, default_tokenizer())
    with pytest.raises(FileNotFoundError, match="no guide in .*minirl q-sharp"):
        load_guide(tmp_path)


# ---- samples


def test_samples_are_written_as_they_are(tmp_path):
    samples = [{"prompt": "Grüße 日本", "completion": "\ufffd", "score": 0.5}]
    write_samples(tmp_path / "new", before=[], after=samples)
    text = (tmp_path / "new" / "samples.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"before": [], "after": samples} and "Grüße 日本" in text
