"""The tables of README.md, from the runs beside it.

    python data/posttraining/tables.py             prints them
    python data/posttraining/tables.py RUN SEED    first takes what a story in the folder RUN wrote into seed-SEED/
"""

import csv
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
SEEDS = (1, 2, 3)
KEPT = ("results", "wins", "costs", "r1-zero", "r1-zero-from-random", "supervision")
CURVES = ("ppo-with-KL", "ppo-without-KL")


def read(path):
    """Rows of a CSV file."""
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


def take(run, seed):
    """Copy a story's tables, and of its longest curves the evaluations."""
    target = HERE / f"seed-{seed}"
    target.mkdir(exist_ok=True)
    for name in KEPT:
        shutil.copyfile(run / f"{name}.csv", target / f"{name}.csv")
    shutil.copyfile(run / "reward-model" / "metrics.csv", target / "reward-model.csv")
    for name in CURVES:
        rows = [row for row in read(run / name / "metrics.csv") if row["eval_score_sampled"]]
        with open(target / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def of_seeds(name):
    """A file of each seed."""
    return [read(HERE / f"seed-{seed}" / f"{name}.csv") for seed in SEEDS]


def join(values, form):
    """Values of the seeds in one cell."""
    return " / ".join(format(float(value), form) for value in values)


def methods():
    """The table of all methods, the best true score first."""
    tables = [{row["method"]: row for row in rows} for rows in of_seeds("results")]
    print("| method | true score | learned score | KL to SFT, nats | wins against SFT | seconds |")
    print("|---|---|---|---|---|---|")
    for name in sorted(tables[0], key=lambda name: -sum(float(table[name]["true_score"]) for table in tables)):
        rows = [table[name] for table in tables]
        cells = [join([row[key] for row in rows], form) for key, form in (
            ("true_score", ".2f"), ("learned_score", ".2f"), ("kl_to_sft", ".2f"), ("wins_against_sft", ".0%"))]
        seconds = [float(row["seconds"]) for row in rows if row["seconds"]]
        cells.append(f"{sum(seconds) / len(seconds):.0f}" if seconds else "")
        print(f"| {name} | {' | '.join(cells)} |")


def reward_models():
    """What the reward models are worth."""
    last = [rows[-1] for rows in of_seeds("reward-model")]
    print("\n| reward model, on held-out pairs and samples | seed 1 | seed 2 | seed 3 |\n|---|---|---|---|")
    for key, words in (
        ("eval_accuracy", "pairs right"),
        ("eval_accuracy_of_the_truth", "pairs right if one knew the truth (the annotator errs)"),
        ("eval_rank_correlation", "rank correlation with the true score"),
        ("eval_best_of_16_gain_kept", "share of the true gain of best-of-16 that it keeps"),
        ("eval_brier", "Brier score"),
    ):  # fmt: skip
        print(f"| {words} | {' | '.join(format(float(row[key]), '.3f') for row in last)} |")
    print("share of the possible accuracy:", join(
        [float(row["eval_accuracy"]) / float(row["eval_accuracy_of_the_truth"]) for row in last], ".3f"))


def over_optimisation():
    """Where PPO without a penalty was best, and how it ended."""
    key = next(name for name in of_seeds("ppo-without-KL")[0][0] if "true_score_sampled" in name)
    for seed, rows in zip(SEEDS, of_seeds("ppo-without-KL"), strict=True):
        best = max(rows, key=lambda row: float(row[key]))
        below = sum(float(row["eval_kl_policy_ref"]) < 20 for row in rows)
        print(f"seed {seed}: best true score {float(best[key]):.2f} at {float(best['eval_kl_policy_ref']):.1f} nats, "
              f"at the end {float(rows[-1][key]):.2f} at {float(rows[-1]['eval_kl_policy_ref']):.0f} nats, "
              f"learned {float(rows[-1]['eval_score_sampled']):.2f}; {below} evaluations below 20 nats")


def reasoning():
    """R1-Zero's first and last evaluation, and the updates that each kind of supervision took."""
    for name in ("r1-zero", "r1-zero-from-random"):
        for key in ("format_sampled", "accuracy_sampled", "accuracy_greedy"):
            curves = [[float(row[f"eval_{key}"]) for row in rows if row.get(f"eval_{key}")] for rows in of_seeds(name)]
            print(f"{name} {key}: {join([c[0] for c in curves], '.2f')} -> {join([c[-1] for c in curves], '.2f')}")
    for run in ("outcome", "process"):
        needed = [next((row["update"] for row in rows if row["run"] == run and row["eval_accuracy_sampled"]
                        and float(row["eval_accuracy_sampled"]) >= 0.9), "never") for rows in of_seeds("supervision")]
        print(f"{run} supervision, updates to 90 %: {'/'.join(needed)}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        take(Path(sys.argv[1]), int(sys.argv[2]))
    for table in (methods, reward_models, over_optimisation, reasoning):
        table()
