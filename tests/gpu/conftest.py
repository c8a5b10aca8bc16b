"""What the tests of the CUDA path share: they run where there is a C++ compiler, and skip with the reason where there is none."""

from __future__ import annotations

import pytest

from .emulated import compiler


@pytest.fixture(scope="session", autouse=True)
def _needs_a_compiler() -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler (g++), which builds the emulator; on Debian and Ubuntu: apt-get install g++")


@pytest.fixture(params=["forward", "reverse", "7"])
def order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which of a block's threads goes on first; whatever passes in all orders waits where it has to."""
    monkeypatch.setenv("EMULATOR_ORDER", request.param)
    return str(request.param)
