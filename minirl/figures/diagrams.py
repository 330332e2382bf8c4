"""Block diagrams: what is trained, what is frozen, and what flows where. Notebooks 00, 03, 13, 15, 16 and 17.

Everything is placed in inches from the lower left corner. A trained model has a thick outline, a frozen one a dashed
outline, so that the two differ without colour as well.
"""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch
from matplotlib.path import Path

KINDS = {  # kind -> (fill, style of the outline, its width, what the legend says)
    "trained": ("#A8D3F0", "-", 1.8, "model, trained"),
    "frozen": ("#E6E6E6", "--", 1.0, "model, frozen"),
    "data": ("#FFFFFF", "-", 0.8, "data, or a rule"),
    "computed": ("#FFF0CF", "-", 0.8, "what is computed"),
}
INK = "#333333"


def _canvas(width, height, title, kinds=tuple(KINDS)):
    """(figure, axis): an empty page of width x height inches with a title above and a legend below."""
    figure = Figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, width), ylim=(0, height))
    axis.axis("off")
    axis.text(0.12, height - 0.12, title, fontsize=12, va="top", weight="bold")
    handles = [
        Patch(facecolor=fill, edgecolor=INK, linestyle=style, linewidth=line, label=meaning)
        for fill, style, line, meaning in (KINDS[kind] for kind in kinds)
    ]
    axis.legend(handles=handles, loc="lower right", ncols=len(kinds), frameon=False, fontsize=8, borderaxespad=0.2)
    return figure, axis


def _box(axis, x, y, text, kind, width=1.4, height=0.52, small=""):
    """A box with its middle at (x, y).

    Args:
        axis: of `_canvas`.
        x, y, width, height: inches.
        text: what it is.
        kind: one of KINDS.
        small: lines below the text, in smaller letters of equal width.
    Returns:
        dict side -> the middle of that side: left, right, top, bottom.
    """
    fill, style, line, _ = KINDS[kind]
    left, bottom = x - width / 2, y - height / 2
    axis.add_patch(FancyBboxPatch(
        (left, bottom), width, height, boxstyle="round,pad=0,rounding_size=0.07",
        facecolor=fill, edgecolor=INK, linestyle=style, linewidth=line, gid="box",
    ))  # fmt: skip
    lines = small.count("\n") + 1 if small else 0
    axis.text(x, y + 0.07 * lines, text, ha="center", va="center", fontsize=9, linespacing=1.1, gid="text")
    if small:
        axis.text(x, bottom + 0.06, small, ha="center", va="bottom", fontsize=7, family="monospace", gid="text")
    return {"left": (left, y), "right": (left + width, y), "top": (x, bottom + height), "bottom": (x, bottom)}


def _arrow(axis, *points, text="", shift=(0.0, 0.0), style="-"):
    """An arrow along straight pieces, its text above the longest level piece, else right of the longest upright one.

    Args:
        axis: of `_canvas`.
        points: two or more (x, y) in inches, the head at the last.
        text: a word or two.
        shift: moves the text, inches.
        style: of the line; dotted for what acts once, at the start.
    """
    axis.add_patch(FancyArrowPatch(
        path=Path(points), arrowstyle="-|>", mutation_scale=10, color=INK, linewidth=1.1, linestyle=style,
        joinstyle="miter", capstyle="butt", gid="arrow",
    ))  # fmt: skip
    pieces = list(zip(points, points[1:], strict=False))
    level = max(pieces, key=lambda piece: abs(piece[1][0] - piece[0][0]))
    upright = max(pieces, key=lambda piece: abs(piece[1][1] - piece[0][1]))
    flat = abs(level[1][0] - level[0][0]) >= 0.3
    (a, b), (c, d) = level if flat else upright
    axis.text((a + c) / 2 + (0 if flat else 0.06) + shift[0], (b + d) / 2 + (0.04 if flat else 0) + shift[1], text,
              ha="center" if flat else "left", va="bottom" if flat else "center", fontsize=8, color=INK)  # fmt: skip


