"""Where things lie below the folder given by `--out`, and the lock of each run's key."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path


class FolderError(Exception):
    """The out folder cannot be written."""


@dataclass(frozen=True)
class OutFolder:
    """Paths of one results folder."""

    root: Path

    @property
    def database(self) -> Path:
        return self.root / "suite.duckdb"

    @property
    def journals(self) -> Path:
        return self.root / "journals"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def site(self) -> Path:
        return self.root / "site"

    def create(self) -> None:
        """Make the folders; raises FolderError when that, or writing into them, is impossible."""
        try:
            for folder in (self.root, self.journals, self.checkpoints):
                folder.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".write-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise FolderError(
                f"cannot write to the out folder {self.root}: {error.strerror or error}; "
                f"choose another with --out DIR"
            ) from error

    def run_dir(self, key: str, attempt: int) -> Path:
        """Folder of one attempt at one key."""
        return self.journals / key / str(attempt)

    def attempts(self, key: str) -> list[int]:
        """Numbers of the attempts that have a folder, in order."""
        folder = self.journals / key
        if not folder.is_dir():
            return []
        return sorted(
            int(entry.name) for entry in folder.iterdir() if entry.name.isdigit() and entry.is_dir()
        )

    def checkpoint(self, sha256: str) -> Path:
        """File of a checkpoint's content."""
        return self.checkpoints / f"{sha256}.safetensors"


class KeyLock:
    """An advisory lock: whoever holds it runs that key, and it falls with the process that held it."""

    def __init__(self, out: OutFolder, key: str) -> None:
        self.path = out.journals / key / "lock"
        self._fd: int | None = None

    def acquire(self) -> bool:
        """Take the lock if nobody else has it; True when it is ours."""
        if self._fd is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_locked(out: OutFolder, key: str) -> bool:
    """True while some process is running the key."""
    lock = KeyLock(out, key)
    if not lock.path.exists() or lock.acquire():
        lock.release()
        return False
    return True
