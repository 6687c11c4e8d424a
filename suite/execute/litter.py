"""Checkpoints that nobody will ask for again: what killed workers wrote and could not name or take away."""

from __future__ import annotations

import fcntl
import os
import re
from types import TracebackType
from typing import TYPE_CHECKING

from suite.execute.folder import OutFolder

if TYPE_CHECKING:
    from results.store import Store

OURS = re.compile(r"([0-9a-f]{64})\.(safetensors|\d+\.partial)")


class InUse:
    """While entered, other commands know that this one uses the folder; `alone` until `share` is called.

    A worker names a checkpoint in its journal when it is on disk, and the database learns that later. So only who
    is alone, and has ingested all journals, can tell what is litter.
    """

    def __init__(self, out: OutFolder) -> None:
        self._path = out.root / "in-use.lock"
        self._fd = -1
        self.alone = False

    def __enter__(self) -> InUse:
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.alone = True
        except BlockingIOError:
            self.share()
        return self

    def share(self) -> None:
        """Let other commands in."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)
        self.alone = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def sweep(out: OutFolder, store: Store) -> None:
    """Delete checkpoints that the database does not need, and unfinished ones."""
    needed = store.needed_checkpoints()
    for path in out.checkpoints.iterdir():
        name = OURS.fullmatch(path.name)
        if name is not None and (name[2] != "safetensors" or name[1] not in needed):
            path.unlink()