def _chain(axis, *boxes):
    for first, second in zip(boxes, boxes[1:], strict=False):
        _arrow(axis, first["right"], second["left"])


def pipeline(accuracies=None, samples=None):
    """From pre-training to verifiable rewards, with what each stage reaches and writes.

    Args:
        accuracies: dict stage -> share in [0, 1], drawn as percents, or a text; the stages are pretrain, sft, reward,
            rlhf, dpo, orpo and verifiable, and any may be missing.
        samples: dict stage -> a completion, at most 24 characters, drawn below.
    """
    figure, axis = _canvas(10, 4.4, "From pre-training to verifiable rewards", ("trained",))
    accuracies, samples = accuracies or {}, samples or {}

    def stage(name, x, y, text, width):
        reached = accuracies.get(name)
        reached = f"{reached:.0%} right" if isinstance(reached, float) else reached
        notes = [note for note in (reached, samples.get(name)) if note]
        return _box(axis, x, y, text, "trained", width, 0.6 + 0.13 * len(notes), "\n".join(notes))

    axis.add_patch(FancyBboxPatch((3.92, 0.36), 4.0, 3.56, boxstyle="round,pad=0,rounding_size=0.1", facecolor="none",
                                  edgecolor="#999999", linestyle=":"))  # fmt: skip
    axis.text(5.92, 3.87, "preference tuning, one of three", ha="center", va="top", fontsize=9, color=INK)
    pretrain = stage("pretrain", 0.95, 2.0, "pre-training", 1.6)
    sft = stage("sft", 2.85, 2.0, "SFT", 1.6)
    reward = stage("reward", 4.88, 3.07, "reward model", 1.6)
    rlhf = stage("rlhf", 6.93, 3.07, "RL on its score", 1.7)
    dpo = stage("dpo", 5.92, 2.0, "DPO", 2.2)
    orpo = stage("orpo", 5.92, 0.93, "ORPO", 2.2)
    verifiable = stage("verifiable", 9.06, 2.0, "RL with\nverifiable rewards", 1.64)
    for first, second in ((pretrain, sft), (sft, dpo), (dpo, verifiable), (reward, rlhf)):
        _arrow(axis, first["right"], second["left"])
    _arrow(axis, (3.78, 2.0), (3.78, 3.07), reward["left"])
    _arrow(axis, pretrain["bottom"], (0.95, 0.93), orpo["left"], text="straight from the base model")
    _arrow(axis, rlhf["right"], (8.06, 3.07), (8.06, 2.18), (8.24, 2.18))
    _arrow(axis, orpo["right"], (8.06, 0.93), (8.06, 1.82), (8.24, 1.82))
    return figure


def one_loop_two_worlds():
    """The same algorithm between a world of text and a world of control."""
    figure, axis = _canvas(9, 3.1, "One loop, two worlds", ("trained", "data", "computed"))
    text = _box(axis, 1.15, 2.2, "TokenWorld\nprompts, a reward", "data", 1.8)
    control = _box(axis, 1.15, 0.95, "ControlWorld\nstates, torques", "data", 1.8)
    batch = _box(axis, 3.75, 1.575, "Batch\n(B, T) of everything", "data", 1.7)
    algorithm = _box(axis, 6.0, 1.575, "REINFORCE, TRPO,\nPPO or GRPO", "computed", 1.6)
    policy = _box(axis, 8.0, 1.575, "policy(obs)\n-> Distribution", "trained", 1.4)
    _arrow(axis, text["right"], (2.47, 2.2), (2.47, 1.69), (2.9, 1.69), text="collect")
    _arrow(axis, control["right"], (2.47, 0.95), (2.47, 1.46), (2.9, 1.46))
    _arrow(axis, batch["right"], algorithm["left"], text="update")
    _arrow(axis, algorithm["right"], policy["left"])
    _arrow(axis, policy["top"], (8.0, 2.55), (2.6, 2.55), (2.6, 2.35), (2.05, 2.35), text="acts: a token is an action")
    _arrow(axis, policy["bottom"], (8.0, 0.8), (2.05, 0.8), text="acts: a torque is an action")
    return figure


