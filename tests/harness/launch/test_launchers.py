"""Both launchers against the same expectations."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.launch import Exit, Launcher, LaunchError, Request, choose_mode, open_launcher
from harness.launch.child import address_space_bytes
from harness.launch.fork import ForkLauncher

MakeRunDir = Callable[..., Path]


@pytest.fixture(params=["spawn", "fork"])
def launcher(request: pytest.FixtureRequest) -> Iterator[Launcher]:
    opened = open_launcher(request.param, worker="fake_worker")
    yield opened
    opened.close()


def collect(launcher: Launcher, number: int, limit_s: float = 20.0) -> dict[str, Exit]:
    deadline = time.monotonic() + limit_s
    exits: dict[str, Exit] = {}
    while len(exits) < number:
        assert time.monotonic() < deadline, f"only {exits} ended"
        exits.update({exit.run_dir.parent.name: exit for exit in launcher.wait(0.5)})
    return exits


def wait_for(condition: Callable[[], bool], what: str, limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.02)


def processes_with(text: str) -> list[int]:
    """Pids whose command line contains the text."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if text in line and state != "Z":
                found.append(int(folder.name))
    return found


def pid_of(run_dir: Path) -> int:
    log = run_dir.parents[2] / "order.txt"
    for line in log.read_text().splitlines() if log.exists() else []:
        key, _, pid = line.split()
        if key == run_dir.parent.name:
            return int(pid)
    return 0


def test_exit_statuses(launcher: Launcher, make_run_dir: MakeRunDir) -> None:
    expected = {"fine": 0, "oom": 10, "nan": 11, "raise": 1, "segv": -signal.SIGSEGV}
    for what in expected:
        launcher.start(Request(make_run_dir(what, do=what)))
    exits = collect(launcher, len(expected))
    assert {key: exit.code for key, exit in exits.items()} == expected
    stderr = (exits["raise"].run_dir / "stderr.txt").read_text()
    assert stderr.strip().endswith("RuntimeError: this worker was told to fail")
    assert (exits["fine"].run_dir / "rank0.journal").read_bytes().count(b'"loss"') == 2


def test_memory_limit(launcher: Launcher, make_run_dir: MakeRunDir) -> None:
    launcher.start(Request(make_run_dir("tight", do="memory"), memory_bytes=64 * 2**20))
    launcher.start(Request(make_run_dir("roomy", do="memory"), memory_bytes=512 * 2**20))
    launcher.start(Request(make_run_dir("free", do="memory")))
    codes = {key: exit.code for key, exit in collect(launcher, 3).items()}
    assert codes == {"tight": 10, "roomy": 0, "free": 0}


def test_own_group_and_kill_of_descendants(launcher: Launcher, make_run_dir: MakeRunDir) -> None:
    run_dir = make_run_dir("deaf", do="spin")
    launcher.start(Request(run_dir))
    wait_for(lambda: launcher.wait(0.02) == [] and pid_of(run_dir) > 0, "started")
    pid = pid_of(run_dir)
    wait_for(lambda: len(processes_with(f"time.sleep(60) {pid}")) == 1, "the worker's own child")
    assert os.getsid(pid) == os.getpgid(pid) == pid
    launcher.signal(run_dir, signal.SIGTERM)
    assert launcher.wait(0.5) == [], "it ignores SIGTERM"
    launcher.signal(run_dir, signal.SIGKILL)
    assert collect(launcher, 1)["deaf"].code == -signal.SIGKILL
    wait_for(lambda: processes_with(f"time.sleep(60) {pid}") == [], "the worker's child is gone")


def test_children_left_behind_are_killed(launcher: Launcher, make_run_dir: MakeRunDir) -> None:
    run_dir = make_run_dir("leaves", do="spin")
    launcher.start(Request(run_dir))
    wait_for(lambda: launcher.wait(0.02) == [] and pid_of(run_dir) > 0, "started")
    pid = pid_of(run_dir)
    wait_for(lambda: len(processes_with(f"time.sleep(60) {pid}")) == 1, "the worker's own child")
    os.kill(pid, signal.SIGKILL)
    assert collect(launcher, 1)["leaves"].code == -signal.SIGKILL
    wait_for(lambda: processes_with(f"time.sleep(60) {pid}") == [], "the worker's child is gone")


