"""Where an adapter comes from, opened and fitted to one pool: the last step before its bytes move."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .adapter import Adapter, AdapterFile, identity_of, memory_adapter, read_adapter, resolve, target_paths
from .config import PeftAdapterConfig
from .errors import AdapterFileError
from .folder import open_weights
from .recent import Recent
from .report import LoadReport
from .safetensors import FileIdentity
from .tensors import TensorRef

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from ._core import LoraWeights

Source: TypeAlias = "str | os.PathLike[str] | tuple[Mapping[str, Any], Any]"
"""A PEFT folder, or `(tensors, config)`: names as in PEFT's file to torch tensors or arrays, and a config or its dict."""

# What was found in files; about 50 kB for an adapter of 200 modules.
_MAX_SEEN = 256


@dataclass(frozen=True)
class Prepared:
    """An adapter that fits the pool, in the form that the core takes.

    Attributes:
        pairs: (site, rank, scale, A, B) per adapted site, with A and B as addresses or file ranges.
        config: What the scales came from.
        identity: The files, or None for tensors in memory.
        report: What is applied and what is not.
    """

    pairs: list[tuple[Any, ...]]
    config: PeftAdapterConfig
    identity: Hashable | None
    report: LoadReport

    def reading_from(self, fd: int) -> Prepared:
        """The same adapter through another descriptor of its weights file, with a report of its own."""
        pairs = [(site, rank, scale, ("file", fd, *a[2:]), ("file", fd, *b[2:])) for site, rank, scale, a, b in self.pairs]
        return replace(self, pairs=pairs, report=replace(self.report))


class SourceReader:
    """Opens sources and fits them to the pool of one model.

    What was found in a pair of files is kept: as long as they are the same files, loading them again parses nothing, so that
    promotions that repeat leave the interpreter to the threads that compute.

    Args:
        weights: The pool.
        model: The live model, for the paths of all its modules.
    """

    def __init__(self, weights: LoraWeights, model: torch.nn.Module) -> None:
        self._sites = weights.sites
        self._max_rank = weights.max_rank
        self._host_modules = [path for path, _ in model.named_modules() if path]
        self._vocab_size = getattr(getattr(model, "config", None), "vocab_size", None)
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
            if identity is not None and seen is not None:
                file = files.enter_context(open_weights(source))
                # The file that was just opened may be another than the one that was just looked at.
                if FileIdentity.of(file) == identity[1]:
                    return seen.reading_from(file.fileno())
        return self._fit(files.enter_context(opened(source)))

    def _fit(self, adapter: Adapter) -> Prepared:
        vocab_size = self._vocab_size if isinstance(self._vocab_size, int) else None
        resolved = resolve(adapter, self._sites, self._max_rank, host_modules=self._host_modules, vocab_size=vocab_size)
        pairs = [(pair.site_index, pair.rank, pair.scale, _source(pair.a), _source(pair.b)) for pair in resolved.pairs]
        if not isinstance(adapter, AdapterFile):
            return Prepared(pairs, adapter.config, None, resolved.report)
        # Header and config were read at different moments; from here on the core watches the file that it reads.
        adapter.check_unchanged()
        prepared = Prepared(pairs, adapter.config, adapter.identity, resolved.report)
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


def wanted_sites(sources: Iterable[Source], model: torch.nn.Module) -> list[str]:
    """The module paths that adapters target in a model."""
    paths = [path for path, _ in model.named_modules() if path]
    wanted: set[str] = set()
    for source in sources:
        with opened(source) as adapter:
            wanted.update(target_paths(adapter, paths))
    return sorted(wanted)


def _source(tensor: TensorRef) -> tuple[Any, ...]:
    if tensor.file is not None:
        return ("file", tensor.file.fileno(), tensor.offset, tensor.dtype, tensor.shape)
    raw = np.frombuffer(tensor.data or b"", np.uint8)
    return ("memory", int(raw.ctypes.data), tensor.nbytes, raw, tensor.dtype, tensor.shape)


def _kinds(items: tuple[Any, ...]) -> str:
    return ", ".join(type(item).__name__ for item in items)
