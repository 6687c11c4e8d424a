"""Asking a worker what number formats would do to the tensors of a file; `suite quantize` prints the answer."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.launch.base import LaunchError, python_command, worker_environment
from harness.spec.notation import cast_name, parse_cast

SUFFIXES = (".npy", ".npz", ".safetensors")
UNFIT = 4
GRACE_S = 10.0


class QuantizeError(Exception):
    """The request or the file is wrong; the message names the file, the value and what is allowed."""


@dataclass(frozen=True)
class Request:
    """What to measure: casts in one word each, and where their dequantised tensors go."""

    file: Path
    casts: tuple[str, ...]
    tensors: str | None = None
    along: int = -1
    seed: int = 0
    outs: dict[str, Path] | None = None


def parse_casts(texts: Sequence[str]) -> tuple[str, ...]:
    """The casts that comma lists name, as they were written, each once. Raises QuantizeError."""
    names: dict[str, str] = {}
    for text in (part.strip() for words in texts for part in words.split(",")):
        if not text:
            continue
        try:
            spec = parse_cast(text)
        except ValueError as error:
            raise QuantizeError(f"--format {text}: {error}") from None
        if spec.scaling == "delayed":
            raise QuantizeError(
                f"--format {text}: delayed scaling takes its scale from earlier steps, which a file has not; "
                f"take {text.partition(':')[0]}:current, or static=S"
            )
        names.setdefault(cast_name(spec), text)
    if not names:
        raise QuantizeError("--format names no cast; for example: --format mxfp8,int4:group128")
    return tuple(names.values())


def check_file(file: Path) -> None:
    """Raises QuantizeError unless the path is something the worker reads."""
    if not file.exists():
        raise QuantizeError(
            f"{file} does not exist; name a {', '.join(SUFFIXES)} file or a checkpoint's folder"
        )
    if not file.is_file() and not file.is_dir():
        raise QuantizeError(f"{file}: is a pipe or a device; only files are read, so write it to one first")
    index = file.name.endswith(".safetensors.index.json")
    if file.is_file() and file.suffix not in SUFFIXES and not index:
        raise QuantizeError(
            f"{file}: {file.suffix or 'a file without a suffix'} is not read; allowed are {', '.join(SUFFIXES)}, "
            "a folder of .safetensors, or its *.safetensors.index.json"
        )


def output_paths(file: Path, casts: Sequence[str], out: Path | None) -> dict[str, Path] | None:
    """Cast -> file: `out` itself where it is a file's name, else STEM.CAST.SUFFIX in that folder."""
    if out is None:
        return None
    suffix = file.suffix if file.suffix in (".npy", ".npz") else ".safetensors"
    if out.suffix in SUFFIXES and not out.is_dir():
        if out.suffix != suffix:
            raise QuantizeError(f"--out {out}: what came from {file.name} is written as {suffix}")
        if len(casts) > 1:
            raise QuantizeError(f"--out {out}: is one file, but there are {len(casts)} casts; name a folder")
        paths = {casts[0]: out}
    elif out.exists() and not out.is_dir():
        raise QuantizeError(f"--out {out}: is no folder; name one, or a file that ends in {suffix}")
    else:
        stem = file.name.removesuffix(".index.json").removesuffix(suffix) or "tensors"
        paths = {cast: out / f"{stem}.{re.sub('[^A-Za-z0-9.+-]+', '-', cast)}{suffix}" for cast in casts}
    for path in paths.values():
        if path.exists() and path.resolve() == file.resolve():
            raise QuantizeError(f"--out {out}: {path} is the input; name another file")
    return paths


def ask(request: Request) -> Generator[dict[str, Any], None, None]:
    """The worker's answers as they come (see `harness.quantize.__main__`). Leaving the loop ends the worker.

    Raises QuantizeError for what is wrong with the file, OSError for what cannot be read or written, LaunchError when
    the worker dies.
    """
    outs = {cast: str(path) for cast, path in request.outs.items()} if request.outs else None
    content = {
        "file": str(request.file),
        "casts": request.casts,
        "tensors": request.tensors,
        "along": request.along,
        "seed": request.seed,
        "outs": outs,
    }
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen(
            python_command("harness.quantize"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=worker_environment(),
        )
        assert worker.stdin is not None and worker.stdout is not None
        try:
            worker.stdin.write(json.dumps(content) + "\n")
            worker.stdin.flush()
            for line in worker.stdout:
                answer = json.loads(line)
                if answer["k"] == "error":
                    _fail(answer)
                yield answer
            if worker.wait() != 0:
                errors.seek(0)
                said = errors.read().strip().splitlines()
                raise LaunchError(
                    f"{request.file}: the measuring process ended with {worker.returncode}"
                    + (f": {said[-1]}" if said else "; if it was killed, memory may be short")
                )
        except BrokenPipeError:
            raise LaunchError(f"{request.file}: the measuring process did not start") from None
        finally:
            _end(worker)


def _fail(answer: dict[str, Any]) -> None:
    if answer["code"] == UNFIT:
        where, _, reason = answer["text"].rpartition(": ")
        raise OSError(0, reason, where)
    raise QuantizeError(answer["text"])


def _end(worker: subprocess.Popen[str]) -> None:
    """Let the worker clear away what it was writing: the end of its stdin tells it."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(OSError):  # it may have gone already
        worker.stdin.close()
    worker.stdout.close()
    try:
        worker.wait(GRACE_S)
    except BaseException:
        worker.kill()
        worker.wait()
        raise
