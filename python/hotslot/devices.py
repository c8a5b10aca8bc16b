"""Where a model's layers run, and so where its pool lies: one pool for each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .errors import DeviceError

if TYPE_CHECKING:
    from .sites import ModelSite

CPU = torch.device("cpu")


def device_of(module: torch.nn.Module) -> torch.device:
    """Where a layer runs: where accelerate brings its inputs to, else where its own tensors are.

    Anything but a CUDA device counts as the CPU here; a call there is refused when it is made.

    Example:
        >>> device_of(torch.nn.Linear(2, 2))
        device(type='cpu')
    """
    hook: Any = getattr(module, "_hf_hook", None)
    brought_to = [getattr(part, "execution_device", None) for part in getattr(hook, "hooks", [hook])]
    found: Any = next((device for device in brought_to if device is not None), None)
    if found is None:
        tensors = (*module.parameters(recurse=True), *module.buffers(recurse=True))
        found = tensors[0].device if tensors else CPU
    device = torch.device("cuda", found) if isinstance(found, int) else torch.device(found)
    if device.type != "cuda":
        return CPU
    return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())


def homes_of(sites: Sequence[ModelSite]) -> tuple[list[torch.device], list[int]]:
    """The devices of a model's sites, in the order in which the model comes to them, and the number of each site's.

    Raises:
        DeviceError: Some layers run on the CPU and some on a GPU.
    """
    devices: list[torch.device] = []
    homes = []
    for found in sites:
        device = device_of(found.module)
        if device not in devices:
            devices.append(device)
        homes.append(devices.index(device))
    if CPU in devices and len(devices) > 1:
        first = next(site.site.path for site, home in zip(sites, homes, strict=True) if devices[home] == CPU)
        raise DeviceError(
            f"{first} runs on the CPU and other layers on {', '.join(str(device) for device in devices if device != CPU)}; "
            "expected all on GPUs or all on the CPU: choose another device_map, or leave those layers out with sites=",
            call="attach",
        )
    return devices or [CPU], homes
