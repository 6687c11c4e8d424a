"""Where things lie below the folder given by `--out`, and the locks in it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType


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


class FileLock:
    """An advisory lock on a file; it falls with the process that holds it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def acquire(self, *, wait: bool = False) -> bool:
        """Take the lock; True when it is ours, at once or after others have given it back (`wait`)."""
        if self._fd is not None:
            return True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Give the lock back; harmless when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> FileLock:
        self.acquire(wait=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def key_lock(out: OutFolder, key: str) -> FileLock:
    """The lock of a key: whoever holds it runs that key."""
    return FileLock(out.journals / key / "lock")


def is_locked(out: OutFolder, key: str) -> bool:
    """True while some process is running the key."""
    lock = key_lock(out, key)
    if not lock.path.exists() or lock.acquire():
        lock.release()
        return False
    return True
