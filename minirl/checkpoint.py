"""The whole state of a run in one file: safetensors for the tensors, JSON for the rest, no pickle.

A run goes on exactly where it stopped only if everything is saved: weights, optimizer moments, schedules, normaliser
statistics, random states, the position in the data, unfinished episodes. Whoever owns such state gives it away as a
nested dict (`state_dict()`), and this module writes any nested dict. The JSON travels in the header of the safetensors
file, so that one rename replaces both: a crash while saving leaves the previous checkpoint as it was. Loading runs no
code from the file, which a pickle would.
"""

import json
import os
import random
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

FILE_NAME = "checkpoint.safetensors"


@contextmanager
def replacing(path):
    """Yield a temporary path beside `path` to write to; it takes the place of `path` in one step if nothing failed.

    Readers see the old file or the new one, never half of one.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())  # on disk before the rename, so that a power cut cannot leave an empty file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_checkpoint(folder, state):
    """Write `state` to folder/checkpoint.safetensors, replacing what was there in one step.

    Args:
        folder: made if missing.
        state: a nested dict with str or int keys; values are tensors on any device, numbers, strings, bools, None, and
            lists, tuples and dicts of these.
    Returns:
        The path of the file.
    Raises:
        TypeError: for a value or key of another type, naming its place; nothing is written then.
    """
    tensors = {}
    text = json.dumps(_flatten(state, "state", tensors))
    path = Path(folder) / FILE_NAME
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt", "state": text})
    return path


def load_checkpoint(folder, device="cpu"):
    """Read what `save_checkpoint` wrote: the same keys, types, dtypes and bits.

    Args:
        folder: the folder it was saved to.
        device: where all tensors go, whatever device they were saved from.
    Returns:
        The nested dict.
    Raises:
        FileNotFoundError: if there is no checkpoint in `folder`.
        ValueError: if the file is damaged or something else.
    """
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint in {folder} (no {FILE_NAME}); check the path or start a new run")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            text = (file.metadata() or {})["state"]
            # Copies: a tensor still mapped to the file would keep Windows from replacing it at the next save.
            tensors = {name: file.get_tensor(name).clone().to(device) for name in file.keys()}
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{path} is not a readable checkpoint ({error}); delete it and start a new run") from None
    return _unflatten(json.loads(text), tensors)


def has_checkpoint(folder):
    """Whether `load_checkpoint(folder)` would find a file."""
    return (Path(folder) / FILE_NAME).is_file()


def _flatten(value, place, tensors):
    """`value` as JSON; its tensors move into the dict `tensors`, under their place in the state as name.

    JSON knows neither tensors nor tuples nor integer keys, so these become a dict with one reserved key.
    """
    if isinstance(value, torch.Tensor):
        tensors[place] = value.detach().cpu().clone(memory_format=torch.contiguous_format)  # tied weights: two copies
        return {"__tensor__": place}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        items = [_flatten(item, f"{place}/{index}", tensors) for index, item in enumerate(value)]
        return {"__tuple__": items} if isinstance(value, tuple) else items
    if not isinstance(value, dict):
        raise TypeError(
            f"{place} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, lists, tuples "
            "and dicts: convert it"
        )
    for key in value:
        if type(key) not in (str, int):
            raise TypeError(f"{place} has the key {key!r}, a {type(key).__name__}; keys must be str or int")
    pairs = [(key, _flatten(item, f"{place}/{_name(key)}", tensors)) for key, item in value.items()]
    plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
    return dict(pairs) if plain else {"__items__": pairs}


def _name(key):
    """A dict key as part of a tensor's name: an ordinary word as it is, else its repr, which tells 1 from "1"."""
    return key if isinstance(key, str) and key.replace(".", "_").isidentifier() else repr(key)


def _unflatten(value, tensors):
    """The inverse of `_flatten`."""
    if isinstance(value, list):
        return [_unflatten(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        return tensors[value["__tensor__"]]
    if "__tuple__" in value:
        return tuple(_unflatten(item, tensors) for item in value["__tuple__"])
    if "__items__" in value:
        return {key: _unflatten(item, tensors) for key, item in value["__items__"]}
    return {key: _unflatten(item, tensors) for key, item in value.items()}


def rng_state():
    """The states of the global random generators: torch on CPU, on CUDA where this process used it, numpy, python."""
    numpy_state = np.random.get_state(legacy=False)
    words = torch.tensor(numpy_state["state"]["key"].astype(np.int64))  # 624 words of 32 bits
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": {**numpy_state, "state": {"key": words, "pos": int(numpy_state["state"]["pos"])}},
        "python": random.getstate(),
    }


def restore_rng_state(state):
    """Put back what `rng_state()` returned. States of GPUs that this machine lacks are skipped."""
    torch.set_rng_state(state["torch"].cpu())  # generators take their state from the CPU wherever the checkpoint went
    for index, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state.cpu(), index)
    inner = state["numpy"]["state"]
    words = inner["key"].cpu().numpy().astype(np.uint32)
    np.random.set_state({**state["numpy"], "state": {"key": words, "pos": inner["pos"]}})
    random.setstate(state["python"])
