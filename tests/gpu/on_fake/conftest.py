"""Tests on the fake driver, collected only in the process that `test_on_fake.py` starts: one that finds no other driver."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .. import fake_driver

collect_ignore_glob = [] if "HOTSLOT_FAKE_DRIVER" in os.environ else ["test_*.py"]


@pytest.fixture
def fake() -> Iterator[fake_driver.FakeDriver]:
    """The fake driver; at the end nothing may have been used after its end."""
    fake = fake_driver.load()
    fake.heal()
    fake.forget()
    yield fake
    fake.heal()
    assert fake.problems() == ""
    fake.forget()
