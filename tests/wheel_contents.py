"""Check the newest wheel of a folder: one abi3 wheel, complete, and importable where only numpy is installed.

    python tests/wheel_contents.py dist

A program rather than a test, because it needs a wheel that was built and a fresh virtual environment.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NEEDED = ["hotslot/__init__.py", "hotslot/py.typed", "hotslot/_core.pyi", "hotslot/_core.abi3.so"]
FOREIGN = ["torch", "transformers", "peft", "safetensors", "cupy", "fastapi", "uvicorn", "prometheus_client"]
IMPORT = "import hotslot, sys; print(hotslot.__name__, *[name for name in {foreign} if name in sys.modules])"


def packaged_sources() -> list[str]:
    """Return what git tracks of the package: each of these files has to be in the wheel."""
    listed = subprocess.run(["git", "ls-files", "python"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name.removeprefix("python/") for name in listed.stdout.split()]


def main() -> int:
    """Run the command line; return its exit status."""
    wheels = sorted(Path(sys.argv[1]).glob("hotslot-*.whl"), key=lambda path: path.stat().st_mtime)
    if not wheels:
        print(f"no hotslot wheel in {sys.argv[1]}; build one with: make wheel", file=sys.stderr)
        return 1
    wheel = wheels[-1]
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in [*NEEDED, *packaged_sources()] if name not in names]
    if missing or "-cp310-abi3-" not in wheel.name:
        print(f"{wheel.name}: missing {missing or 'nothing'}; expected an abi3 wheel for Python 3.10", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        quiet = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([python, *quiet, wheel], check=True)
        done = subprocess.run(
            [python, "-c", IMPORT.format(foreign=FOREIGN)], cwd=folder, capture_output=True, text=True, check=False
        )
    if done.returncode != 0 or done.stdout.split() != ["hotslot"]:
        print(f"{wheel.name}: import with numpy alone gave {done.stdout!r} {done.stderr}", file=sys.stderr)
        return 1
    print(f"{wheel.name}: {len(names)} files, complete; imports with numpy alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())
