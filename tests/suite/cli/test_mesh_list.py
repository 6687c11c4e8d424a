"""`suite list parallelisms`: ranks, scheme and communication in words."""

from harness.spec import ParallelismSpec
from suite.cli.list import list as show
from suite.cli.mesh_rows import exchanged, mesh_rows, scheme
from suite.declare import preset_texts


def test_every_preset_has_a_row(capsys):
    rows = {row["name"]: row for row in mesh_rows()}
    assert list(rows) == list(preset_texts("parallelisms"))
    assert (rows["single"]["ranks"], rows["single"]["scheme"], rows["single"]["exchanged"]) == (
        *(1, "one process"),
        "nothing",
    )
    assert rows["dp2-pp2-tp2"]["ranks"] == 8
    assert all(row["exchanged"] != "nothing" for row in rows.values() if row["ranks"] > 1)
    show("parallelisms")
    assert "DDP over 2, PP 2 (1f1b), TP 2" in capsys.readouterr().out


def test_words():
    mesh = ParallelismSpec(dp=4, zero=3, replicas=2, cp=2, tp=2, sequence_parallel=True)
    assert scheme(mesh) == "HSDP, 2 replicas of 2 shards, CP 2 (ring), TP 2 with sequence parallelism"
    assert exchanged(mesh).startswith(
        "dp+cp: weights twice and gradients once a micro-step, shards over replicas; cp: "
    )
    assert "4 all-gathers, 4 reduce-scatters a layer" in exchanged(mesh)
