"""What `hotslot serve` was asked for: one place for every option, with its limits."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass, field

from ..catalog import is_address
from ..errors import PoolError
from ..pool import MAX_RANK
from ..tiers import PeerTls, Tiers, is_token

# The least and the most of every number; what lies beyond is a slip of the keyboard.
_RANGES: dict[str, tuple[int, int]] = {
    "port": (0, 65535),
    "max_loras": (1, 65536),
    "max_lora_rank": (1, MAX_RANK),
    "extras_bytes": (0, (1 << 48) - 1),
    "host_bytes": (0, (1 << 48) - 1),
    "max_num_seqs": (1, 65536),
    "max_num_batched_tokens": (1, 1 << 20),
    "max_model_len": (2, (1 << 31) - 1),
    "block_size": (4, 4096),
    "num_blocks": (1, (1 << 31) - 1),
    "max_queue": (1, 1 << 20),
    "max_queue_per_adapter": (1, 1 << 20),
    "max_body_bytes": (1024, 1 << 30),
    "max_n": (1, 128),
    "load_threads": (1, 64),
}
_MAX_SECONDS = 86400
_FLAGS = {"extras_bytes": "lora-extras-bytes"}


@dataclass(frozen=True)
class Settings:
    """The options of a server; the flags of `hotslot serve` have the same names.

    Attributes:
        model: A transformers folder, a hub id, or a .gguf file.
        host, port: Where to listen; port 0 takes a free one.
        served_model_name: What requests call the base model; `model` if left out.
        lora_modules: The startup set, name -> folder. As many as fit are pinned to their slots; the others are loaded on first use.
        adapter_root: A folder of folders whose adapters are served under their relative paths; loads by call must lie in it.
        admin_token: Allows loads and unloads by call, for its bearer; without one they are off.
        api_keys: Bearers of one of these may use /v1 and /slots; everybody may if there are none.
        max_loras, max_lora_rank, pool_dtype, extras_bytes, experts: As in `hotslot.attach`.
        host_bytes: Budget of the host tier, which keeps adapters in memory for their next load; 0 for none.
        disk_cache: Folder of the disk cache, which servers of one machine share; None for none.
        peers: Addresses (`host:port`) of servers whose adapters are served here too; asked in this order.
        peer_token: What peers want as bearer token, and what this server wants of them.
        peer_ca, peer_cert, peer_key: PEM files for TLS between peers: whom to trust, and who this is. Who asks needs the first, who
            serves the others; with all three on both ends each knows the other.
        serve_peers: Where (`host:port`) other servers can read the adapters in this one's slots and host tier; None for nowhere.
        dtype: Of the model's weights: "auto", "float32", "bfloat16", "float16".
        device: The model's device.
        max_num_seqs: Sequences in a batch.
        max_num_batched_tokens: Tokens of a step.
        max_model_len: Tokens of a sequence; the model's own limit, and at most 4096, if left out.
        block_size, num_blocks: The paged cache; room for a quarter of the longest possible batch if `num_blocks` is left out.
        enable_prefix_caching: Whether equal prefixes of equal adapters share blocks.
        max_queue: Requests that wait at most; more are answered 429.
        max_queue_per_adapter: Of them, for one adapter.
        max_body_bytes: Bytes of a request at most.
        max_n: Sequences of a request at most.
        drain_seconds: How long SIGTERM lets running requests go on.
        load_threads: Adapters that are loaded at a time.
        log_level: Of the JSON lines on standard error.
    """

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    lora_modules: dict[str, str] = field(default_factory=dict)
    adapter_root: str | None = None
    admin_token: str | None = field(default=None, repr=False)
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_loras: int = 8
    max_lora_rank: int = 64
    pool_dtype: str = "bfloat16"
    extras_bytes: int | None = None
    experts: bool | None = None
    host_bytes: int = 0
    disk_cache: str | None = None
    peers: tuple[str, ...] = ()
    peer_token: str | None = field(default=None, repr=False)
    peer_ca: str | None = None
    peer_cert: str | None = None
    peer_key: str | None = field(default=None, repr=False)
    serve_peers: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    block_size: int = 32
    num_blocks: int | None = None
    enable_prefix_caching: bool = True
    max_queue: int = 256
    max_queue_per_adapter: int = 64
    max_body_bytes: int = 4 << 20
    max_n: int = 16
    drain_seconds: float = 30.0
    load_threads: int = 2
    log_level: str = "info"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            PoolError, PeerError: An option is out of its range.
        """
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is None and Settings.__dataclass_fields__[name].default is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                flag = _FLAGS.get(name, name.replace("_", "-"))
                raise PoolError(f"--{flag} is {value!r}; expected an integer, at least {least} and at most {most}")
        seconds = self.drain_seconds
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= _MAX_SECONDS:
            raise PoolError(f"--drain-seconds is {seconds!r}; expected seconds, at least 0 and at most {_MAX_SECONDS}")
        for name in ("model", "host"):
            if not getattr(self, name) or "\0" in getattr(self, name):
                raise PoolError(f"{name} is {getattr(self, name)!r}; expected some text")
        if not 1 <= len(self.base_name) <= 512:
            raise PoolError(f"the served model name has {len(self.base_name)} characters; expected 1 to 512, as requests may have")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise PoolError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}; "
                "every sequence of a batch needs a token of a step"
            )
        if self.admin_token is not None and len(self.admin_token) < 8:
            raise PoolError(f"the admin token has {len(self.admin_token)} characters; expected at least 8")
        if any(not key for key in self.api_keys):
            raise PoolError("an API key is empty; leave the option out to serve everybody")
        for what, token in (("the admin token", self.admin_token), *(("an API key", key) for key in self.api_keys)):
            if token is not None and not is_token(token):
                raise PoolError(f"{what} holds spaces, line ends or letters beyond ASCII; expected visible ASCII characters alone")
        if self.serve_peers is not None and _is_beyond_loopback(self.export_address()[0]) and not (self.peer_token or self.peer_ca):
            raise PoolError(
                f"--serve-peers {self.serve_peers!r} is beyond loopback, and nothing keeps strangers off; give --peer-token, or "
                "--peer-ca with --peer-cert and --peer-key"
            )
        if (self.peer_cert is None) != (self.peer_key is None):
            raise PoolError("--peer-cert and --peer-key belong together; give both, or neither")
        # Half of TLS would be plain HTTP in one direction, with the token in clear.
        if self.serve_peers is not None and self.peer_ca is not None and self.peer_cert is None:
            raise PoolError("--peer-ca is given, and peers would be served without TLS; give --peer-cert and --peer-key too")
        if self.peers and self.peer_cert is not None and self.peer_ca is None:
            raise PoolError("--peer-cert is given, and peers would be asked without TLS; give --peer-ca too")
        for flag, path in (("ca", self.peer_ca), ("cert", self.peer_cert), ("key", self.peer_key)):
            if path is not None and not os.path.isfile(path):
                raise PoolError(f"--peer-{flag} {path!r} is no file; expected a PEM file")
        self.tiers()

    @property
    def base_name(self) -> str:
        """What requests call the base model."""
        return self.served_model_name or self.model

    @property
    def peer_tls(self) -> PeerTls | None:
        """How connections with peers are encrypted, in both directions; None for plain HTTP."""
        if self.peer_ca is None and self.peer_cert is None:
            return None
        return PeerTls(ca=self.peer_ca, certificate=self.peer_cert, key=self.peer_key)

    def tiers(self) -> Tiers:
        """Where adapters are looked for before their folder is read.

        Raises:
            PoolError, PeerError: An option is out of range.
        """
        return Tiers(
            host_bytes=self.host_bytes,
            disk=self.disk_cache,
            peers=self.peers,
            peer_token=self.peer_token,
            peer_tls=self.peer_tls,
            max_loads=self.load_threads,
        )

    def export_address(self) -> tuple[str, int]:
        """The host and port of `serve_peers`; port 0 takes a free one.

        Raises:
            PoolError: It is no address.
        """
        host, _, port = (self.serve_peers or "").rpartition(":")
        if not (is_address(self.serve_peers) or (port == "0" and is_address(f"{host}:1"))):
            raise PoolError(f"--serve-peers {self.serve_peers!r} is no address; expected HOST:PORT, such as 127.0.0.1:7070")
        return host.strip("[]"), int(port)


def _is_beyond_loopback(host: str) -> bool:
    """Whether a host is an address that others can reach; where a name leads is known when it is listened at."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return not (getattr(address, "ipv4_mapped", None) or address).is_loopback
