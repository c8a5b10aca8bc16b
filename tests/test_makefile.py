"""The Makefile's set-up says what is missing and what to do, before it installs anything."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = ["bash", "find", "awk", "env", "mkdir", "touch", "cargo", "rustc", "cc"]


def make(folder: Path, *arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shutil.which("make") or "make", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": str(path), "HOME": str(Path.home())},
    )


def write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def fresh(tmp_path: Path, repo: Path) -> tuple[Path, Path]:
    """A folder with the Makefile alone, and a PATH folder with links to each tool that the set-up looks for."""
    folder, path = tmp_path / "checkout", tmp_path / "bin"
    folder.mkdir()
    path.mkdir()
    shutil.copy(repo / "Makefile", folder)
    for name in ("pyproject.toml", "Cargo.toml"):
        (folder / name).touch()
    # A link would lose the interpreter its own folder.
    write_script(path / "python3", f'exec "{sys.executable}" "$@"')
    for tool in TOOLS:
        found = shutil.which(tool)
        assert found is not None, f"{tool} is needed to test the Makefile"
        (path / tool).symlink_to(found)
    return folder, path


@pytest.mark.parametrize(
    ("tool", "found", "fix"),
    [
        ("python3", "no python3 found; Python 3.10 or newer is needed", "make PYTHON="),
        ("cargo", "no cargo and rustc found; Rust 1.89 or newer is needed", "rustup"),
        ("rustc", "no cargo and rustc found; Rust 1.89 or newer is needed", "rustup"),
        ("cc", "no C compiler (cc) found", "build-essential"),
    ],
)
def test_a_missing_tool_is_named_with_the_fix(fresh: tuple[Path, Path], tool: str, found: str, fix: str) -> None:
    folder, path = fresh
    (path / tool).unlink()
    done = make(folder, "build", path=path)
    assert done.returncode != 0
    assert found in done.stderr
    assert fix in done.stderr
    assert not (folder / ".venv").exists()


@pytest.mark.parametrize(
    ("tool", "script", "found"),
    [
        (
            "python3",
            'if [ "$1" = --version ]; then echo "Python 3.9.18"; else exit 1; fi',
            "Python 3.9.18 found; Python 3.10 or newer is needed",
        ),
        ("rustc", 'echo "rustc 1.70.0 (90c541806 2023-05-31)"', "rustc 1.70.0"),
    ],
)
def test_a_tool_that_is_too_old_is_named_with_its_version(fresh: tuple[Path, Path], tool: str, script: str, found: str) -> None:
    folder, path = fresh
    (path / tool).unlink()
    write_script(path / tool, script)
    done = make(folder, "build", path=path)
    assert done.returncode != 0
    assert found in done.stderr
    assert not (folder / ".venv").exists()


def test_help_lists_every_target(repo: Path) -> None:
    listed = subprocess.run(["make", "help"], cwd=repo, capture_output=True, text=True, check=True).stdout
    text = (repo / "Makefile").read_text()
    phony = [line.split(":")[1].strip() for line in text.splitlines() if line.startswith(".PHONY:")]
    assert phony
    assert [target for target in phony if f"make {target} " not in listed] == []
