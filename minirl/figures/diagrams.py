"""Block diagrams: what is trained, what is frozen, and what flows where. Notebooks 00, 03, 13, 15, 16 and 17."""

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Patch

FILL = {"trained": "#BBDDF2", "frozen": "#E4E4E4", "data": "#FFFFFF", "loss": "#FBE3B5"}
MEANING = {"trained": "trained", "frozen": "frozen model", "data": "data, or a rule", "loss": "what is computed"}


def _canvas(width, height, title):
    """(figure, axis): an empty axis in units of boxes, x to the right and y up."""
    figure = Figure(figsize=(width * 1.05, height * 0.95), layout="constrained")
    axis = figure.subplots()
    axis.set(xlim=(-0.1, width), ylim=(-0.1, height), title=title)
    axis.axis("off")
    return figure, axis


def _box(axis, x, y, text, kind, width=1.7, height=0.62):
    """A box with its lower left corner at (x, y); returns its corners (left, bottom, right, top)."""
    axis.add_patch(FancyBboxPatch(
        (x, y), width, height, boxstyle="round,pad=0.02,rounding_size=0.08", facecolor=FILL[kind], edgecolor="#333333",
        linewidth=1.6 if kind == "trained" else 0.9, linestyle="--" if kind == "frozen" else "-",
    ))  # fmt: skip
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)
    return x, y, x + width, y + height


def _arrow(axis, start, end, text="", bend=0.0):
    """An arrow from box to box, side to side or top to bottom, with a word beside it."""
    (a, b, c, d), (e, f, g, h) = start, end
    if e >= c or g <= a:
        begin, stop = ((c, (b + d) / 2), (e, (f + h) / 2)) if e >= c else ((a, (b + d) / 2), (g, (f + h) / 2))
    else:
        begin, stop = (((a + c) / 2, b), ((e + g) / 2, h)) if f < b else (((a + c) / 2, d), ((e + g) / 2, f))
    axis.add_patch(FancyArrowPatch(
        begin, stop, arrowstyle="-|>", mutation_scale=11, color="#333333", linewidth=1.1,
        connectionstyle=f"arc3,rad={bend}", shrinkA=2, shrinkB=2,
    ))  # fmt: skip
    lift = abs(bend) * abs(stop[0] - begin[0]) / 2 if abs(bend) > 0.2 else 0.0  # where the middle of the arc is
    middle = (begin[0] + stop[0]) / 2, (begin[1] + stop[1]) / 2 + 0.05 + lift
    axis.text(*middle, text, ha="center", va="bottom", fontsize=7.5, color="#444444")


def _legend(axis, kinds):
    handles = [Patch(facecolor=FILL[kind], edgecolor="#333333", label=MEANING[kind]) for kind in kinds]
    axis.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, -0.09), ncols=len(kinds), frameon=False,
                fontsize=8)  # fmt: skip


def pipeline(notes=None):
    """From pre-training to verifiable rewards.

    Args:
        notes: dict stage -> a line under its box, such as a measured accuracy; stages: pretrain, sft, preferences,
            verifiable, orpo.
    """
    figure, axis = _canvas(9.4, 3.2, "The pipeline")
    notes = notes or {}
    names = {"pretrain": "pre-training", "sft": "SFT", "preferences": "preference tuning\n(RLHF or DPO)",
             "verifiable": "RL with\nverifiable rewards"}  # fmt: skip
    boxes = [_box(axis, 0.1 + 2.4 * i, 1.6, text, "trained") for i, text in enumerate(names.values())]
    for first, second in zip(boxes, boxes[1:], strict=False):
        _arrow(axis, first, second)
    orpo = _box(axis, 2.5, 0.15, "ORPO", "trained")
    _arrow(axis, boxes[0], orpo, bend=0.0)
    _arrow(axis, orpo, boxes[3], bend=0.18)
    for stage, box in zip(names, boxes, strict=True):
        axis.text((box[0] + box[2]) / 2, box[3] + 0.1, notes.get(stage, ""), ha="center", va="bottom", fontsize=8)
    axis.text((orpo[0] + orpo[2]) / 2, orpo[1] - 0.08, notes.get("orpo", ""), ha="center", va="top", fontsize=8)
    return figure


def one_loop_two_worlds():
    """The same algorithm between a text world and a control world."""
    figure, axis = _canvas(8.6, 3.2, "Two worlds, one loop")
    text = _box(axis, 0.1, 2.1, "TokenWorld\nprompts, rewards", "data")
    control = _box(axis, 0.1, 0.4, "ControlWorld\nstates, torques", "data")
    batch = _box(axis, 3.1, 1.25, "Batch\n(B, T)", "data", width=1.3)
    algorithm = _box(axis, 5.4, 1.25, "REINFORCE, TRPO,\nPPO, GRPO", "loss")
    policy = _box(axis, 5.4, 2.5, "policy(obs) -> Distribution", "trained", width=2.6, height=0.5)
    for world, bend in ((text, -0.1), (control, 0.1)):
        _arrow(axis, world, batch, "collect", bend)
    _arrow(axis, batch, algorithm, "update")
    _arrow(axis, algorithm, policy)
    _arrow(axis, policy, text, "acts")
    return figure


