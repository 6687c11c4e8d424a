"""One number a run from its measurements, and the names that claims may use."""

import math

import pytest

from results.records import METRICS
from suite.judge.catalogue import STATISTICS
from suite.judge.measures import UnknownMeasureError, find_measure, scope_matches

LOSS = [("", step, float(step)) for step in range(1, 11)]


@pytest.mark.parametrize(
    ("name", "points", "expected"),
    [
        ("final_loss", LOSS, 8.0),  # steps 6 to 10 of 10
        ("mean_loss", LOSS, 5.5),
        ("max_loss", LOSS, 10.0),
        ("first_loss", LOSS, 1.0),
        ("last_loss", LOSS, 10.0),
        ("final_val_loss", [("", 0, 5.0), ("", 10, 2.0)], 2.0),
        ("first_val_loss", [("", 0, 5.0), ("", 10, 2.0)], 5.0),
        ("throughput", [("", 1, 1.0), ("", 2, 100.0), ("", 3, 3.0)], 3.0),
        ("peak_bytes", [("total", 1, 5.0), ("weights", 1, 9.0), ("total", 2, 7.0)], 7.0),
        ("peak_bytes[weights]", [("total", 1, 5.0), ("weights", 1, 9.0)], 9.0),
        ("alignment_growth", [("layers.0", 0, 0.1), ("layers.1", 0, 0.3), ("layers.0", 9, 0.5)], 0.3),
        ("alignment_growth", [("layers.0", 0, 0.1), ("layers.1", 0, 0.3)], None),
        ("alignment_cosine_max", [("layers.0", 0, 0.1), ("layers.0", 9, 0.4), ("layers.1", 9, 0.6)], 0.5),
        (
            "quant_flushed_fraction[ffn.down.activations]",
            [
                ("layers.0.ffn.down.activations", 5, 0.2),
                ("layers.1.ffn.down.activations", 5, 0.4),
                ("layers.1.ffn.down.weights", 5, 0.9),
            ],
            0.3,
        ),
        ("quant_flushed_fraction", [("a", 5, 0.2), ("b", 5, 0.4)], 0.3),
        ("min_ffn_output_sqnr_db", [("layers.0", 5, 30.0), ("layers.1", 5, 12.0)], 12.0),
        ("final_loss", [], None),
        ("final_loss", [("", 1, 2.0)], None),  # nothing in the second half
        ("quant_sqnr_db[no.such.scope]", [("a", 5, 0.2)], None),
    ],
)
def test_statistic(name, points, expected):
    value = find_measure(name).of_run(points, 10)
    assert value == (None if expected is None else pytest.approx(expected))


def test_every_statistic_stands_on_a_registered_metric():
    for name, statistic in STATISTICS.items():
        assert statistic.metric in METRICS, name
        for suffix in ("", "_gap", "_ratio"):
            measure = find_measure(name + suffix)
            assert measure.statistic is statistic
            assert measure.comparison == suffix.removeprefix("_")


def test_names_with_comparison_and_scope():
    measure = find_measure("quant_clipped_fraction_ratio[ffn.*.gradients]")
    assert (measure.statistic.name, measure.comparison) == ("quant_clipped_fraction", "ratio")
    assert measure.unit == "ratio"
    assert find_measure("final_loss_gap").unit == "nats/token"
    assert find_measure("throughput_ratio").is_speed
    assert find_measure("throughput_ratio").direction == "higher"
    assert not find_measure("peak_bytes_gap").is_speed


@pytest.mark.parametrize("name", ["final_los", "final_loss_gaps", "", "loss gap", "final_loss[layers.0]"])
def test_unknown_names_say_what_is_known(name):
    with pytest.raises(UnknownMeasureError, match=r"final_loss"):
        find_measure(name)


def test_nearest_name_is_offered():
    with pytest.raises(UnknownMeasureError, match="nearest is 'throughput'"):
        find_measure("troughput_ratio")


@pytest.mark.parametrize(
    ("scope", "pattern", "matches"),
    [
        ("layers.0.ffn.down.activations", "ffn.down.activations", True),
        ("layers.0.ffn.down.activations", "layers.0.*", True),
        ("layers.0.ffn.down.activations", "*", True),
        ("layers.0.ffn.down.activations", "down.activation", False),
        ("layers.0.ffn.down.activations", "wn.activations", False),
        ("", "", True),
        ("total", "", False),
    ],
)
def test_scope_patterns(scope, pattern, matches):
    assert scope_matches(scope, pattern) is matches


def test_missing_values_do_not_poison_a_mean():
    assert find_measure("mean_loss").of_run([("", 1, math.nan), ("", 2, 2.0)], 2) == 2.0
