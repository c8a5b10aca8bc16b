"""What all Python tests share: one OpenMP thread, no hub, and the small real model."""

from __future__ import annotations

import os

# Both before torch is imported: a second OpenMP thread stalls on a busy machine, and nothing may wait for a hub.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def repo() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def adapters(repo: Path) -> Path:
    """The folder with the demo's four trained adapters."""
    return repo / "examples" / "adapters"


@pytest.fixture(scope="session")
def smollm_folder() -> Path:
    """The folder of the converted SmolLM2-135M-Instruct, downloaded if it is not there yet."""
    from hotslot import smollm

    return smollm.ensure()