def rlhf_and_classic_rl():
    """Classic RL on the left, RLHF on the right: who gives the reward, and what holds the policy."""
    figure, axis = _canvas(10, 3.4, "Classic RL and RLHF")
    policy = _box(axis, 0.95, 1.7, "policy", "trained", 1.3)
    world = _box(axis, 3.15, 1.7, "environment", "data", 1.3)
    _arrow(axis, policy["top"], (0.95, 2.4), (3.15, 2.4), world["top"], text="action")
    _arrow(axis, world["bottom"], (3.15, 1.0), (0.95, 1.0), policy["bottom"], text="state, reward")
    axis.plot([4.2, 4.2], [0.5, 2.9], color="#999999", linestyle=":", linewidth=1)
    prompts = _box(axis, 4.95, 2.4, "prompts", "data", 1.0)
    policy = _box(axis, 6.4, 2.4, "policy", "trained", 1.1)
    judge = _box(axis, 9.15, 2.4, "reward model", "frozen", 1.3)
    reference = _box(axis, 9.15, 1.6, "reference", "frozen", 1.3)
    _box(axis, 6.9, 0.8, "reward = score − β · (log π − log π_ref)", "computed", 2.9)
    _arrow(axis, prompts["right"], policy["left"])
    _arrow(axis, policy["right"], judge["left"], text="completion")
    _arrow(axis, (7.8, 2.4), (7.8, 1.6), reference["left"])
    _arrow(axis, judge["right"], (9.9, 2.4), (9.9, 0.88), (8.35, 0.88), text="score", shift=(-0.3, 0.0))
    _arrow(axis, reference["bottom"], (9.15, 0.72), (8.35, 0.72), text="log π_ref", shift=(-0.02, -0.18))
    _arrow(axis, (6.4, 1.06), policy["bottom"], text="update")
    return figure


def dpo_and_rlhf():
    """RLHF above, in two stages and a loop of sampling; DPO below, one loss on the same comparisons."""
    figure, axis = _canvas(10, 3.9, "RLHF and DPO")
    axis.text(0.15, 2.75, "RLHF", fontsize=10, va="center", weight="bold")
    pairs = _box(axis, 1.6, 2.75, "comparisons", "data", 1.3)
    learnt = _box(axis, 3.4, 2.75, "reward model", "trained", 1.4)
    judge = _box(axis, 5.3, 2.75, "reward model", "frozen", 1.4)
    loss = _box(axis, 7.2, 2.75, "PPO", "computed", 1.0)
    policy = _box(axis, 9.1, 2.75, "policy", "trained", 1.2)
    held = _box(axis, 7.2, 1.97, "reference", "frozen", 1.2, 0.4)
    _chain(axis, pairs, learnt, judge, loss, policy)
    _arrow(axis, held["top"], loss["bottom"], text="KL")
    _arrow(axis, policy["top"], (9.1, 3.3), (5.3, 3.3), judge["top"], text="samples, again and again")
    axis.plot([0.15, 9.85], [1.62, 1.62], color="#999999", linestyle=":", linewidth=1)
    axis.text(0.15, 1.15, "DPO", fontsize=10, va="center", weight="bold")
    pairs = _box(axis, 1.6, 1.15, "comparisons", "data", 1.3)
    loss = _box(axis, 6.05, 1.15, "−log σ( β Δ log π/π_ref )", "computed", 2.2)
    policy = _box(axis, 9.1, 1.15, "policy", "trained", 1.2)
    held = _box(axis, 3.4, 0.55, "reference", "frozen", 1.2, 0.4)
    _chain(axis, pairs, loss, policy)
    _arrow(axis, held["right"], (6.05, 0.55), loss["bottom"], text="log π_ref of both answers")
    return figure


