"""The command bench: how fast training on a walker is, beside Stable-Baselines3 and beside the bare simulator.

All programs run in one process with one thread and equal settings, one update of 2,048 steps at a time, in rounds: in
each round everybody has a turn, and every other round goes backwards, so that a machine that slows down or is shared
slows all of them alike. Ratios are taken within a round. The first update of each, which also pays for what is made
once (and with --compile for compiling), is left out and stated.
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mujoco
import numpy as np
import torch
import tyro

from minirl.algorithms.ppo import PPO, PPOConfig
from minirl.algorithms.settings import Count, Seed, Settings
from minirl.algorithms.trpo import TRPO, TRPOConfig
from minirl.checkpoint import replacing
from minirl.experiments.on_policy import control_setup
from minirl.experiments.settings import ControlSettings
from minirl.tracking import machine, say, write_rows
from minirl.training import seed_everything
from minirl.worlds.environments import make_env

STEPS = 2048  # of an update, all environments together (PPO paper, table 3)
OURS = {  # PPO: 10 passes of 32 mini-batches; TRPO: 10 conjugate-gradient steps, critic 10 passes of 16 mini-batches
    "ppo": (PPO, PPOConfig(epochs=10, minibatches=32, critic_epochs=10, critic_minibatches=32)),
    "trpo": (TRPO, TRPOConfig(cg_iterations=10, critic_epochs=10, critic_minibatches=16)),
}
THEIRS = {  # the same by their names. Their PPO fits policy and critic in one step of a summed loss, ours in two.
    "ppo": {"n_epochs": 10, "batch_size": STEPS // 32, "learning_rate": 3e-4, "clip_range": 0.2, "ent_coef": 0.0,
            "max_grad_norm": 0.5, "gamma": 0.99, "gae_lambda": 0.95},
    "trpo": {"cg_max_steps": 10, "cg_damping": 0.1, "target_kl": 0.01, "n_critic_updates": 10,
             "batch_size": STEPS // 16, "learning_rate": 1e-3, "gamma": 0.99, "gae_lambda": 0.95},
}  # fmt: skip
PARTS = ("collecting", "policy", "critic")


class Mine:
    """Our PPO or TRPO on num_envs walkers; `update()` makes one and returns the seconds of its PARTS."""

    def __init__(self, algorithm, env_id, num_envs, seed, compiled=False):
        self.program, self.algorithm, self.num_envs = "minirl compiled" if compiled else "minirl", algorithm, num_envs
        kind, config = OURS[algorithm]
        settings = ControlSettings(num_envs=num_envs, steps=STEPS // num_envs)
        seed_everything(seed)
        self._world, policy, make_critic = control_setup(env_id, settings, seed, "cpu", config.gamma)
        self._learner = kind(policy, make_critic(), config)
        if compiled:
            self._learner.loss = torch.compile(self._learner.loss)

    def update(self):
        """One update: (seconds of collecting, of the policy, of the critic), which is asked for values last of all."""
        asked, learner = [], self._learner
        times = [time.perf_counter()]
        batch = self._world.collect(learner.policy, learner.critic)
        times.append(time.perf_counter())
        hook = learner.critic.register_forward_pre_hook(lambda *_: asked.append(time.perf_counter()))
        learner.update(batch)
        hook.remove()
        times += [asked[0], time.perf_counter()]
        return np.diff(times).tolist()

    def close(self):
        """Free the environments."""
        self._world.close()


class Peer:
    """PPO of SB3 or TRPO of SB3-contrib on as many walkers, with VecNormalize; `update()` as of Mine, in one part."""

    def __init__(self, algorithm, env_id, num_envs, seed):
        from minirl.experiments import peers

        self.program, self.algorithm, self.num_envs = "sb3", algorithm, num_envs
        kind, settings = getattr(peers, algorithm.upper()), {"n_steps": STEPS // num_envs} | THEIRS[algorithm]
        self._model = peers.make_peer(kind, env_id, num_envs, settings, seed)

    def update(self):
        """One update: [seconds]."""
        began = time.perf_counter()
        self._model.learn(STEPS, log_interval=None, reset_num_timesteps=False)
        return [time.perf_counter() - began]

    def close(self):
        """Free the environments."""
        self._model.env.close()


class Simulator:
    """The ceiling: one walker under random torques, nothing but mj_step, put back on its feet when it has fallen."""

    program, algorithm, num_envs = "simulator", "", 1

    def __init__(self, env_id, seed):
        self._env = make_env(env_id)
        self._inner, self._data = self._env.unwrapped, mujoco.MjData(self._env.unwrapped.model)
        self._torques = np.random.default_rng(seed).uniform(-1, 1, (STEPS, self._inner.model.nu))

    def update(self):
        """As many steps as there are in an update: [seconds]."""
        inner, data, control, position = self._inner, self._data, self._data.ctrl, self._data.qpos
        (low, high), (least, most) = inner._healthy_z_range, inner._healthy_angle_range
        began = time.perf_counter()
        for torques in self._torques:
            control[:] = torques
            mujoco.mj_step(inner.model, data, inner.frame_skip)
            if not (low < position[1] < high and least < position[2] < most):
                mujoco.mj_resetData(inner.model, data)
        return [time.perf_counter() - began]

    def close(self):
        """Free the environment."""
        self._env.close()


def take_turns(programs, rounds, noted=lambda: None):
    """Let each program make an update in each of `rounds` rounds, after one that does not count.

    Returns:
        (first, seconds): lists with an entry a program, the seconds of its first update and an array (rounds, parts).
    """
    first, seconds = [], [[] for _ in programs]
    for program in programs:
        first.append(sum(program.update()))
        noted()
    for number in range(rounds):
        order = range(len(programs)) if number % 2 == 0 else reversed(range(len(programs)))
        for index in order:
            seconds[index].append(programs[index].update())
            noted()
    return first, [np.array(rows) for rows in seconds]


def table(programs, first, seconds):
    """Rows of bench.csv: speeds are STEPS / seconds of an update; medians over the rounds, and the extremes."""
    total = {(p.program, p.algorithm, p.num_envs): s.sum(1) for p, s in zip(programs, seconds, strict=True)}
    ceiling, rows = total["simulator", "", 1], []
    for program, warm_up, parts in zip(programs, first, seconds, strict=True):
        mine = parts.sum(1)
        peer = total.get(("sb3", program.algorithm, program.num_envs))
        ratio = [] if peer is None or program.program == "sb3" else sorted(peer / mine)
        shares = np.median(parts / mine[:, None], 0) if parts.shape[1] == len(PARTS) else [""] * len(PARTS)
        rows.append({
            "program": program.program, "algorithm": program.algorithm, "envs": program.num_envs,
            "steps_per_second": STEPS / statistics.median(mine), "slowest": STEPS / max(mine),
            "fastest": STEPS / min(mine), "share_of_simulator": statistics.median(ceiling / mine),
            "times_sb3": statistics.median(ratio) if ratio else "",
            "times_sb3_lowest": ratio[0] if ratio else "", "times_sb3_highest": ratio[-1] if ratio else "",
            **{f"{part}_share": share for part, share in zip(PARTS, shares, strict=True)},
            "first_update_seconds": warm_up, "rounds": len(mine),
        })  # fmt: skip
    return rows


def as_markdown(rows, title, versions):
    """The rows as a table to read, with what they were measured on."""
    lines = [
        f"# {title}", "",
        "Steps per second of training, collecting and learning: median over the rounds (slowest to fastest). 'x sb3': "
        "how many times as fast as Stable-Baselines3 on the same settings, within a round. The last three columns are "
        "shares of an update. 'first': seconds of the first update, which is not counted; where 'compiled', with the "
        "compiling, which torch keeps for the next of its kind.", "",
        "| program | algorithm | envs | steps/s | of the simulator | x sb3 | first | collecting | policy | critic |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in rows:
        speed = f"{row['steps_per_second']:,.0f} ({row['slowest']:,.0f} to {row['fastest']:,.0f})"
        times = "{times_sb3:.2f} ({times_sb3_lowest:.2f} to {times_sb3_highest:.2f})" if row["times_sb3"] else ""
        shares = [f"{row[f'{part}_share']:.0%}" if row[f"{part}_share"] != "" else "" for part in PARTS]
        cells = (row["program"], row["algorithm"], row["envs"], speed, f"{row['share_of_simulator']:.0%}",
                 times.format(**row), f"{row['first_update_seconds']:.1f}", *shares)  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, "", ", ".join(f"{name} {version}" for name, version in versions.items()), ""])


@dataclass(frozen=True)
class Bench(Settings):
    """Time our PPO and TRPO beside Stable-Baselines3's, and beside the simulator alone."""

    what: tyro.conf.Positional[Literal["compare"]] = "compare"
    """compare: with Stable-Baselines3, on equal settings."""
    env: Literal["Walker2d-v5", "Walker2d-v4"] = "Walker2d-v5"
    """Which walker."""
    num_envs: tuple[Count, ...] = (1, 8, 16)
    """Environments stepped side by side; each number is measured."""
    rounds: Count = 7
    """Updates of each that are timed."""
    compile: bool = False
    """Also time our PPO with its loss compiled by torch."""
    seed: Seed = 0
    """Of everything random."""
    device: Literal["cpu"] = "cpu"
    """Where networks as small as these are fastest."""
    out: Path = Path("runs/bench")
    """Folder for bench.csv and bench.md."""
    quiet: bool = False
    """No progress bar."""

    def run(self):
        """Measure, print the table, write the files; returns the rows of bench.csv."""
        if wrong := [count for count in self.num_envs if STEPS % count]:
            raise ValueError(f"num_envs is {wrong[0]}; an update's {STEPS} steps must divide by it")
        try:
            from minirl.experiments.peers import peer_versions
        except ImportError as error:
            raise ValueError(str(error)) from None
        from tqdm import tqdm

        torch.set_num_threads(1)
        programs = self.programs()
        with tqdm(total=len(programs) * (1 + self.rounds), desc="bench", unit=" update", disable=self.quiet) as bar:
            rows = table(programs, *take_turns(programs, self.rounds, bar.update))
        for program in programs:
            program.close()
        title = f"{self.env}, {STEPS:,} steps an update, one thread, {self.rounds} rounds"
        text = as_markdown(rows, title, machine() | peer_versions())
        write_rows(self.out / "bench.csv", rows)
        with replacing(self.out / "bench.md") as temporary:
            temporary.write_text(text, encoding="utf-8")
        say(text)
        return rows

    def programs(self):
        """Everybody who takes turns; the simulator first."""
        programs = [Simulator(self.env, self.seed)]
        for count in self.num_envs:
            for algorithm in OURS:
                programs += [Mine(algorithm, self.env, count, self.seed), Peer(algorithm, self.env, count, self.seed)]
            if self.compile:
                programs.append(Mine("ppo", self.env, count, self.seed, compiled=True))
        return programs
