"""An adapter as it comes: a PEFT folder on disk, or tensors in memory."""

from __future__ import annotations

import errno
import io
import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Final, NoReturn

from .config import MAX_CONFIG_BYTES, PeftAdapterConfig, parse_config
from .errors import AdapterConfigError, AdapterFileError, RankError
from .keys import shown
from .safetensors import FileIdentity, open_regular, read_exact, read_header
from .tensors import TensorRef, memory_tensor

CONFIG_NAME: Final = "adapter_config.json"
WEIGHTS_NAME: Final = "adapter_model.safetensors"
PICKLE_NAME: Final = "adapter_model.bin"
_ADDED_TOKENS: Final = "added_tokens.json"
_MEMORY: Final = "in memory"
_CONVERT: Final = (
    'python -c "import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, v in '
    "torch.load('adapter_model.bin', map_location='cpu', weights_only=True).items()}, 'adapter_model.safetensors')\""
)


@dataclass
class Adapter:
    """A config and tensors that were described but not read; nothing was compared with a model yet.

    Attributes:
        where: The folder in quotes, or "in memory"; for messages.
        config: The settings.
        tensors: The tensors by name.
        added_tokens: The token ids of `added_tokens.json`, by token.
        warnings: What a reader should know though nothing is wrong.
    """

    where: str
    config: PeftAdapterConfig
    tensors: Mapping[str, TensorRef]
    added_tokens: Mapping[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def path(self) -> str | None:
        """The folder, or None for an adapter in memory."""
        return None

    def check_rank(self, rank: int, max_rank: int, module: str) -> None:
        """Refuse a rank that the pool has no room for.

        Raises:
            RankError: `rank` is above `max_rank`.
        """
        if rank > max_rank:
            raise RankError(
                f"adapter {self.where} has rank {rank} at {shown(module)}; expected at most max_rank = {max_rank}: attach with "
                f"max_rank={rank} or more",
                path=self.path,
                rank=rank,
                max_rank=max_rank,
                module=module,
            )


@dataclass
class AdapterFile(Adapter):
    """An adapter on disk, its weights file open for positioned reads. Close it, or use it in a `with`.

    Attributes:
        directory: The folder.
        config_identity: Which `adapter_config.json` was read.
        weights_identity: Which weights file is open.
        file: The open weights file.
    """

    directory: str = ""
    config_identity: FileIdentity = field(default=FileIdentity(0, 0, 0, 0, 0))
    weights_identity: FileIdentity = field(default=FileIdentity(0, 0, 0, 0, 0))
    file: io.FileIO = field(default=None, repr=False)  # type: ignore[assignment]

    @property
    def path(self) -> str | None:
        """The folder."""
        return self.directory

    @property
    def identity(self) -> tuple[FileIdentity, FileIdentity]:
        """Config and weights together: while both are the same, so is the content."""
        return self.config_identity, self.weights_identity

    def check_unchanged(self) -> None:
        """Compare the files on disk with those that were opened; call it after the last read.

        Raises:
            AdapterFileError: One was written, replaced or removed meanwhile, so that config and weights may not belong together.
        """
        if FileIdentity.of(self.file) != self.weights_identity or identity_of(self.directory) != self.identity:
            raise AdapterFileError(
                f"{self.where} changed while it was read; expected it to stay as it is until the load is done: load it again",
                path=self.directory,
            )

    def close(self) -> None:
        """Close the weights file; tensors can no longer be read. May be called twice."""
        self.file.close()

    def __enter__(self) -> AdapterFile:
        """Nothing: it is open."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()


def identity_of(directory: str | os.PathLike[str]) -> tuple[FileIdentity, FileIdentity] | None:
    """The identity of an adapter's two files as they are now, or None if one is missing."""
    folder = os.fspath(directory)
    try:
        return FileIdentity.of(os.path.join(folder, CONFIG_NAME)), FileIdentity.of(os.path.join(folder, WEIGHTS_NAME))
    except (OSError, ValueError):
        return None


def read_adapter(directory: str | os.PathLike[str]) -> AdapterFile:
    """Open a PEFT folder and check that its two files are whole; no tensor is read, nothing is downloaded.

    Args:
        directory: The folder with `adapter_config.json` and `adapter_model.safetensors`.

    Returns:
        The open adapter; the caller closes it.

    Raises:
        AdapterFileError: The folder or a file is missing, truncated, malformed, a Git LFS pointer or a pickle.
        AdapterConfigError: The config is not that of a LoRA adapter, or of a variant that is not supported.
    """
    folder = os.fspath(directory)
    if not isinstance(folder, str):
        raise TypeError(f"found a path of {type(folder).__name__}; expected a str or a Path")
    raw, config_identity = _read_small(folder, CONFIG_NAME)
    config = parse_config(raw, os.path.join(folder, CONFIG_NAME))
    names = _listing(folder)
    _refuse_other_layouts(folder, names)
    path = os.path.join(folder, WEIGHTS_NAME)
    file = _open(folder, WEIGHTS_NAME)
    try:
        weights_identity = FileIdentity.of(file)
        infos, _ = read_header(file, path)
        tensors = {
            name: TensorRef(name, info.dtype, info.shape, info.offset, info.nbytes, file=file) for name, info in infos.items()
        }
        adapter = AdapterFile(
            where=repr(folder),
            config=config,
            tensors=tensors,
            directory=folder,
            config_identity=config_identity,
            weights_identity=weights_identity,
            file=file,
        )
        if _ADDED_TOKENS in names:
            adapter.added_tokens = _added_tokens(folder, adapter.warnings)
        return adapter
    except BaseException:
        file.close()
        raise


def read_pickled(directory: str | os.PathLike[str]) -> Adapter:
    """Read a PEFT folder whose weights are an `adapter_model.bin`, with torch's weights-only unpickler; it needs torch.

    Nothing else of the package does this: it is for looking at an old adapter before converting it. The tensors of files that
    torch wrote since 1.6 are mapped, so do not change the file meanwhile.

    Args:
        directory: The folder with `adapter_config.json` and `adapter_model.bin`.

    Raises:
        AdapterFileError: A file is missing, or the pickle holds anything but tensors by name.
        AdapterConfigError: As `read_adapter`.
    """
    import torch

    folder = os.fspath(directory)
    raw, _ = _read_small(folder, CONFIG_NAME)
    config = parse_config(raw, os.path.join(folder, CONFIG_NAME))
    path = os.path.join(folder, PICKLE_NAME)
    _open(folder, PICKLE_NAME).close()
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:
        raise AdapterFileError(
            f"{path!r} is no pickle of tensors alone ({type(error).__name__}: {shown(str(error))}); expected what torch.save "
            "writes of a state dict",
            path=path,
        ) from None
    if not isinstance(tensors, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise AdapterFileError(f"{path!r} holds a {type(tensors).__name__}; expected a dict of tensors by name", path=path)
    return replace(memory_adapter(tensors, config), where=repr(folder))


def open_weights(directory: str | os.PathLike[str]) -> io.FileIO:
    """The weights file of a PEFT folder, open for positioned reads; nothing of it is checked.

    Raises:
        AdapterFileError: There is no such file.
    """
    return _open(os.fspath(directory), WEIGHTS_NAME)


def config_of(given: Any) -> PeftAdapterConfig:
    """A config as it may be given with a call.

    Raises:
        TypeError: It is none.
        AdapterConfigError: The config is refused.
    """
    if isinstance(given, PeftAdapterConfig):
        return given
    fields = given.to_dict() if hasattr(given, "to_dict") else given
    if not isinstance(fields, Mapping):
        raise TypeError(f"found a config of {type(given).__name__}; expected a PeftAdapterConfig, a mapping or peft.LoraConfig")
    return PeftAdapterConfig.from_dict({"peft_type": "LORA", **fields})


def memory_adapter(tensors: Mapping[str, Any], config: Any) -> Adapter:
    """Describe an adapter that is in memory, as `peft.get_peft_model_state_dict` gives it.

    Args:
        tensors: Torch tensors or numpy arrays by PEFT's names. They are not copied: leave them alone until the load is done.
        config: A `PeftAdapterConfig`, a mapping with PEFT's fields, or PEFT's own `LoraConfig`.

    Raises:
        TypeError: An argument of another kind.
        AdapterConfigError: The config is refused.
        AdapterFileError: A tensor has a dtype that is not served.
    """
    config = config_of(config)
    if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
        raise TypeError(f"found tensors of {type(tensors).__name__}; expected a mapping: name -> tensor")
    return Adapter(_MEMORY, config, {name: memory_tensor(name, tensor) for name, tensor in tensors.items()})


def _open(folder: str, name: str) -> io.FileIO:
    path = os.path.join(folder, name)
    try:
        return open_regular(path)
    except AdapterFileError:
        raise
    except (OSError, ValueError) as error:
        _explain(folder, name, error)


def _read_small(folder: str, name: str, limit: int = MAX_CONFIG_BYTES) -> tuple[bytes, FileIdentity]:
    path = os.path.join(folder, name)
    with _open(folder, name) as file:
        identity = FileIdentity.of(file)
        if identity.size > limit:
            raise AdapterFileError(
                f"{path!r} is {identity.size} bytes long; expected at most {limit}", path=path, found=identity.size, expected=limit
            )
        return bytes(read_exact(file, 0, identity.size, path)), identity


def _explain(folder: str, name: str, error: Exception) -> NoReturn:
    """Say which of the folder and the file is missing, and what is there in its place."""
    if not isinstance(error, OSError):
        raise AdapterFileError(f"{folder!r} is no path: {error}", path=folder) from None
    if error.errno not in (errno.ENOENT, errno.ENOTDIR):
        raise AdapterFileError(f"{os.path.join(folder, name)!r} cannot be opened: {error.strerror}", path=folder) from error
    if os.path.isfile(folder):
        what = f"{folder!r} is a file; expected the folder with {CONFIG_NAME} and {WEIGHTS_NAME}"
    elif not os.path.isdir(folder):
        bare = folder.strip(" \t\r\n'\"[](),")
        hint = f"; did you mean {bare!r}, which exists?" if bare != folder and os.path.isdir(bare) else ""
        what = f"adapter folder {folder!r} does not exist; expected a local folder (nothing is downloaded){hint}"
    else:
        what = f"adapter folder {folder!r} exists but has no {name}; {_instead(_listing(folder), name)}"
    raise AdapterFileError(what, path=folder) from None


def _instead(names: frozenset[str], name: str) -> str:
    """What a folder holds in place of the file that is expected in it."""
    if name == CONFIG_NAME:
        if "config.json" in names:
            return "it has a config.json, as a base model has; expected an adapter as PEFT's save_pretrained writes it"
        return "expected an adapter as PEFT's save_pretrained writes it"
    shards = sorted(found for found in names if found.startswith("adapter_model-") or found.endswith(".safetensors.index.json"))
    if shards:
        return f"it is sharded ({shards[0]}), which is not supported; expected one file"
    if PICKLE_NAME in names:
        return f"it has {PICKLE_NAME}, a pickle, which is never loaded; convert it in that folder: {_CONVERT}"
    others = sorted(found for found in names if found.endswith((".safetensors", ".bin", ".pt", ".gguf")))
    return f"expected the weights under that name{f' (found {others[0]})' if others else ''}"


def _listing(folder: str) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def _refuse_other_layouts(folder: str, names: frozenset[str]) -> None:
    """Refuse files beside the weights that would have to be read too."""
    for name in ("new_embeddings.safetensors", "new_embeddings.bin"):
        if name in names:
            raise AdapterConfigError(
                f"{folder!r} has a {name}: extra vocabulary kept beside the adapter is not supported; expected trainable tokens "
                "or modules_to_save as PEFT writes them",
                path=folder,
                key="new_embeddings",
            )


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31


def _added_tokens(folder: str, warnings: list[str]) -> dict[str, int]:
    """The ids of `added_tokens.json`; a malformed one is no reason to refuse the adapter."""
    try:
        raw, _ = _read_small(folder, _ADDED_TOKENS)
        found = json.loads(raw)
        if isinstance(found, dict) and all(map(_is_token_id, found.values())):
            return found
        warnings.append(f"{_ADDED_TOKENS} is no map of tokens to ids and was ignored")
    except (AdapterFileError, ValueError, RecursionError) as error:
        warnings.append(f"{_ADDED_TOKENS} was ignored: {shown(str(error), 200)}")
    return {}
