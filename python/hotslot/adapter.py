"""From an adapter's files to a checked list of pairs: everything is validated before a byte of a pool changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .audit import Audit
from .experts import ExpertLayout
from .extras import FEATURES, Extras, ResolvedPair
from .folder import Adapter as Adapter
from .folder import AdapterFile as AdapterFile
from .folder import identity_of as identity_of
from .folder import memory_adapter as memory_adapter
from .folder import read_adapter as read_adapter
from .keys import HostTree
from .placement import Placement, SiteLike
from .report import LoadReport
from .tensors import TensorRef as TensorRef


@dataclass
class ResolvedAdapter:
    """An adapter that fits: what goes where. Nothing was read but headers, and pairs that had to be joined (see `forms`).

    Attributes:
        pairs: One per adapted site, sorted by site.
        scaling: The adapter-wide scale.
        extras: What the adapter holds beside pairs; empty unless the caller said that it serves them.
        report: What is applied, what is ignored and why.
    """

    pairs: list[ResolvedPair]
    scaling: float
    extras: Extras = field(default_factory=Extras)
    report: LoadReport = field(default_factory=LoadReport)


def resolve(
    adapter: Adapter,
    sites: Sequence[SiteLike],
    max_rank: int,
    *,
    host_modules: Iterable[str] = (),
    vocab_size: int | None = None,
    supported: Collection[str] = frozenset(),
    experts: Mapping[str, ExpertLayout] | None = None,
    strict: bool = True,
    base_copies: Literal["skip", "refuse"] = "skip",
    room_hint: Callable[[str], str | None] = lambda _: None,
) -> ResolvedAdapter:
    """Match every tensor of an adapter to a site of the model, or say why it does not fit.

    Args:
        adapter: From `read_adapter` or `memory_adapter`.
        sites: The sites that have room, in the pool's order.
        max_rank: The pool's limit on the rank.
        host_modules: Paths of all modules of the model; with them a module without room is told from one that is not there.
        vocab_size: Rows of the model's embedding; with it copies of embeddings and added tokens are checked.
        supported: Features beside plain LoRA that the caller serves, of `extras.FEATURES`; the others are refused by name.
        experts: The model's routed experts by module path (`experts.expert_layouts`), where the caller serves them.
        strict: Refuse an adapter some of whose modules the model lacks; otherwise those are ignored and reported, and only
            an adapter none of whose modules fit is refused.
        base_copies: Whether to ignore copies of base weights that PEFT put into the file, or to refuse the adapter.
        room_hint: What to do about a module of the model that is no site, by its path, for the message.

    Raises:
        AdapterConfigError: A feature that is not served, a tensor name in none of PEFT's forms, or a rank that is not the
            config's.
        AdapterFileError: Half a pair, a tensor of size 0, a dtype that is not served.
        AdapterShapeError: Modules that the model lacks or that have no room, or other shapes than the model's.
        RankError: A rank above `max_rank`.

    Example:
        >>> import numpy as np
        >>> from hotslot.config import PeftAdapterConfig
        >>> from types import SimpleNamespace
        >>> site = SimpleNamespace(path="layers.0.q_proj", kind="linear", in_features=8, out_features=6)
        >>> halves = {"A": np.ones((2, 8), "f4"), "B": np.ones((6, 2), "f4")}
        >>> tensors = {f"layers.0.q_proj.lora_{half}.weight": array for half, array in halves.items()}
        >>> resolved = resolve(memory_adapter(tensors, PeftAdapterConfig(r=2, lora_alpha=4)), [site], max_rank=8)
        >>> resolved.pairs[0].rank, resolved.pairs[0].scale, resolved.report.applied
        (2, 2.0, 1)
    """
    unknown = set(supported) - FEATURES.keys()
    if unknown or base_copies not in ("skip", "refuse"):
        raise ValueError(
            f"found {sorted(unknown) or base_copies!r}; expected features of {sorted(FEATURES)}, and 'skip' or 'refuse'"
        )
    index = {site.path: place for place, site in enumerate(sites)}
    host = HostTree([*host_modules, *index, *(experts or ())])
    audit = Audit(adapter, supported, lambda module: host.find(module) in index, base_copies == "refuse")
    placement = Placement(audit, sites, index, host, max_rank, strict, vocab_size, experts or {}, room_hint)
    pairs = placement.place(audit.modules())
    return ResolvedAdapter(pairs, adapter.config.scaling(), placement.extras, placement.report)
