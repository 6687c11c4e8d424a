"""What killed workers leave in the folder of checkpoints goes; what anybody may still ask for stays."""

from __future__ import annotations

from suite.execute import OutFolder
from suite.execute.litter import InUse

LITTER = ("a" * 64 + ".safetensors", "b" * 64 + ".123.partial")
STRANGERS = ("notes.txt", "model.safetensors")


def strew(bench) -> None:
    (bench.out / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name in LITTER + STRANGERS:
        (bench.out / "checkpoints" / name).touch()


def names(bench) -> set[str]:
    return {path.name for path in (bench.out / "checkpoints").iterdir()}


def test_the_next_command_removes_litter(bench, make) -> None:
    done, failed = make(0), make(1, steps=4, do="raise", at=3, step_s=0.01)
    bench.run(done, failed)
    before = names(bench)
    assert len(before) > 2
    strew(bench)
    bench.run(done)
    needed = {f"{sha256}.safetensors" for sha256 in bench.store.needed_checkpoints()}
    assert names(bench) == (before & needed) | set(STRANGERS)
    resume = bench.store.resume_checkpoint(failed.key)
    assert resume is not None and f"{resume[0]}.safetensors" in names(bench)


def test_not_while_another_command_uses_the_folder(bench, make) -> None:
    strew(bench)
    with InUse(OutFolder(bench.out)) as other:
        assert other.alone
        other.share()
        bench.run(make(0))
        assert {*LITTER} <= names(bench)
    bench.run(make(0))
    assert not {*LITTER} & names(bench)
