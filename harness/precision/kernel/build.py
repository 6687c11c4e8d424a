"""Compiling and caching the C++ kernel.

    python -m harness.precision.kernel.build      # says where the library is, or why there is none

The library is kept in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache, /lowprec-suite) under a hash of the
sources, the flags, the compiler's version and the processor, because -march=native code runs where it was made.
It is written beside its place and renamed, so that two processes may build at once. Where the cache cannot be written
it is made in a temporary folder for this process alone.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILE_SECONDS = 600

FLAGS = (
    "-std=c++17",
    "-O2",
    "-ftree-vectorize",
    "-fvect-cost-model=dynamic",
    "-ffp-contract=off",  # a fused multiply-add would round once where the twin rounds twice
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fwrapv",
    "-shared",
    "-fPIC",
    "-w",
)
ATTEMPTS = (("-march=native", "-fopenmp"), ("-march=native",), ())
"""Flags that a compiler may lack, most wanted first. Without OpenMP the kernel runs on one thread."""


class BuildError(RuntimeError):
    """There is no library, and this says why."""


def load_library() -> tuple[ctypes.CDLL, Path]:
    """The library and where it lies, built if need be. Raises BuildError."""
    compiler = find_compiler()
    path = library_path(compiler)
    if path.is_file() and path.stat().st_uid in (0, os.getuid()):  # another's file is not run
        try:
            return ctypes.CDLL(str(path)), path
        except OSError:  # cut off or of another machine: make it again
            pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        build(compiler, path)
    except OSError:  # a cache that cannot be written
        with tempfile.TemporaryDirectory(prefix="lowprec-suite-") as folder:
            path = Path(folder) / path.name
            build(compiler, path)
            return _loaded(path), path  # what is mapped outlives its file
    return _loaded(path), path


def build(compiler: list[str], path: Path) -> None:
    """Compile to `path`. Raises BuildError with the compiler's words, OSError where the folder cannot be written."""
    handle, name = tempfile.mkstemp(suffix=".so", prefix=".building-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        said = ""
        for optional in ATTEMPTS:
            command = [*compiler, *FLAGS, *optional, str(SOURCES / "quantize.cpp"), "-o", str(temporary)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(f"{compiler[0]} could not be run: {error}") from error
            if done.returncode == 0:
                temporary.chmod(0o755)
                temporary.replace(path)
                return
            said = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no message"
        raise BuildError(f"{shlex.join(compiler)} does not compile the kernel: {said}")
    finally:
        temporary.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    """The C++ compiler's command: $CXX, else g++, else clang++. Raises BuildError where there is none."""
    asked = os.environ.get("CXX")
    if asked is not None:
        try:
            words = shlex.split(asked)
        except ValueError:  # a quote that is not closed
            words = []
        if not words or shutil.which(words[0]) is None:
            raise BuildError(f"no C++ compiler: CXX={asked!r} is not a command")
        return words
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("no C++ compiler: neither g++ nor clang++ is installed, and CXX is not set")


def library_path(compiler: list[str]) -> Path:
    """Where the library lies once it is built. Raises BuildError where the compiler cannot be run."""
    return cache_folder() / f"quantize-{_fingerprint(compiler)}.so"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        home = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
        return home / "lowprec-suite"
    except RuntimeError:  # no home
        return Path(tempfile.gettempdir()) / f"lowprec-suite-{os.getuid()}"


def _fingerprint(compiler: list[str]) -> str:
    digest = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.h")), SOURCES / "quantize.cpp"):
        digest.update(path.name.encode() + path.read_bytes())
    for text in (*FLAGS, *(flag for flags in ATTEMPTS for flag in flags), *compiler):
        digest.update(text.encode() + b"\0")
    digest.update(_version(tuple(compiler)).encode() + _processor().encode())
    return digest.hexdigest()[:20]


@cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler[0]} could not be run: {error}") from error
    return done.stdout


@cache
def _processor() -> str:
    """What -march=native depends on: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split(":")[0].strip() in wanted)


def _loaded(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the compiled kernel does not load: {error}") from error


if __name__ == "__main__":
    try:
        print(load_library()[1])
    except BuildError as error:
        raise SystemExit(str(error)) from None