def rlhf_and_classic_rl():
    """Classic reinforcement learning above, RLHF below: who gives the reward, and what holds the policy."""
    figure, axis = _canvas(8.4, 4.0, "Classic RL and RLHF")
    for y, world, reward, kind in ((2.7, "environment", "its own reward", "data"),
                                   (0.7, "prompts", "reward model", "frozen")):  # fmt: skip
        policy = _box(axis, 0.1, y, "policy", "trained")
        place = _box(axis, 3.0, y, world, "data")
        judge = _box(axis, 5.9, y, reward, kind)
        _arrow(axis, policy, place, "actions" if y > 2 else "completions")
        _arrow(axis, place, judge)
        _arrow(axis, judge, policy, "reward", bend=0.32 if y > 2 else 0.3)
    reference = _box(axis, 3.0, -0.05, "reference", "frozen", height=0.45)
    _arrow(axis, reference, policy, "KL penalty")
    _legend(axis, ("trained", "frozen", "data"))
    return figure


def dpo_and_rlhf():
    """RLHF in two stages above, DPO in one below."""
    figure, axis = _canvas(9.0, 3.6, "RLHF and DPO")
    pairs = _box(axis, 0.1, 2.4, "comparisons", "data")
    reward = _box(axis, 2.5, 2.4, "reward model", "trained")
    loop = _box(axis, 4.9, 2.4, "sample, score, PPO", "loss")
    policy = _box(axis, 7.2, 2.4, "policy", "trained", width=1.4)
    for first, second in ((pairs, reward), (reward, loop), (loop, policy)):
        _arrow(axis, first, second)
    pairs = _box(axis, 0.1, 0.6, "comparisons", "data")
    loss = _box(axis, 3.4, 0.6, "logistic loss of\nβ log π/π_ref", "loss", width=2.2)
    policy = _box(axis, 7.2, 0.6, "policy", "trained", width=1.4)
    for first, second in ((pairs, loss), (loss, policy)):
        _arrow(axis, first, second)
    _legend(axis, ("trained", "data", "loss"))
    return figure


def grpo_and_ppo():
    """PPO with its critic above, GRPO with its group below."""
    figure, axis = _canvas(9.4, 4.0, "PPO and GRPO")
    rows = ((2.5, ("reward", "critic"), "GAE"), (0.5, ("reward", "reference"), "compare within\nthe group"))
    for y, models, how in rows:
        prompt = _box(axis, 0.0, y, "prompt", "data", width=1.1)
        policy = _box(axis, 1.7, y, "policy", "trained", width=1.3)
        texts = _box(axis, 3.7, y, "one completion" if y > 2 else "G completions", "data", width=1.6)
        kinds = {"reward": "frozen", "critic": "trained", "reference": "frozen"}
        made = [_box(axis, 5.8, y + shift, name, kinds[name], width=1.3, height=0.42)
                for name, shift in zip(models, (0.45, -0.3), strict=True)]  # fmt: skip
        advantage = _box(axis, 7.7, y, how, "loss", width=1.5)
        _arrow(axis, prompt, policy)
        _arrow(axis, policy, texts)
        for box in made:
            _arrow(axis, texts, box)
            if box is made[0] or y > 2:
                _arrow(axis, box, advantage)
    axis.text(6.45, 0.02, "its KL is in the loss", ha="center", va="top", fontsize=7.5)
    _legend(axis, ("trained", "frozen", "data", "loss"))
    return figure


def orpo_and_both():
    """What RLHF, DPO and ORPO keep in memory and in how many stages they come from a base model."""
    figure, axis = _canvas(9.2, 4.2, "From the base model: RLHF, DPO, ORPO")
    rows = (("RLHF", ("base", "SFT", "reward model", "policy + critic")), ("DPO", ("base", "SFT", "policy")),
            ("ORPO", ("base", "policy")))  # fmt: skip
    for index, (name, stages) in enumerate(rows):
        y = 3.1 - 1.3 * index
        axis.text(0.0, y + 0.3, name, fontsize=11, va="center")
        boxes = [_box(axis, 0.9 + 2.1 * place, y, text, "trained", width=1.55) for place, text in enumerate(stages)]
        for first, second in zip(boxes, boxes[1:], strict=False):
            _arrow(axis, first, second)
        if name != "ORPO":
            axis.text(boxes[-1][2] + 0.1, y + 0.3, "+ frozen\nreference", fontsize=8, va="center")
    return figure
