"""Where an adapter comes from, opened and fitted to one pool: the last step before its bytes move."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from .adapter import Adapter, AdapterFile, identity_of, memory_adapter, read_adapter, resolve
from .config import PeftAdapterConfig
from .errors import AdapterConfigError, AdapterFileError
from .experts import expert_layouts
from .extras import FEATURES
from .folder import open_weights
from .forms import host_paths
from .inputs import InputBuilder, PlaceSpec, core_extras, core_pairs
from .keys import HostTree, Role, parse_key
from .recent import Recent
from .report import LoadReport
from .safetensors import FileIdentity
from .sites import ModelSite, Wanted, embedding_of, shares_weight, walk

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

Source: TypeAlias = "str | os.PathLike[str] | tuple[Mapping[str, Any], Any]"
"""A PEFT folder, or `(tensors, config)`: names as in PEFT's file to torch tensors or arrays, and a config or its dict."""

# What was found in files; about 50 kB for an adapter of 200 modules.
_MAX_SEEN = 256
# Gains and biases are worth keeping with it; whole matrices that had to be rearranged are not.
_MAX_HELD_BYTES = 4 << 20


@dataclass(frozen=True)
class Prepared:
    """An adapter that fits the pool, in the form that the core takes.

    Attributes:
        pairs: (site, rank, scale, A, B) per adapted site, with A and B as addresses or file ranges.
        extras: (site, part, content, stored or None, ids or None) of what is neither A nor B, likewise.
        config: What the scales came from.
        identity: The files, or None for tensors in memory.
        report: What is applied and what is not.
        base: A stamp of the base's parameters that some of it was worked out from.
    """

    pairs: list[tuple[Any, ...]]
    extras: list[tuple[Any, ...]]
    config: PeftAdapterConfig
    identity: Hashable | None
    report: LoadReport
    base: tuple[object, ...] = ()

    @property
    def derived_sites(self) -> list[int]:
        """The sites at which something was worked out from the base's parameters."""
        return sorted({site for site, _, _, stored, _ in self.extras if stored is not None})

    def reading_from(self, fd: int) -> Prepared:
        """The same adapter through another descriptor of its weights file, with a report of its own."""

        def moved(tensor: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return ("file", fd, *tensor[2:]) if tensor is not None and tensor[0] == "file" else tensor

        pairs = [(site, rank, scale, moved(a), moved(b)) for site, rank, scale, a, b in self.pairs]
        extras = [(site, part, moved(content), moved(stored), ids) for site, part, content, stored, ids in self.extras]
        return replace(self, pairs=pairs, extras=extras, report=replace(self.report))

    @property
    def held_bytes(self) -> int:
        """Bytes that were worked out, or given, in memory."""
        tensors = [tensor for pair in self.pairs for tensor in pair[3:]]
        tensors += [tensor for extra in self.extras for tensor in extra[2:4] if tensor is not None]
        return sum(tensor[2] for tensor in tensors if tensor[0] == "memory")


class SourceReader:
    """Opens sources and fits them to the pool of one model.

    What was found in a pair of files is kept: as long as they are the same files, loading them again parses nothing, so that
    promotions that repeat leave the interpreter to the threads that compute.

    Args:
        sites: The pool's sites, experts last.
        model: The live model, for the paths of all its modules and for the weights that DoRA and biases are relative to.
        max_rank: The pool's limit.
        experts: Whether routers and routed experts are served.
    """

    def __init__(self, sites: Sequence[ModelSite], model: torch.nn.Module, max_rank: int, *, experts: bool) -> None:
        self._all_sites = [found.site for found in sites]
        self._sites = [found.site for found in sites if found.expert is None]
        self._max_rank = max_rank
        self._host_modules = [path for path, _ in model.named_modules() if path]
        self._vocab_size = vocabulary_size(model)
        self._layouts = expert_layouts(model) if experts else {}
        self._supported = FEATURES.keys() - (set() if experts else {"router", "experts"})
        self._hints = room_hints(model, sites)
        self._inputs = InputBuilder(sites, self._layouts, *tied_embeddings(model, sites))
        self._seen: Recent[Prepared] = Recent(_MAX_SEEN)

    def open(self, source: Source, files: ExitStack) -> Prepared:
        """Open a source and fit it to the pool; nothing but headers is read.

        Args:
            source: A folder, or tensors in memory.
            files: Gets the open weights file; close it when the bytes have been read.

        Raises:
            AdapterError: It is no adapter, or it does not fit; see `adapter.resolve`.
        """
        if isinstance(source, (str, os.PathLike)):
            identity = identity_of(source)
            seen = self._seen.get(identity)
            if identity is not None and seen is not None and seen.base == self._inputs.stamp(seen.derived_sites):
                file = files.enter_context(open_weights(source))
                # The file that was just opened may be another than the one that was just looked at.
                if FileIdentity.of(file) == identity[1]:
                    return seen.reading_from(file.fileno())
        return self._fit(files.enter_context(opened(source)))

    def base_fingerprint(self, paths: Iterable[str]) -> str | None:
        """What tells this base from others at the sites where something of an adapter was worked out from it; None for no sites."""
        return self._inputs.fingerprint(paths)

    def untied_rows(self, paths: Iterable[str]) -> str | None:
        """Where token rows are missing in an adapter that has some at `paths`, because its base ties nothing; None for nowhere."""
        return self._inputs.untied_rows(paths)

    @cached_property
    def reading(self) -> str:
        """What tells models apart in which the same files are another adapter, although they have the same sites: 32 digits."""
        what = (self._host_modules, self._vocab_size, sorted(self._supported), self._inputs.tied_paths)
        return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()

    def derived_paths(self, prepared: Prepared) -> list[str]:
        """The paths of an adapter's `derived_sites`."""
        return [self._all_sites[index].path for index in prepared.derived_sites]

    def place_spec(self, sources: Iterable[Source]) -> PlaceSpec:
        """The room that a slot's place needs for any one of these adapters.

        Raises:
            AdapterError: As `open`.
        """
        spec = PlaceSpec()
        for source in sources:
            with ExitStack() as files:
                prepared = self.open(source, files)
                spec.include(prepared.pairs, prepared.extras)
        return spec

    def _fit(self, adapter: Adapter) -> Prepared:
        try:
            resolved = resolve(
                adapter,
                self._sites,
                self._max_rank,
                host_modules=self._host_modules,
                vocab_size=self._vocab_size,
                supported=self._supported,
                experts=self._layouts,
                room_hint=self._hints.get,
            )
        except AdapterConfigError as error:
            if error.key in ("router", "experts", "target_parameters") and not self._layouts:
                hint = "attach with experts=True (or HOTSLOT_LORA_EXPERTS=1) to serve routers and routed experts"
                raise AdapterConfigError(f"{error}; {hint}", path=error.path, key=error.key) from None
            raise
        inputs = self._inputs.build(adapter, resolved)
        pairs, extras = core_pairs(inputs), core_extras(inputs)
        if not isinstance(adapter, AdapterFile):
            return Prepared(pairs, extras, adapter.config, None, resolved.report)
        # Header and config were read at different moments; from here on the core watches the file that it reads.
        adapter.check_unchanged()
        prepared = Prepared(pairs, extras, adapter.config, adapter.identity, resolved.report)
        prepared = replace(prepared, base=self._inputs.stamp(prepared.derived_sites))
        if prepared.held_bytes <= _MAX_HELD_BYTES:
            self._seen.keep(adapter.identity, prepared)
        return prepared.reading_from(adapter.file.fileno())


@contextmanager
def opened(source: Source) -> Iterator[Adapter]:
    """An adapter's config and tensor list; its weights file stays open inside.

    Raises:
        AdapterFileError, AdapterConfigError: The folder or the tensors are not an adapter.
    """
    if isinstance(source, tuple):
        if len(source) != 2 or not isinstance(source[0], Mapping):
            raise AdapterFileError(f"an adapter in memory is (tensors, config); found a tuple of {len(source)}: {_kinds(source)}")
        yield memory_adapter(*source)
    elif isinstance(source, (str, os.PathLike)):
        with read_adapter(source) as adapter:
            yield adapter
    else:
        raise AdapterFileError(f"an adapter is a PEFT folder's path or (tensors, config); found {type(source).__name__}")


def key_of(source: Source) -> Hashable:
    """What makes two sources the same while they load: a folder and the files in it now.

    Tensors in memory are never the same: they may change between two calls.
    """
    if isinstance(source, (str, os.PathLike)):
        return os.path.abspath(os.fspath(source)), identity_of(source)
    return object()


def wanted_sites(sources: Iterable[Source], model: torch.nn.Module) -> Wanted:
    """What adapters target in a model."""
    host = HostTree(path for path, _ in model.named_modules() if path)
    wanted, has_extras = Wanted(), False
    for source in sources:
        with opened(source) as adapter:
            config = adapter.config
            has_extras = has_extras or bool(config.target_parameters) or config.bias != "none"
            for key in filter(None, map(parse_key, adapter.tensors)):
                has_extras = has_extras or key.role not in (Role.A, Role.B, Role.BASE_COPY) or ".experts." in key.module
                if key.role is Role.BASE_COPY and config.bias == "none":
                    continue
                paths = host_paths(key.module, host)
                wanted.paths.update(paths)
                wanted.paired.update(paths if key.role is Role.A else ())
    return replace(wanted, has_extras=has_extras)


def room_hints(model: torch.nn.Module, sites: Sequence[ModelSite]) -> dict[str, str]:
    """What to do about the modules that are no sites: by path, for all but linear layers that `sites=` could name."""
    chosen = {found.site.path for found in sites}
    known = {found.site.path: found for found in walk(model)}
    hints = {}
    for path, module in model.named_modules():
        found = known.get(path)
        if found is None:
            kind = type(module).__name__
            hints[path] = f"it is a {kind}, and only linear layers, embeddings, routers and routed experts take adapters"
        elif found.refusal is not None:
            hints[path] = f"it cannot be served: {found.refusal}"
        elif found.site.kind == "embedding":
            hints[path] = "attach with extras_bytes=... to reserve room for embeddings"
    return {path: hint for path, hint in hints.items() if path not in chosen}


def vocabulary_size(model: torch.nn.Module) -> int | None:
    """Rows of a transformers model's embedding, from its config; None for any other model."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    return size if isinstance(size, int) else None


def tied_embeddings(model: torch.nn.Module, sites: Sequence[ModelSite]) -> tuple[int | None, tuple[int, ...]]:
    """The site of the input embedding, and the other sites that have its very weight: a tied head, the embeddings of a decoder."""
    embedding = embedding_of(model, "get_input_embeddings")
    if embedding is None:
        return None, ()
    sharing = [index for index, found in enumerate(sites) if found.expert is None and shares_weight(found.module, embedding)]
    own = next((index for index in sharing if sites[index].module is embedding), None)
    return own, tuple(index for index in sharing if index != own)


def _kinds(items: tuple[Any, ...]) -> str:
    return ", ".join(type(item).__name__ for item in items)