def grpo_and_ppo():
    """PPO with its critic above, GRPO with its group below (after Shao et al. 2024, figure 4, redrawn)."""
    figure, axis = _canvas(10, 4.8, "PPO and GRPO")
    for y, name, texts, scores in ((3.5, "PPO", "completion o", "reward r"), (1.35, "GRPO", "o₁ … o_G", "r₁ … r_G")):
        axis.text(0.15, y, name, fontsize=10, va="center", weight="bold")
        prompt = _box(axis, 1.15, y, "prompt", "data", 0.8)
        policy = _box(axis, 2.45, y, "policy", "trained", 1.0)
        texts = _box(axis, 3.95, y, texts, "data", 1.2)
        judge = _box(axis, 5.75, y, "reward model", "frozen", 1.2, 0.4)
        held = _box(axis, 5.75, y + 0.6, "reference", "frozen", 1.2, 0.4)
        reward = _box(axis, 7.35, y, scores, "data", 0.95)
        _chain(axis, prompt, policy, texts, judge, reward)
        _arrow(axis, (4.87, y), (4.87, y + 0.6), held["left"])
        if name == "PPO":
            critic = _box(axis, 5.75, y - 0.6, "critic", "trained", 1.2, 0.4)
            how = _box(axis, 9.0, y, "GAE", "computed", 1.3)
            _arrow(axis, (4.87, y), (4.87, y - 0.6), critic["left"])
            _arrow(axis, critic["right"], (9.0, y - 0.6), how["bottom"], text="values V(s)")
            _arrow(axis, held["right"], (7.35, y + 0.6), reward["top"], text="KL, in the reward", shift=(0.1, 0.0))
            back = "advantage of each token: update policy and critic"
        else:
            how = _box(axis, 9.0, y, "(r − mean) / std\nof the group", "computed", 1.4)
            loss = _box(axis, 9.0, y + 0.6, "KL, in the loss", "computed", 1.4, 0.4)
            _arrow(axis, held["right"], loss["left"])
            back = "one advantage for all tokens of a completion: update the policy"
        _arrow(axis, reward["right"], how["left"])
        low = y - 1.1 if name == "PPO" else y - 0.65
        _arrow(axis, (9.35, how["bottom"][1]), (9.35, low), (2.45, low), policy["bottom"], text=back)
    return figure


def orpo_and_both():
    """RLHF, DPO and ORPO from the base model on: the stages, and the models in memory in the last one."""
    figure, axis = _canvas(10, 3.9, "From the base model: RLHF, DPO, ORPO", ("trained", "frozen"))
    axis.text(8.1, 3.5, "in memory in the last stage", ha="center", va="center", fontsize=9)
    axis.plot([6.62, 6.62], [0.4, 3.6], color="#999999", linestyle=":", linewidth=1)
    rows = (
        ("RLHF", ("SFT", "reward model", "RL"), ("policy", "critic"), ("reference", "reward model")),
        ("DPO", ("SFT", "DPO"), ("policy",), ("reference",)),
        ("ORPO", ("ORPO",), ("policy",), ()),
    )
    for y, (name, stages, trained, frozen) in zip((2.85, 1.85, 0.85), rows, strict=True):
        axis.text(0.15, y, name, fontsize=10, va="center", weight="bold")
        boxes = [_box(axis, 1.45, y, "base model", "frozen", 1.1)]
        boxes += [_box(axis, 2.95 + 1.5 * place, y, text, "trained", 1.15) for place, text in enumerate(stages)]
        _chain(axis, *boxes)
        for x, width, kind, models in ((7.35, 0.9, "trained", trained), (8.55, 1.2, "frozen", frozen)):
            for place, text in enumerate(models):
                _box(axis, x, y + 0.23 * (len(models) - 1) - 0.46 * place, text, kind, width, 0.36)
        count = len(trained) + len(frozen)
        axis.text(9.9, y, f"{count} model{'s' if count > 1 else ''}", ha="right", va="center", fontsize=8.5)
    return figure
