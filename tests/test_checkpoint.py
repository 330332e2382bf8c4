"""A checkpoint gives back every bit, and a crash while saving costs nothing."""

import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

import minirl.checkpoint as checkpoint
from minirl.checkpoint import has_checkpoint, load_checkpoint, replacing, restore_rng_state, rng_state, save_checkpoint


def assert_same(a, b, place="state"):
    """Equal types, keys, order of keys, dtypes and bits."""
    assert type(a) is type(b), (place, a, b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape, place
        assert a.numpy().tobytes() == b.numpy().tobytes(), place
    elif isinstance(a, dict):
        assert list(a) == list(b) and [type(k) for k in a] == [type(k) for k in b], place
        for key in a:
            assert_same(a[key], b[key], f"{place}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), place
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{place}/{index}")
    else:
        assert repr(a) == repr(b), (place, a, b)  # repr also tells nan, -0.0 and the last bit of a float


def test_round_trip_is_exact(tmp_path):
    state = {
        "numbers": [0.1 + 0.2, 1e-320, -0.0, float("nan"), float("inf"), 2**200, -3, True, False, None],
        "text": "π ≤ 1, \"quoted\"\n",
        "tuple": (1, (2.5, "x"), []),
        "empty": {}, "empty tensor": torch.empty(0, 3),
        "dtypes": [torch.arange(3).to(dtype) for dtype in (torch.float64, torch.int64, torch.uint8, torch.bool)],
        "scalar": torch.tensor(1 / 3, dtype=torch.float64),
        "nan": torch.tensor([float("nan"), -0.0]),
        1: {"1": torch.tensor([1]), 1: torch.tensor([2])},  # 1 and "1" are two keys
        "1": torch.tensor([3]),
        "a/b": torch.tensor([4]), "a": {"b": torch.tensor([5])},  # one place must not stand for both
        "'1'": torch.tensor([6]),
        "__tensor__": "state/scalar", "__items__": [1], "": torch.tensor([7]),
        "reserved": {"__tensor__": "state/scalar"}, "also": {"__tuple__": [1], "__items__": []},
        "transposed": torch.arange(6.0).reshape(2, 3).t(),
    }
    save_checkpoint(tmp_path, state)
    assert_same(load_checkpoint(tmp_path), state)


def test_bfloat16_and_shared_storage(tmp_path):
    tied = torch.randn(4, 2)
    save_checkpoint(tmp_path, {"wte": tied, "head": tied, "half": tied.bfloat16(), "row": tied[1]})
    loaded = load_checkpoint(tmp_path)
    assert torch.equal(loaded["wte"], tied) and torch.equal(loaded["head"], tied)
    assert torch.equal(loaded["row"], tied[1])
    assert loaded["half"].dtype == torch.bfloat16 and torch.equal(loaded["half"], tied.bfloat16())


def make_training():
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.randn(16, 5)).square().mean().backward()
        optimizer.step()


def test_ten_steps_equal_five_save_load_five(tmp_path):
    torch.manual_seed(0)
    model, optimizer = make_training()
    steps(model, optimizer, 5)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()}
    save_checkpoint(tmp_path, state)
    steps(model, optimizer, 5)

    torch.manual_seed(99)
    other, other_optimizer = make_training()
    loaded = load_checkpoint(tmp_path)
    assert list(loaded["optimizer"]["state"]) == [0, 1, 2, 3]  # integer keys stay integers
    assert loaded["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.999)
    assert isinstance(loaded["model"], dict) and isinstance(model.state_dict(), OrderedDict)
    other.load_state_dict(loaded["model"])
    other_optimizer.load_state_dict(loaded["optimizer"])
    restore_rng_state(loaded["rng"])
    steps(other, other_optimizer, 5)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)  # maximum difference 0.0


def test_all_three_generators_go_on_where_they_were(tmp_path):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    np.random.standard_normal()  # leaves half a Box-Muller pair behind, which belongs to the state
    random.gauss(0, 1)
    save_checkpoint(tmp_path, rng_state())

    def draw():
        normals, uniforms = (random.gauss(0, 1), np.random.standard_normal()), (random.random(), np.random.rand())
        return normals, uniforms, torch.rand(3).tolist()

    expected = draw()
    assert draw() != expected
    restore_rng_state(load_checkpoint(tmp_path))
    assert draw() == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_generator_and_device(tmp_path):
    weight = torch.randn(3, device="cuda")
    save_checkpoint(tmp_path, {"rng": rng_state(), "weight": weight})
    expected = torch.rand(3, device="cuda")
    for device in ("cpu", "cuda"):
        loaded = load_checkpoint(tmp_path, device)
        assert loaded["weight"].device.type == device
        restore_rng_state(loaded["rng"])
        assert torch.equal(torch.rand(3, device="cuda"), expected)


def test_states_of_missing_gpus_are_skipped(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, index: restored.append((int(state[0]), index)))
    two = [torch.full((16,), number, dtype=torch.uint8) for number in (7, 8)]
    restore_rng_state({**rng_state(), "cuda": two})
    assert restored == [(7, 0)]


def half_a_file(tensors, path, metadata):
    path.write_bytes(b"half")
    raise OSError("disk full")


@pytest.mark.parametrize("where", ["writing", "renaming"])
def test_a_crash_while_saving_keeps_the_previous_checkpoint(tmp_path, monkeypatch, where):
    save_checkpoint(tmp_path, {"update": 10, "w": torch.ones(2)})
    with monkeypatch.context() as patch:
        if where == "writing":
            patch.setattr(checkpoint, "save_file", half_a_file)
        else:
            patch.setattr(checkpoint.os, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises((OSError, KeyboardInterrupt)):
            save_checkpoint(tmp_path, {"update": 20, "w": torch.zeros(2)})
    loaded = load_checkpoint(tmp_path)
    assert loaded["update"] == 10 and torch.equal(loaded["w"], torch.ones(2))
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.FILE_NAME]  # no debris
    save_checkpoint(tmp_path, {"update": 20})
    assert load_checkpoint(tmp_path) == {"update": 20}


def test_debris_of_a_killed_process_does_no_harm(tmp_path):
    (tmp_path / (checkpoint.FILE_NAME + ".tmp")).write_bytes(b"half")
    assert not has_checkpoint(tmp_path)
    save_checkpoint(tmp_path, {"update": 1})
    assert has_checkpoint(tmp_path) and load_checkpoint(tmp_path) == {"update": 1}


@pytest.mark.parametrize(
    ("state", "place"),
    [({"a": {"b": [1, np.zeros(2)]}}, "state/a/b/1"), ({"a": {2.5: 1}}, "2.5"), ({"a": {True: 1}}, "True")],
)
def test_what_json_cannot_hold_is_refused_by_name(tmp_path, state, place):
    with pytest.raises(TypeError, match=place):
        save_checkpoint(tmp_path / "run", state)
    assert not (tmp_path / "run").exists()


def test_missing_and_damaged_files_are_named_in_one_line(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere") as error:
        load_checkpoint(tmp_path / "nowhere")
    assert "\n" not in str(error.value)
    path = save_checkpoint(tmp_path, {"w": torch.randn(100)})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="not a readable checkpoint") as error:
        load_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def test_replacing_makes_folders_and_leaves_nothing_behind_on_failure(tmp_path):
    path = tmp_path / "deep" / "er" / "note.txt"
    with replacing(path) as temporary:
        temporary.write_text("one", encoding="utf-8")
    with pytest.raises(RuntimeError), replacing(path) as temporary:
        temporary.write_text("two", encoding="utf-8")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "one" and len(list(path.parent.iterdir())) == 1