def test_close_ends_everything(launcher: Launcher, make_run_dir: MakeRunDir) -> None:
    run_dir = make_run_dir("open", do="hang")
    launcher.start(Request(run_dir))
    wait_for(lambda: launcher.wait(0.02) == [] and pid_of(run_dir) > 0, "started")
    pid = pid_of(run_dir)
    assert pid in processes_with("harness.launch")
    launcher.close()
    wait_for(lambda: not Path(f"/proc/{pid}").exists() or pid not in processes_with("harness.launch"), "dead")


def test_wait_returns_when_nothing_happens(launcher: Launcher) -> None:
    assert launcher.wait(0.01) == []


@pytest.mark.parametrize("mode", ["spawn", "fork"])
def test_no_orphan_after_kill_of_parent(mode: str, make_run_dir: MakeRunDir, tmp_path: Path) -> None:
    run_dirs = [make_run_dir("one", do="hang"), make_run_dir("two", do="hang")]
    script = (
        "import sys; from pathlib import Path; from harness.launch import Request, open_launcher\n"
        "launcher = open_launcher(sys.argv[1], worker='fake_worker')\n"
        "for folder in sys.argv[2:]: launcher.start(Request(Path(folder)))\n"
        "while True: launcher.wait(1)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, mode, *map(str, run_dirs)])
    try:
        wait_for(lambda: all(pid_of(run_dir) for run_dir in run_dirs), "both started")
        assert {pid_of(run_dir) for run_dir in run_dirs} <= {*processes_with("harness.launch")}
        assert processes_with(f"--parent {parent.pid} ") != []
    finally:
        parent.kill()
        parent.wait()
    pids = [pid_of(run_dir) for run_dir in run_dirs]
    wait_for(lambda: not any(pid in processes_with("harness.launch") for pid in pids), "workers are gone")
    wait_for(lambda: processes_with(f"--parent {parent.pid} ") == [], "the zygote is gone")


def test_zygote_killed(make_run_dir: MakeRunDir) -> None:
    launcher = ForkLauncher("fake_worker")
    run_dir = make_run_dir("victim", do="hang")
    launcher.start(Request(run_dir))
    wait_for(lambda: launcher.wait(0.02) == [] and pid_of(run_dir) > 0, "started")
    worker = pid_of(run_dir)
    zygote = int(Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[1])
    os.kill(zygote, signal.SIGKILL)
    exit = collect(launcher, 1)["victim"]
    assert exit.code is None
    assert "killed by signal 9" in exit.reason
    launcher.start(Request(make_run_dir("after")))
    assert collect(launcher, 1)["after"].code == 0
    launcher.close()


def test_zygote_killed_while_loading(make_run_dir: MakeRunDir) -> None:
    """Somebody's kill is no proof that the worker cannot be loaded."""
    launcher = ForkLauncher("fake_worker")
    launcher.start(Request(make_run_dir("early", do="hang")))
    wait_for(lambda: len(processes_with(f"--parent {os.getpid()} ")) == 1, "the zygote")
    os.kill(processes_with(f"--parent {os.getpid()} ")[0], signal.SIGKILL)
    exit = collect(launcher, 1)["early"]
    assert exit.code is None and "killed by signal 9" in exit.reason
    launcher.start(Request(make_run_dir("after")))
    assert collect(launcher, 1)["after"].code == 0
    launcher.close()


def test_worker_that_cannot_be_loaded(make_run_dir: MakeRunDir) -> None:
    launcher = ForkLauncher("no_such_worker")
    launcher.start(Request(make_run_dir("never")))
    with pytest.raises(LaunchError, match="No module named 'no_such_worker'"):
        collect(launcher, 1)


def test_choice_of_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SUITE_LAUNCH", raising=False)
    assert choose_mode("cuda")[0] == "spawn"
    assert choose_mode("cpu")[0] == ("fork" if sys.platform == "linux" else "spawn")
    monkeypatch.setenv("SUITE_LAUNCH", "spawn")
    assert choose_mode("cpu") == ("spawn", "SUITE_LAUNCH is set")
    monkeypatch.setenv("SUITE_LAUNCH", "thread")
    with pytest.raises(LaunchError, match="fork or spawn"):
        choose_mode("cpu")


def test_address_space_is_read() -> None:
    assert address_space_bytes() > 2**20
