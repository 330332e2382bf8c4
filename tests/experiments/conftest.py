"""What tests of experiments share."""

import pytest
import torch

from minirl.experiments.models import save_model
from minirl.models.gpt import GPT, GPTConfig
from minirl.models.tokenizer import default_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A run folder with an untrained model; its texts differ from each other."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, GPT(GPTConfig(default_tokenizer().vocab_size, 96, 1, 2, 16)), default_tokenizer())
    return folder
