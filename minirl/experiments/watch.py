"""A film of a policy at work, and the policy of a finished run to make it of.

    policy, env_id = load_walker("runs/ppo-Walker2d-v5")
    record(policy, env_id, "walker.gif", seed=1)

Training never needs a display or OpenGL; only this does. Where the machine cannot draw, `record` says so and goes on.
"""

import json
import os
import sys
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import gymnasium
import numpy as np
import torch
import tyro

from minirl.algorithms.settings import Positive, Seed, Settings
from minirl.checkpoint import has_checkpoint, load_checkpoint, replacing
from minirl.experiments.on_policy import EVALUATION_SEED, control_setup
from minirl.experiments.settings import TEXT_TASKS, ControlSettings
from minirl.tracking import say
from minirl.training import resolve_device
from minirl.worlds.environments import make_env

PICTURES_PER_SECOND = 25  # about; exact for Walker2d's 125 steps a second, and a .gif counts in hundredths of one


@dataclass(frozen=True)
class Watch(Settings):
    """Film the policy of a finished run in an environment."""

    run_folder: tyro.conf.Positional[Path] = Path("runs/ppo-Walker2d-v5")
    """Folder of the run, with its checkpoint."""
    out: Path | None = None
    """The film: a .gif, or an .mp4 (needs the package imageio-ffmpeg). None: walker.gif in the run's folder."""
    seconds: Positive = 10.0
    """Its length; a fallen walker begins again."""
    seed: Seed = EVALUATION_SEED
    """Of the first episode."""
    sampled: bool = False
    """Sample the actions, as in training, instead of taking the mean."""
    device: str = "cpu"
    """Where the policy computes."""

    def run(self):
        """Film; says where the film is. Returns the exit code: 1 where this machine cannot draw."""
        out = self.out or self.run_folder / "walker.gif"
        check_can_write(out)
        policy, env_id = load_walker(self.run_folder, resolve_device(self.device))
        if record(policy, env_id, out, self.seed, self.seconds, greedy=not self.sampled) is None:
            return 1
        say(f"{env_id} for {self.seconds:g} seconds: {out}")
        return 0


def load_walker(folder, device="cpu"):
    """The policy of a control run, rebuilt from its config.json and checkpoint; it acts as it did, to the bit.

    Args:
        folder: where the run is.
        device: where the policy goes.
    Returns:
        (policy, env_id).
    Raises:
        FileNotFoundError: if there is no checkpoint; where there are runs inside, as in a comparison, it names one.
        ValueError: if the folder holds another kind of run.
    """
    inside = sorted(found for found in Path(folder).rglob("*") if has_checkpoint(found))
    if inside and not has_checkpoint(folder):
        raise FileNotFoundError(f"{folder} is no run, but has {len(inside)} in it; name one, such as {inside[0]}")
    state, config = load_checkpoint(folder, device), Path(folder) / "config.json"
    settings = json.loads(config.read_text(encoding="utf-8"))["settings"]
    env_id = settings.get("task")
    if env_id in (None, *TEXT_TASKS) or "world" not in settings:
        raise ValueError(f"{folder} holds no run in an environment; its config.json says task {env_id}")
    world_settings = ControlSettings(**settings["world"] | {"hidden": tuple(settings["world"]["hidden"])})
    with torch.random.fork_rng([]):  # the fresh weights, soon replaced, come from the global generator
        world_settings = replace(world_settings, num_envs=1, group_size=1, init=None)
        world, policy, _ = control_setup(env_id, world_settings, 0, device, 0.99)
    world.close()
    policy.load_state_dict(state["algorithm"]["policy"])
    return policy, env_id


def record(policy, env_id, path, seed, seconds=10.0, size=(480, 360), greedy=True):
    """Film a policy in real time, episode after episode.

    Args:
        policy: obs -> Distribution, with `mode` where greedy.
        env_id: gymnasium id.
        path: a .gif, or an .mp4 (which needs the package imageio-ffmpeg).
        seed: of the first episode; the next ones have the next seeds. Also of sampled actions.
        seconds: length of the film.
        size: (width, height) in pixels, of MuJoCo's environments; even numbers for an .mp4.
        greedy: act by `policy.mode`, otherwise sample.
    Returns:
        The path, or None where this machine cannot draw: then a line was printed.
    Raises:
        ValueError: if the kind of file is not known, or a package for it is missing.
    """
    path = Path(path)
    check_can_write(path)
    try:
        env = open_env(env_id, size)
    except ValueError:  # there is no such environment
        raise
    except Exception as error:  # gymnasium, MuJoCo, OpenGL and pygame each raise their own
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        say(f"no film: this machine cannot draw {env_id} ({reason})")
        return None
    every = max(1, round(env.metadata["render_fps"] / PICTURES_PER_SECOND))
    rate = env.metadata["render_fps"] / every
    pictures = play(policy, env, seed, max(1, round(seconds * rate)), every, greedy)
    env.close()
    write(path, pictures, rate)
    return path


