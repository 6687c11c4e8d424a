"""From an exception to a message and an exit status.

0 fine; 1 a claim differs (`run --strict`); 2 the case or the command is wrong; 3 some runs failed; 4 the
environment is unfit; 5 nothing to run; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

OK, DIFFERS, WRONG, FAILED, UNFIT, NOTHING, INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
BROKEN_PIPE = 141
DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS})
"""Errors of writing, which come without the name of the file."""


class WrongCommand(Exception):  # noqa: N818
    """The command asks for something that does not exist; the message says what does."""


def settle(error: BaseException, arguments: Sequence[str]) -> int:
    """Tell the user what went wrong, without a traceback for what is not the suite's own fault."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return BROKEN_PIPE  # the command-line library saw it first
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else WRONG
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        _say("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # Whoever read our output has gone; keep the interpreter from complaining when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    show, code = getattr(error, "show", None), getattr(error, "exit_code", None)
    if callable(show) and isinstance(code, int):
        # A usage error of the command-line library, whose classes moved between its versions.
        show()
        return code
    code = _known(error)
    if code is not None:
        _say(f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error))
        return code
    _say(
        f"unexpected {type(error).__name__}: {_first_line(error)}; "
        f"the traceback is in {_keep(error, arguments)}"
    )
    return UNFIT


def _known(error: BaseException) -> int | None:
    """The exit status of an error that is the user's or the machine's; None for any other."""
    from harness.launch import LaunchError
    from results.database import NoDatabase, QueryError, StoreError
    from results.ingest import BadRunFolder
    from suite.declare.errors import CaseError
    from suite.execute.folder import FolderError
    from suite.execute.select import SelectionError

    if isinstance(error, WrongCommand | CaseError | SelectionError | NoDatabase | QueryError | BadRunFolder):
        return WRONG
    if isinstance(error, StoreError | FolderError | LaunchError):
        return UNFIT
    if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK):
        return UNFIT
    return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["no message"])[0]


def _keep(error: BaseException, arguments: Sequence[str]) -> Path:
    """Write the traceback below the out folder, or to the temporary folder where that cannot be written."""
    text = f"suite {' '.join(arguments)}\n\n{''.join(traceback.format_exception(error))}"
    name = f"crash-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.txt"
    for folder in (_out_folder(arguments), Path(tempfile.gettempdir())):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        except OSError:
            continue
        return folder / name
    _say(text)
    return Path("stderr")


def _out_folder(arguments: Sequence[str]) -> Path:
    """What `--out` says; the arguments may be the very thing that is wrong, so this only looks."""
    for position, argument in enumerate(arguments):
        if argument.startswith("--out="):
            return Path(argument.removeprefix("--out="))
        if argument == "--out" and position + 1 < len(arguments):
            return Path(arguments[position + 1])
    return Path("out")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
