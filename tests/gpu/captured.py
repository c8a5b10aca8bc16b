"""A decode step as a CUDA graph, and where the checks of the GPU script run it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch


class CapturedModel:
    """A decode step of a model under a static route, as a graph."""

    def __init__(self, model: torch.nn.Module, route: Any, rows: int, hidden: int) -> None:
        from hotslot._core import Capture

        self.x = torch.randn(rows, 1, hidden, device="cuda", dtype=next(model.parameters()).dtype)
        self.graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            if route is None:
                model(self.x)
                with Capture(), torch.cuda.graph(self.graph):
                    self.out = model(self.x)
                return
            side = torch.cuda.Stream()
            with torch.cuda.stream(side), route:
                model(self.x)
            side.synchronize()
            with route, Capture(), torch.cuda.graph(self.graph):
                self.out = model(self.x)

    def replay(self) -> torch.Tensor:
        """A step; the output's own copy."""
        self.graph.replay()
        return self.out.clone()


class Place:
    """Where the checks run: on the device of CUDA; the tests put the emulator in its stead."""

    device = "cuda"
    captured = CapturedModel

    def attached(self, lora: Any) -> None:
        """Called with each attached model."""

    def waits_for_nothing(self, function: Callable[[], Any]) -> bool:
        """Whether a call makes the host wait for the device nowhere, as torch sees it."""
        function()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            function()
        except RuntimeError as error:
            print(f"a wait: {error}", file=sys.stderr)
            return False
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return True


CUDA = Place()
