"""A loaded server's memory: 200 adapters on 8 slots by Zipf popularity, no two prompts alike, until it is told to stop.

    python benches/soak_server.py --minutes 30              BENCH_RESULTS names another file for the results

Before, each adapter is asked once, since metrics and the like keep something for each name, and a flood fills every row of the
batch, since the memory of the largest step stays with the process. From then on no request may fail, and resident memory must be
flat after the first fifth; else the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path

import harness
from served import NUM_ROWS, hotslot_server, model_folder, resident, write_adapters

from hotslot.server.bench import Client, Load, measure

ALLOWED = 8 << 20
WARM_UP = 0.2
CHUNK_SECONDS = 15.0
FLOOD = 8 * NUM_ROWS


def main() -> int:
    """Load it, and look at its memory each time that nothing runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests per second (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="torch threads (default: every core)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        model, adapters = model_folder(Path(root), quick=False), Path(root) / "adapters"
        names = write_adapters(adapters, model)
        with hotslot_server(model, adapters, given.threads) as (url, pid):
            curve, requests, failed = [], 0, 0
            client = Client(url)
            for name in names:
                asyncio.run(client.ask(name, Load(max_tokens=2)))
            flood = asyncio.run(measure(client, names, Load(FLOOD, 1.0, 1.0, given.tokens, "Once upon a time", -1, distinct=True)))
            print(f"flood: {flood['requests']} requests, {flood['failed']} failed, {resident(pid) / 1e6:.1f} MB", flush=True)
            begun = time.monotonic()
            while (minutes := (time.monotonic() - begun) / 60) < given.minutes:
                seed = len(curve)
                load = Load(given.rate, CHUNK_SECONDS, 1.0, given.tokens, f"{seed}: Once upon a time", seed, distinct=True)
                report = asyncio.run(measure(client, names, load))
                requests, failed = requests + report["requests"], failed + report["failed"]
                curve.append((round((time.monotonic() - begun) / 60, 3), requests, resident(pid)))
                print(f"{minutes:5.1f} minutes, {requests} requests, {failed} failed, {curve[-1][2] / 1e6:.1f} MB", flush=True)
    settled = [nbytes for _, count, nbytes in curve if count > WARM_UP * requests]
    growth = max(settled) - settled[0]
    flat = growth <= ALLOWED
    print(f"{requests} requests, growth after warm-up {growth / 1e6:+.2f} MB: {'pass' if flat else 'FAIL'}")
    found = {"curve": curve, "requests": requests, "failed": failed, "growth": growth, "allowed": ALLOWED, "flat": flat}
    harness.save("server_soak", found, harness.Options(False, given.threads, 1, ()))
    return 0 if flat and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
