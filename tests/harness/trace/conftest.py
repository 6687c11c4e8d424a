"""A cache of tokens for the whole session, and ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ..parallel.conftest import run_ranks


@pytest.fixture(autouse=True, scope="session")
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUITE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(name="run_ranks")
def ranks() -> Callable[..., list[Any]]:
    return run_ranks
