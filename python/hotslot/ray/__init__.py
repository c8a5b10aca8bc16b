"""hotslot on several machines: a Ray Serve application whose replicas each run a server; the `ray` extra.

serve run hotslot.ray:build model=MODEL adapter_root=/shared/adapters max_replicas=4

from ray import serve
import hotslot.ray
from hotslot.server.settings import Settings
serve.run(hotslot.ray.app(Settings(model="MODEL", adapter_root="/shared/adapters"), hotslot.ray.Scale(max_replicas=4)))

application     the two deployments and their options
scale           how many replicas, and what each gets
ingress         takes HTTP, reads which adapter is asked for, passes the request on
router          which replica gets it: one that holds the adapter
placement       where adapters are, and where the next one should be
replica         one server on one engine
exchange        one HTTP request and its answer, between processes
gathering       the metrics of all replicas as one text
"""

from __future__ import annotations

try:
    from .application import app, build
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] not in ("ray", "starlette", "pydantic"):
        raise
    raise ModuleNotFoundError(
        f"hotslot.ray needs the ray extra ({error}); install it with: pip install 'hotslot[ray]'", name=error.name
    ) from None
from .scale import Scale

__all__ = ["Scale", "app", "build"]
