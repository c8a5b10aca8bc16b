"""A process that serves adapters, for tests that kill, stop and deceive it: started by `Served`, told what to do on its stdin."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Served:
    """A second process with the tiny model, a pool and a server.

    Args:
        folders: Its adapters.
        attach: Options of `attach`.
        serve: Options of `serve_peers`.
        setup: Statements that run before it serves; they may use `lora` and `folders`.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        attach: dict[str, Any] | None = None,
        serve: dict[str, Any] | None = None,
        setup: str = "",
    ) -> None:
        told = {
            "folders": {name: str(folder) for name, folder in folders.items()},
            "attach": {"max_loras": len(folders) + 1, "max_rank": 8, "extras_bytes": 1 << 20, **(attach or {})},
            "serve": serve or {},
            "setup": setup,
        }
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, json.dumps(told)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.address = self._read()

    def do(self, statements: str) -> str:
        """Run statements there; what they leave in `answer` as text."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(statements) + "\n")
        self.process.stdin.flush()
        return self._read()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """Let it stand still."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self.process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *exc: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def _read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the serving process ended with {self.process.wait(30)}"
        return str(json.loads(line))


def main() -> None:
    """The serving process."""
    from tiny import tiny_model

    import hotslot

    told = json.loads(sys.argv[1])
    lora = hotslot.attach(tiny_model(), told["folders"], **told["attach"])
    names: dict[str, Any] = {"lora": lora, "folders": told["folders"], "hotslot": hotslot, "answer": ""}
    exec(told["setup"], names)
    for name in told["folders"]:
        lora.cache_id(name)
    with lora.serve_peers(**told["serve"]) as server:
        names["server"] = server
        print(json.dumps(server.address), flush=True)
        for line in sys.stdin:
            exec(json.loads(line), names)
            print(json.dumps(str(names["answer"])), flush=True)


if __name__ == "__main__":
    main()
