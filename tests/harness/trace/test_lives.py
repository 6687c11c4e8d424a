"""The account of a step, on lives made by hand."""

from __future__ import annotations

from harness.trace.lives import Life, Lives, account


def test_what_a_storage_is_depends_on_how_long_it_lived() -> None:
    kept = Life(100, 1, "forward", "layers.0", died=6)
    passing = Life(50, 2, "forward", "layers.0", died=3)
    gathered = Life(30, 4, "forward", "layers.0", died=5, communicated=True)
    known = Life(7, 0, "forward", "other", known="weights")
    sent = Life(9, 7, "backward", "other", died=8, communicated=True)
    lives = Lives([kept, passing, gathered, known, sent], [(0, "forward"), (6, "backward")], 8)
    held = account(lives)
    assert held.total == 157  # after the second event
    assert held.peak == {
        "weights": 7,
        "gradients": 0,
        "optimizer": 0,
        "activations": 100,
        "communication": 0,
        "temporary": 50,
    }
    assert (held.moment, held.saved, held.layers) == ("forward", 100, {"layers.0": 100})


def test_a_buffer_of_a_collective_and_the_moment_of_the_peak() -> None:
    lives = Lives(
        [Life(5, 1, "forward", "other"), Life(20, 3, "update", "other", communicated=True)],
        [(0, "forward"), (2, "backward"), (3, "update")],
        3,
    )
    held = account(lives)
    assert (held.moment, held.peak["communication"], held.peak["activations"]) == ("update", 20, 5)


def test_saved_is_the_most_of_several_forward_passes() -> None:
    """As of microbatches in flight: two are kept at the end of the second forward pass, one at the last."""
    lives = [
        Life(10, 1, "forward", "layers.0", died=8),
        Life(10, 2, "forward", "layers.1", died=4),
        Life(10, 5, "forward", "layers.1", died=7),
    ]
    changes = [(0, "forward"), (3, "backward"), (5, "forward"), (6, "backward")]
    held = account(Lives(lives, changes, 8))  # type: ignore[arg-type]
    assert (held.saved, held.layers) == (20, {"layers.0": 10, "layers.1": 10})


def test_gradients_count_as_they_are_before_the_update() -> None:
    late = Life(16, 4, "update", "other", known="optimizer")
    gradient = Life(8, 2, "backward", "other", died=5, known="gradients")
    changes = [(0, "forward"), (1, "backward"), (3, "update")]
    held = account(Lives([late, gradient], changes, 5, update=3))  # type: ignore[arg-type]
    assert held.state == {"weights": 0, "gradients": 8, "optimizer": 0}


def test_nothing_at_all() -> None:
    held = account(Lives())
    assert (held.total, held.saved, held.largest) == (0, 0, ())
