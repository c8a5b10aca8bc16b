"""The README's fences run from the root of the checkout and print what the fence after them shows; links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


# Runs each fence in one namespace; a line of its own between their outputs.
DRIVER = """
import json, sys
namespace = {"__name__": "__main__"}
for number, code in enumerate(json.load(sys.stdin)):
    if number:
        print("\\x1e")
    exec(compile(code, f"README.md, python fence {number + 1}", "exec"), namespace)
"""


def fences() -> list[tuple[str, str]]:
    return FENCE.findall(README.read_text())


def python_fences() -> list[tuple[str, str]]:
    """Each python fence with the text fence right after it, which is what it prints; nothing without one."""
    found = fences()
    return [
        (code, after if kind_after == "text" else "")
        for (kind, code), (kind_after, after) in zip(found, [*found[1:], ("", "")], strict=True)
        if kind == "python"
    ]


def console_fences() -> list[str]:
    return [text for kind, text in fences() if kind == "console"]


@pytest.mark.usefixtures("smollm_folder")
def test_the_python_fences_run_in_order_and_print_what_the_readme_shows(repo: Path) -> None:
    code, shown = zip(*python_fences(), strict=True)
    done = subprocess.run(
        [sys.executable, "-c", DRIVER], cwd=repo, input=json.dumps(code), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\x1e\n") == list(shown)


@pytest.mark.parametrize("text", console_fences())
def test_a_console_fence_prints_what_the_readme_shows(repo: Path, text: str) -> None:
    command, _, shown = text.partition("\n")
    assert command.startswith("$ ")
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(shlex.split(command[2:]), cwd=repo, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown


def test_the_first_example_has_ten_lines_and_its_output() -> None:
    code, shown = python_fences()[0]
    assert shown
    assert len([line for line in code.splitlines() if line.strip()]) == 10


def test_every_file_that_a_document_links_to_exists(repo: Path) -> None:
    missing = []
    for document in [README, repo / "CONTRIBUTING.md", *sorted((repo / "docs").glob("*.md"))]:
        for markdown, html in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", document.read_text()):
            target = markdown or html
            if "://" not in target and not (document.parent / target).exists():
                missing.append(f"{document.name}: {target}")
    assert missing == []


def test_the_file_map_of_the_design_names_every_source_file(repo: Path) -> None:
    text = (repo / "docs" / "design.md").read_text()
    crates = [repo / "rust" / "core" / "src", repo / "rust" / "peer" / "src"]
    rust = [path.name for crate in crates for path in crate.glob("*.rs") if path.name != "lib.rs"]
    python = [path.name for path in (repo / "python" / "hotslot").glob("*.py") if not path.name.startswith("__")]
    assert [name for name in rust + python if f"`{name}`" not in text] == []
