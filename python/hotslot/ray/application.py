"""The two deployments of an application, from a server's settings."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve import Application

from ..errors import PoolError
from ..server.serve import lora_modules
from ..server.settings import Settings
from .ingress import Ingress
from .replica import Replica
from .router import AdapterRouter
from .scale import Scale

# Of a replica, beside the requests that its own queue counts: models, slots, health.
_OTHER_REQUESTS = 32
_MAX_INGRESS_REQUESTS = 4096
_STATS_SECONDS = 0.5
_HEALTH_SECONDS = 2.0
_WITHOUT_MEANING = {
    "host": "Serve's http_options say where to listen",
    "port": "Serve's http_options say where to listen",
    "admin_token": "adapters cannot be loaded by call behind Ray; put them into the adapter root",
}


def app(settings: Settings, scale: Scale | None = None) -> Application:
    """A Serve application of a model and its adapters, for `serve.run`.

    Each replica is what `hotslot serve` runs, on an engine of its own; all must find model and adapters under the same paths.

    Args:
        settings: Of each replica's server. `drain_seconds` is how long a replica that is ended may go on with its requests.
        scale: How many replicas; `Scale()` if left out.

    Raises:
        PoolError: A setting has no meaning here.
    """
    scale = scale or Scale()
    if settings.admin_token is not None:
        raise PoolError(f"admin_token is set; {_WITHOUT_MEANING['admin_token']}")
    replicas = serve.deployment(
        name="HotslotReplica",
        ray_actor_options={"num_cpus": scale.cpus, "num_gpus": scale.gpus},
        # Its own queue refuses first: that one knows adapters, and how long to stand back.
        max_ongoing_requests=settings.max_num_seqs + settings.max_queue + _OTHER_REQUESTS,
        max_queued_requests=settings.max_queue,
        autoscaling_config={
            "min_replicas": scale.min_replicas,
            "max_replicas": scale.max_replicas,
            "target_ongoing_requests": scale.target_ongoing_requests or max(1.0, settings.max_num_seqs / 2),
            "upscale_delay_s": scale.upscale_delay_s,
            "downscale_delay_s": scale.downscale_delay_s,
        },
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.drain_seconds,
        health_check_period_s=_HEALTH_SECONDS,
        request_router_config={
            "request_router_class": AdapterRouter,
            "request_router_kwargs": {"busy": settings.max_num_seqs, "slots": settings.max_loras},
            "request_routing_stats_period_s": _STATS_SECONDS,
        },
    )(Replica)
    ingress = serve.deployment(
        name="HotslotIngress",
        num_replicas=scale.ingress_replicas,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=_MAX_INGRESS_REQUESTS,
        graceful_shutdown_wait_loop_s=0.2,
        graceful_shutdown_timeout_s=settings.drain_seconds,
    )(Ingress)
    return ingress.bind(replicas.bind(settings), settings.base_name, settings.max_body_bytes)


def build(args: dict[str, Any]) -> Application:
    """The application of options by name, for `serve run hotslot.ray:build NAME=VALUE ...` and the `args` of a Serve config file.

    The names are those of `Settings` and `Scale`. Values may be text, as the command line gives them: `lora_modules` is then
    "NAME=FOLDER ..." or vLLM's JSON, `api_keys` is divided at spaces; HOTSLOT_API_KEY is heeded.

    Raises:
        PoolError: A name is unknown or has no meaning here, or a value cannot be meant.
    """
    given = dict(args)
    known = {cls: {field.name for field in fields(cls)} for cls in (Settings, Scale)}
    for name in given:
        if name in _WITHOUT_MEANING:
            raise PoolError(f"{name} has no meaning behind Ray: {_WITHOUT_MEANING[name]}")
        if not any(name in names for names in known.values()):
            expected = ", ".join(sorted(set().union(*known.values()) - _WITHOUT_MEANING.keys()))
            raise PoolError(f"there is no option {name!r}; expected {expected}")
    if "model" not in given:
        raise PoolError("no model given; expected model=FOLDER, a hub id or a .gguf file")
    if isinstance(given.get("lora_modules"), str):
        given["lora_modules"] = lora_modules(_words(given["lora_modules"]))
    if isinstance(given.get("api_keys"), str):
        given["api_keys"] = given["api_keys"].split()
    key = os.environ.get("HOTSLOT_API_KEY")
    if key and not given.get("api_keys"):
        given["api_keys"] = (key,)
    settings, scale = (
        _made(cls, {name: value for name, value in given.items() if name in known[cls]}) for cls in (Settings, Scale)
    )
    return app(settings, scale)


def _made(cls: type[Any], given: dict[str, Any]) -> Any:
    try:
        return TypeAdapter(cls).validate_python(given)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise PoolError(f"{where} is {first['input']!r}: {first['msg']}") from None


def _words(text: str) -> list[str]:
    """NAME=FOLDER words, or one JSON object."""
    return [text] if text.lstrip().startswith("{") else text.split()