def record_best(rows, out):
    """Film the best run of each algorithm of a comparison, as OUT/ALGORITHM.gif.

    Args:
        rows: of summary.csv, dicts with algorithm, seed and final_return.
        out: the comparison's folder, with the runs in ALGORITHM/seed-N.
    Returns:
        The paths of what was filmed; where something is missing, a line says what.
    """
    out, films = Path(out), []
    for algorithm in dict.fromkeys(row["algorithm"] for row in rows):
        best = max((row for row in rows if row["algorithm"] == algorithm), key=lambda row: row["final_return"])
        try:
            policy, env_id = load_walker(out / algorithm / f"seed-{best['seed']}")
            films.append(record(policy, env_id, out / f"{algorithm}.gif", EVALUATION_SEED))
        except (ValueError, OSError) as error:
            say(f"no film of {algorithm}: {error}")
    return [film for film in films if film]


@contextmanager
def headless():
    """Let MuJoCo draw without a display, where there is none and MUJOCO_GL does not say how.

    Only meanwhile: MuJoCo reads the variable when it is imported too, and then where EGL is missing nothing would run.
    """
    chosen = any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"))
    if chosen or sys.platform != "linux":
        yield
        return
    os.environ["MUJOCO_GL"] = "egl"
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]


def open_env(env_id, size):
    """An environment that has drawn a first picture; one of MuJoCo's: of `size`, by a camera that follows."""
    plain, options = make_env(env_id), {}
    if hasattr(plain.unwrapped, "mujoco_renderer"):
        model, options = plain.unwrapped.model, {"width": size[0], "height": size[1]}
        if "track" in [model.camera(number).name for number in range(model.ncam)]:
            options["camera_name"] = "track"  # else a walker that walks leaves the picture
    plain.close()
    env = make_env(env_id, render_mode="rgb_array", **options)
    with headless():
        env.reset(seed=0)
        env.render()
    return env


@torch.no_grad()
def play(policy, env, seed, count, every, greedy):
    """`count` pictures (height, width, 3) uint8 of an environment, one in `every` steps."""
    device = next(policy.parameters()).device if isinstance(policy, torch.nn.Module) else "cpu"
    space, pictures, steps = env.action_space, [], 0
    obs, _ = env.reset(seed=seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        while len(pictures) < count:
            if steps % every == 0:
                pictures.append(env.render())
            seen = torch.from_numpy(np.asarray(obs, np.float32)).unsqueeze(0).to(device)
            chosen = (policy.mode(seen) if greedy else policy(seen).sample())[0].cpu().numpy()
            discrete = isinstance(space, gymnasium.spaces.Discrete)
            action = chosen + space.start if discrete else chosen.clip(space.low, space.high).astype(space.dtype)
            obs, _, terminated, truncated, _ = env.step(action)
            steps += 1
            if terminated or truncated:
                seed += 1
                obs, _ = env.reset(seed=seed)
    return pictures


def check_can_write(path):
    """ValueError of one line unless a film can be written to `path`."""
    if path.suffix not in (".gif", ".mp4"):
        raise ValueError(f"{path} is no .gif and no .mp4")
    needed = {"imageio": "imageio", "PIL": "pillow", "imageio_ffmpeg": "imageio-ffmpeg, or write a .gif"}
    for module, package in needed.items():
        if find_spec(module) is None and (path.suffix == ".mp4" or module != "imageio_ffmpeg"):
            raise ValueError(f"to write {path.name}: pip install {package}")


def write(path, pictures, rate):
    """Write pictures as a .gif that repeats for ever, or an .mp4, in one step; `rate` is pictures a second."""
    import imageio.v3 as imageio

    kind = {"duration": 1000 / rate, "loop": 0} if path.suffix == ".gif" else {"fps": rate, "macro_block_size": 2}
    film = imageio.imwrite("<bytes>", np.stack(pictures), extension=path.suffix, **kind)
    with replacing(path) as temporary:
        temporary.write_bytes(film)
