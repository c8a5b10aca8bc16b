"""`hotslot inspect`: what is in an adapter, and what of it a model would take."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .adapter import AdapterFile, read_adapter, resolve
from .audit import Audit, Roles
from .errors import AdapterConfigError, AdapterError
from .extras import FEATURES
from .keys import Role
from .report import LoadReport
from .safetensors import read_exact

if TYPE_CHECKING:
    from .sites import ModelSite

_CHUNK = 1 << 22


@dataclass(frozen=True)
class ModuleSummary:
    """One module of an adapter.

    Attributes:
        module: Its path in the model that was trained.
        holds: What its tensors are: "lora_A", "lora_B", ...
        rank: Its rank, or None without a pair.
        scale: Its scale, or None without a pair.
        nbytes: Bytes of its tensors.
    """

    module: str
    holds: tuple[str, ...]
    rank: int | None
    scale: float | None
    nbytes: int


@dataclass
class Inspection:
    """What `inspect_adapter` found.

    Attributes:
        directory: The folder.
        sha256: Digest of the weights file.
        nbytes: Its size.
        dtypes: Tensors by dtype.
        written_by: The release of PEFT that wrote it, if it says so.
        base_model: The model it was trained on, by its own word.
        rank: `r` of the config.
        alpha: `lora_alpha` of the config.
        rslora: Whether the scale is alpha / sqrt(r).
        features: What it uses beside plain LoRA, of `extras.FEATURES`.
        modules: Its modules.
        refusal: Why it would be refused whatever the model, or by this model; None if it fits.
        report: What the model would take; None without a model or where it is refused.
    """

    directory: str
    sha256: str
    nbytes: int
    dtypes: dict[str, int]
    written_by: str | None
    base_model: str | None
    rank: int
    alpha: float
    rslora: bool
    features: list[str] = field(default_factory=list)
    modules: list[ModuleSummary] = field(default_factory=list)
    refusal: str | None = None
    report: LoadReport | None = None

    def to_dict(self) -> dict[str, Any]:
        """The findings in values that JSON can hold."""
        found = dict(vars(self))
        found["format"] = "peft"
        found["modules"] = [vars(module) for module in self.modules]
        found["report"] = None if self.report is None else self.report.to_dict()
        return found

    def __str__(self) -> str:
        """The findings for people."""
        by_kind: dict[tuple[str, int | None, float | None, tuple[str, ...]], list[ModuleSummary]] = {}
        for module in self.modules:
            by_kind.setdefault((module.module.rpartition(".")[2], module.rank, module.scale, module.holds), []).append(module)
        scale = "alpha / sqrt(r)" if self.rslora else "alpha / r"
        lines = [
            f"{self.directory}",
            f"  format    PEFT LoRA, written by {f'peft {self.written_by}' if self.written_by else 'an unknown release'}",
            f"  base      {self.base_model or 'not named'}",
            f"  config    r = {self.rank}, alpha = {self.alpha:g}, scale = {scale}",
            f"  weights   {self.nbytes} bytes, {', '.join(f'{count} x {dtype}' for dtype, count in self.dtypes.items())}",
            f"  sha256    {self.sha256}",
            *(f"  uses      {FEATURES[feature]}" for feature in self.features),
            f"  modules   {len(self.modules)}",
        ]
        for (kind, rank, factor, holds), modules in by_kind.items():
            size = sum(module.nbytes for module in modules)
            what = f"rank {rank}, scale {factor:g}" if rank is not None and factor is not None else ", ".join(holds)
            lines.append(f"    {kind:<16} x{len(modules):<4} {what:<24} {size} bytes")
        if self.report is not None:
            lines += ["  in the model", *(f"    {line}" for line in str(self.report).splitlines())]
        if self.refusal is not None:
            lines.append(f"  refused   {self.refusal}")
        return "\n".join(lines)


def inspect_adapter(directory: str | os.PathLike[str], model: Any = None, max_rank: int | None = None) -> Inspection:
    """Look into an adapter's folder, and say what a model would make of it; no pickle is loaded, nothing is downloaded.

    Args:
        directory: A PEFT folder.
        model: A torch model, or a local folder with a transformers model (its config is enough); None looks at the file alone.
        max_rank: The limit of the pool it is meant for; None for no limit.

    Raises:
        AdapterFileError: The folder or a file is missing or malformed.
        AdapterConfigError: It is no LoRA adapter.
    """
    with read_adapter(directory) as adapter:
        found = _describe(adapter)
        try:
            modules = Audit(adapter, FEATURES, lambda _: False, refuse_copies=False).modules()
            found.modules = [_summary(adapter, module, roles) for module, roles in modules.items()]
            found.features = _features(adapter, modules)
            limit = max_rank if max_rank is not None else max([module.rank or 0 for module in found.modules], default=0)
            if model is not None:
                sites = [site.site for site in _sites(model)]
                found.report = resolve(adapter, sites, max(limit, 1)).report
            elif found.features:
                Audit(adapter, (), lambda _: True, refuse_copies=False).modules()
        except AdapterError as error:
            found.refusal = str(error)
        return found


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the `hotslot` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="look into an adapter, and say what a model would make of it",
        description="Look into a PEFT adapter: ranks, scales, bytes, digest; with --model, what of it would be applied and why "
        "not. Exit status: 0 it fits, 1 it would be refused, 2 it cannot be read.",
    )
    parser.add_argument("directory", metavar="DIR", help="the adapter's folder")
    parser.add_argument("--model", metavar="M", help="a local folder with a transformers model (config.json is enough)")
    parser.add_argument("--max-rank", type=int, metavar="R", help="refuse ranks above this")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = inspect_adapter(options.directory, options.model, options.max_rank)
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0 if found.refusal is None else 1


def _describe(adapter: AdapterFile) -> Inspection:
    config = adapter.config
    dtypes: dict[str, int] = {}
    for tensor in adapter.tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    return Inspection(
        directory=adapter.directory,
        sha256=_sha256(adapter),
        nbytes=adapter.weights_identity.size,
        dtypes=dtypes,
        written_by=config.peft_version,
        base_model=config.base_model,
        rank=config.r,
        alpha=config.lora_alpha,
        rslora=config.use_rslora,
    )


def _sha256(adapter: AdapterFile) -> str:
    digest = hashlib.sha256()
    size = adapter.weights_identity.size
    for offset in range(0, size, _CHUNK):
        digest.update(read_exact(adapter.file, offset, min(_CHUNK, size - offset), adapter.directory))
    return digest.hexdigest()


def _summary(adapter: AdapterFile, module: str, roles: Roles) -> ModuleSummary:
    first = roles.get((Role.A, "weight")) or roles.get((Role.EMBEDDING_A, "weight"))
    rank = None if first is None else adapter.tensors[first.tensor].shape[0]
    return ModuleSummary(
        module=module,
        holds=tuple(role.value if role is not Role.SAVED else leaf for role, leaf in roles),
        rank=rank,
        scale=None if rank is None else adapter.config.scaling(module, rank),
        nbytes=sum(adapter.tensors[key.tensor].nbytes for key in roles.values()),
    )


def _features(adapter: AdapterFile, modules: dict[str, Roles]) -> list[str]:
    audit = Audit(adapter, FEATURES, lambda _: False, refuse_copies=False)
    used = {audit.feature_of(key) for roles in modules.values() for key in roles.values()} | set(audit.asked())
    return [feature for feature in FEATURES if feature in used]


def _sites(model: Any) -> list[ModelSite]:
    from .sites import walk

    return [site for site in walk(_load(model) if isinstance(model, (str, os.PathLike)) else model) if site.refusal is None]


def _load(folder: str | os.PathLike[str]) -> Any:
    """A transformers model without weights, from its config alone."""
    path = os.fspath(folder)
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise AdapterConfigError(
            f"model folder {path!r} has no config.json; expected a local folder with a transformers model", path=path, key="model"
        )
    try:
        import torch
        import transformers
    except ImportError as error:
        raise AdapterConfigError(
            "looking at a model needs torch and transformers; install hotslot[transformers]", path=path, key="model"
        ) from error
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    name = (config.architectures or [""])[0]
    with torch.device("meta"):
        kind = getattr(transformers, name, None)
        return transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
