"""Fuzz the reader for a while: `python -m fuzz.run --seconds 60` in `tests`, or `make fuzz`.

With atheris, mutations are kept that reach new lines of the package; without it, those that come to a new end. What breaks is
written to the corpus, where `test_corpus.py` replays it ever after, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from pathlib import Path

from .cases import CORPUS, Case, FoundError, check, open_files
from .mutations import Mutator
from .seeds import seeds

_MAX_POOL = 4000
# More than any kind of case needs; longer ones take long and find nothing else.
_MAX_BYTES = 1 << 18


def main() -> int:
    """Run, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None, help="make the run without atheris repeatable")
    parser.add_argument("--engine", choices=("auto", "own", "atheris"), default="auto")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    pool = [*seeds().values(), *(Case.read(folder) for folder in sorted(CORPUS.iterdir()) if folder.is_dir())]
    root = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=root) as folder:
        if options.engine != "own":
            try:
                import atheris  # noqa: F401
            except ImportError:
                if options.engine == "atheris":
                    raise
            else:
                return with_atheris(pool, seed, options.seconds, Path(folder))
        return without(pool, seed, options.seconds, Path(folder))


def keep(case: Case, error: BaseException) -> Path:
    """Write a case that breaks something into the corpus."""
    folder = CORPUS / f"found-{hashlib.sha256(case.pack()).hexdigest()[:12]}"
    case.write(folder)
    print(f"\n{folder.name}: {error}", file=sys.stderr)
    return folder


def without(pool: list[Case], seed: int, seconds: float, folder: Path) -> int:
    """The loop without atheris; stops at the first fault of each kind."""
    mutator, end = Mutator(seed, pool), time.monotonic() + seconds
    seen: set[str] = set()
    faults: set[str] = set()
    runs, files = 0, open_files()
    while time.monotonic() < end:
        case = mutator.mutate(mutator.random.choice(pool))
        if case.size > _MAX_BYTES:
            continue
        runs += 1
        try:
            ends = check(case, folder)
        except FoundError as error:
            kind = f"{error}"[:40]
            if kind not in faults:
                faults.add(kind)
                keep(case, error)
            continue
        if ends - seen and len(pool) < _MAX_POOL:
            pool.append(case)
        seen |= ends
    leaked = open_files() - files
    print(
        f"{runs} cases in {seconds:.0f} s (seed {seed}), {len(seen)} different ends, {len(faults)} faults, {leaked} files left open"
    )
    return 1 if faults or leaked else 0


def with_atheris(pool: list[Case], seed: int, seconds: float, folder: Path) -> int:
    """The loop with atheris' coverage: libFuzzer ends the process itself, at the first fault or when the time is up."""
    import atheris

    mutator = Mutator(seed, pool)
    # The package was imported by now: its functions are instrumented where they are.
    for name in [name for name in sys.modules if name.startswith("hotslot.")]:
        if not name.startswith(("hotslot._core", "hotslot.ops")):
            for value in list(vars(sys.modules[name]).values()):
                _instrument(atheris, value, name)

    def run(raw: bytes) -> None:
        case = Case.unpack(raw)
        try:
            check(case, folder / "case")
        except FoundError as error:
            keep(case, error)
            raise

    def mutate(raw: bytes, max_size: int, _: int) -> bytes:
        found = mutator.mutate(Case.unpack(raw)).pack() if mutator.random.random() < 0.8 else atheris.Mutate(raw, max_size)
        return found if len(found) <= max_size else raw[:max_size]

    begin = folder / "begin"
    begin.mkdir()
    for index, case in enumerate(pool):
        (begin / str(index)).write_bytes(case.pack())
    options = [
        f"-max_total_time={int(seconds)}",
        f"-max_len={_MAX_BYTES}",
        f"-artifact_prefix={folder}/",
        f"-seed={seed % (1 << 31)}",
    ]
    atheris.Setup(
        [sys.argv[0], str(begin), *options, "-verbosity=1", "-timeout=600", "-rss_limit_mb=4096"], run, custom_mutator=mutate
    )
    atheris.Fuzz()
    return 0


def _instrument(atheris: object, value: object, module: str) -> None:
    functions = [value, *vars(value).values()] if isinstance(value, type) and value.__module__ == module else [value]
    for function in functions:
        if getattr(function, "__module__", None) == module and hasattr(function, "__code__"):
            atheris.instrument_func(function)  # type: ignore[attr-defined]


if __name__ == "__main__":
    sys.exit(main())
