"""The two loops: `train` for whatever acts in a world, `fit` for whatever learns from records.

    batch = world.collect(policy, critic);  stats = algorithm.update(batch, progress);  log;  repeat

is all of reinforcement learning here, for text and for walkers. Neither loop knows a task or an algorithm.
"""

import copy
import random
import signal
import threading
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch

from minirl.algorithms.optimize import anneal, descend
from minirl.tracking import TrainingDiverged, check_finite


def seed_everything(seed):
    """Seed python's, numpy's and torch's global generators: the one place where that happens."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def resolve_device(name="auto"):
    """A device name from what was asked for: `auto` is cuda where there is one, else cpu.

    Returns:
        A string for torch.
    Raises:
        ValueError: if the device is unknown or missing on this machine.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(name).type
        if kind == "cuda" and not torch.cuda.is_available():
            raise RuntimeError
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError):
        raise ValueError(f"device {name!r} is not available here; use --device cpu, or auto") from None
    return name


def to_floats(stats):
    """Detached 0-d tensors to Python numbers, the one place that waits for the device."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in stats.items()}


@contextmanager
def interruptible():
    """Let Ctrl-C wait for the end of an update, when the state is whole; yields a list that is empty until then.

    Pressed twice it stops at once. Outside the main thread, which alone receives it, the list stays empty.
    """
    pressed = []

    def note(number, _frame):
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before or signal.SIG_DFL)


def stop_if_diverged(step, row, algorithm, good, save=None):
    """Put back and save the state before this step if one of its numbers is none, and raise TrainingDiverged."""
    try:
        check_finite(step, row)
    except TrainingDiverged:
        algorithm.load_state_dict(good)
        if save:
            save(step - 1)
        raise


def train(
    world, algorithm, updates, tracker=None, evaluate=None, evaluate_every=0, save=None, save_every=0, start=0,
    progress=None,
):  # fmt: skip
    """Let an algorithm act and learn.

    Args:
        world: with collect(policy, critic) -> Batch.
        algorithm: with policy, perhaps critic, and update(batch, progress) -> stats.
        updates: how many in all, those before `start` included.
        tracker: tracking.Tracker; None keeps the history only.
        evaluate: called with the number of the update, returns a dict of numbers; after every `evaluate_every` updates
            and after the last.
        save: called with the number of the update; after every `save_every` updates and after the last.
        start: updates already made by the run that is being continued.
        progress: for batches of no fixed size (whole episodes): called without arguments, returns the share of the run
            that is done; the run ends when that is 1, after `updates` at the latest. None: updates / `updates`.
    Returns:
        history: a list of dicts, one an update.
    Raises:
        TrainingDiverged: a metric is not a number. Before that the state of the last good update is put back and saved.
        KeyboardInterrupt: Ctrl-C was pressed; the update was completed and saved.
    """
    history = []
    critic = getattr(algorithm, "critic", None)
    share = progress() if progress else start / updates
    with interruptible() as pressed:
        for update in range(start + 1, updates + 1):
            good = copy.deepcopy(algorithm.state_dict())
            batch = world.collect(algorithm.policy, critic)
            row = batch.metrics | to_floats(algorithm.update(batch, progress=share))
            stop_if_diverged(update, row, algorithm, good, save)
            share = progress() if progress else update / updates
            last = update == updates or share >= 1
            if evaluate and (last or (evaluate_every and update % evaluate_every == 0)):
                row |= evaluate(update)
            history.append({"step": update} | row)
            if tracker:
                tracker.log(update, row)
            if save and (last or pressed or (save_every and update % save_every == 0)):
                save(update)
            if pressed:
                raise KeyboardInterrupt
            if last:
                break
    return history


def windows(records, batch_size, accumulate, generator):
    """Endless epochs of shuffled records, cut into lists of `accumulate` parts of `batch_size` rows.

    Nothing is dropped: the last part of an epoch may have fewer rows, its last window fewer parts.

    Args:
        records: with len() and rows(index); or a list of such, whose parts take turns at random and are never mixed,
            since rows of one length cost least.
        batch_size: rows a part.
        accumulate: parts an optimiser step.
        generator: torch.Generator of the order.
    Yields:
        Lists of records.
    Raises:
        ValueError: if there are no records.
    """
    kinds = records if isinstance(records, list) else [records]
    if not all(map(len, kinds)) or not kinds:
        raise ValueError("there are no records to learn from")
    while True:
        parts = []
        for kind in kinds:
            order = torch.randperm(len(kind), generator=generator, device="cpu")
            parts += [(kind, order[i : i + batch_size]) for i in range(0, len(order), batch_size)]
        if len(kinds) > 1:
            parts = [parts[i] for i in torch.randperm(len(parts), generator=generator, device="cpu").tolist()]
        for first in range(0, len(parts), accumulate):
            yield [kind.rows(index) for kind, index in parts[first : first + accumulate]]


def fit(
    algorithm, records, steps, batch_size=64, tracker=None, accumulate=1, seed=0,
    evaluate=None, evaluate_every=0, stop=None, save=None, start=0, warmup_steps=0,
):  # fmt: skip
    """Let an algorithm learn from records.

    Args:
        algorithm: with loss(records) -> (loss, stats), optimizer, and config with lr, lr_decay, max_grad_norm.
        records: Completions, Pairs or the like, or a list of them; see `windows`.
        steps: optimiser steps in all, those before `start` included.
        batch_size: rows at a time.
        accumulate: parts of batch_size rows whose gradients make one step.
        seed: of the order of the records.
        tracker, evaluate, evaluate_every, save, start: as in `train`.
        stop: called with the row of an evaluation; True ends the training there.
        warmup_steps: first steps, over which the learning rate rises in a straight line to what it would be without.
    Returns:
        history: a list of dicts, one a step.
    Raises:
        TrainingDiverged, KeyboardInterrupt: as in `train`.
    """
    history, config = [], algorithm.config
    order = windows(records, batch_size, accumulate, torch.Generator(device="cpu").manual_seed(seed))
    with interruptible() as pressed:
        for step, parts in enumerate(islice(order, start, steps), start + 1):
            good = copy.deepcopy(algorithm.state_dict())
            risen = min(1.0, step / warmup_steps) if warmup_steps else 1.0
            anneal(algorithm.optimizer, config.lr * risen, (step - 1) / steps, config.lr_decay)
            losses = (algorithm.loss(part) for part in parts)
            row = to_floats(descend(algorithm.optimizer, losses, config.max_grad_norm))
            stop_if_diverged(step, row, algorithm, good, save)
            due = bool(evaluate) and (step == steps or (evaluate_every and step % evaluate_every == 0))
            if due:
                row |= evaluate(step)
            history.append({"step": step} | row)
            if tracker:
                tracker.log(step, row)
            done = step == steps or (due and stop and stop(row))
            if save and (done or pressed):
                save(step)
            if pressed:
                raise KeyboardInterrupt
            if done:
                break
    return history
