"""Where the data files that ship with the suite lie: in the installed wheel, else in the source tree."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


@cache
def _data_dir(name: str) -> Path:
    """`suite/data/NAME` of a wheel, or `NAME/` beside the package in a checkout."""
    packaged = _PACKAGE / "data" / name
    return packaged if packaged.is_dir() else _PACKAGE.parent / name


def cases_dir() -> Path:
    """Folder of the built-in cases, `papers.yaml`, `models.yaml` and `presets/`."""
    return _data_dir("cases")


def site_dir() -> Path:
    """Folder of the report's `templates/` and `static/`."""
    return _data_dir("site")
