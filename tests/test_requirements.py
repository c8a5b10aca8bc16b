"""Each extra of the package installs all that its users need: an interpreter that sees nothing else can do the work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from gguf_model import write_gguf
from packaging.requirements import Requirement
from serving import save_model

import hotslot

tomllib = pytest.importorskip("tomllib")

ROOT = Path(__file__).parents[1]
DEMO = """
from pathlib import Path
from transformers import AutoModelForCausalLM
from hotslot import demo, smollm
smollm._convert(Path("tiny.gguf").absolute(), Path("converted"))
print(type(AutoModelForCausalLM.from_pretrained("converted")).__name__)
"""
SERVER = """
from hotslot import cli
from hotslot.server import app
from hotslot.server.service import load_model
from hotslot.server.settings import Settings
print(type(load_model(Settings(model="tiny.gguf"))[0]).__name__)
"""
RAY = f"""
import hotslot.ray
from hotslot.ray import gathering, replica
hotslot.ray.build({{"model": "tiny.gguf"}})
{SERVER}
"""


def installed(extra: str) -> set[str]:
    """The distributions that `pip install hotslot[extra]` brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [Requirement(text) for text in project["dependencies"] + project["optional-dependencies"][extra]]
    found: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = requirement.name.lower().replace("_", "-")
        if name not in found:
            found.add(name)
            wanted += needed(name, requirement.extras)
    return found


def needed(name: str, extras: set[str]) -> Iterator[Requirement]:
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


@pytest.mark.parametrize(("extra", "program"), [("demo", DEMO), ("server", SERVER), ("ray", RAY)])
def test_what_an_extra_installs_is_all_that_it_needs(extra: str, program: str, tmp_path: Path) -> None:
    if extra == "ray":
        pytest.importorskip("ray.serve", reason="the ray extra does not install for this Python, or was left out")
    save_model(tmp_path / "model")
    write_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    site = tmp_path / "site"
    site.mkdir()
    for name in installed(extra):
        distribution = metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    # -S leaves out everything that is installed beside them.
    paths = [str(site), str(Path(hotslot.__file__).parents[1])]
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path[:0] = {paths}\n{program}"],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "LlamaForCausalLM"
