"""The tour's table. The tour itself is run as a command, by the slow tests and by CI."""

from minirl.experiments.tour import COLUMNS, Progress, Tour


def test_columns_that_nothing_is_in_are_left_out():
    progress, empty = Progress(Tour()), dict.fromkeys(COLUMNS, "")
    progress.rows = [
        empty | {"stage": "ppo", "accuracy_greedy_after": 0.31, "kl_to_sft": 0.421},
        empty | {"stage": "ppo Walker2d-v5", "return_after": 334.2},
    ]
    assert progress.cells() == (
        ["stage", "after", "KL to SFT (nats)", "after"],
        [["ppo", "31%", "0.42", ""], ["ppo Walker2d-v5", "", "", "334"]],
    )
    assert "pairs right" not in progress.table() and progress.table().count("\n") == 3
