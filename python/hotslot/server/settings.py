"""What `hotslot serve` was asked for: one place for every option, with its limits."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import PoolError


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
    admin_token: str | None = None
    api_keys: tuple[str, ...] = ()
    max_loras: int = 8
    max_lora_rank: int = 64
    pool_dtype: str = "bfloat16"
    extras_bytes: int | None = None
    experts: bool | None = None
    host_bytes: int = 0
    disk_cache: str | None = None
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
            PoolError: An option is out of its range.
        """
        at_least = {
            "max_loras": 1,
            "max_lora_rank": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "block_size": 4,
            "max_queue": 1,
            "max_queue_per_adapter": 1,
            "max_body_bytes": 1024,
            "max_n": 1,
            "load_threads": 1,
        }
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise PoolError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least {least}")
        for name in ("max_model_len", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PoolError(f"--{name.replace('_', '-')} is {value}; expected at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise PoolError(
                f"--max-num-batched-tokens {self.max_num_batched_tokens} is below --max-num-seqs {self.max_num_seqs}; "
                "every sequence of a batch needs a token of a step"
            )
        if self.admin_token is not None and len(self.admin_token) < 8:
            raise PoolError(f"the admin token has {len(self.admin_token)} characters; expected at least 8")
        if any(not key for key in self.api_keys):
            raise PoolError("an API key is empty; leave the option out to serve everybody")

    @property
    def base_name(self) -> str:
        """What requests call the base model."""
        return self.served_model_name or self.model
