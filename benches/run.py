"""Every bench, each figure in a process of its own, then the report and the targets: the Python part of `make bench`.

    python benches/run.py [decode] [prefill] ...         BENCH=quick for a smoke run, which stays in one process

Results go to results.json beside this file, or to the one that BENCH_RESULTS names; the report goes to the README beside them.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run what is named, or all; the exit status is 1 if a bench failed, whatever the targets say."""
    quick = os.environ.get("BENCH") == "quick"
    chosen = sys.argv[1:]
    benches = [path for path in sorted(HERE.glob("bench_*.py")) if not chosen or path.stem.removeprefix("bench_") in chosen]
    sys.path.insert(0, str(HERE))
    failed = []
    for path in benches:
        print(f"\n== {path.name}", flush=True)
        started = time.perf_counter()
        if quick:
            sys.argv = [str(path)]
            runpy.run_path(str(path), run_name="__main__")
        elif subprocess.run([sys.executable, "-W", "ignore", str(path)]).returncode:
            failed.append(path.name)
        print(f"== {path.name}: {time.perf_counter() - started:.0f} seconds", flush=True)
    results = Path(os.environ.get("BENCH_RESULTS", HERE / "results.json"))
    is_kept = not quick or "BENCH_RESULTS" in os.environ
    if is_kept and (results.parent / "README.md").exists():
        import report
        import targets

        report.main([str(results.parent)])
        targets.main([str(results)])
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
