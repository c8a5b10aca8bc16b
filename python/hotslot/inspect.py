"""`hotslot inspect`: what is in an adapter, and what of it a model would take."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from .adapter import Adapter, AdapterFile, read_adapter
from .audit import Audit, Roles
from .config import PeftAdapterConfig
from .errors import AdapterConfigError, AdapterError
from .extras import FEATURES
from .folder import PICKLE_NAME, WEIGHTS_NAME, read_pickled
from .keys import Role, shown
from .patterns import PatternTable
from .pool import MAX_RANK, check_limits
from .report import LoadReport, module_kind
from .safetensors import open_regular, read_exact

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


@dataclass(frozen=True)
class ExtraSummary:
    """One thing that a model would take beside the pairs of its linear layers.

    Attributes:
        kind: "gain" (DoRA), "lora_bias", "bias", "saved", "embedding", "router", "tokens", "expert" or "base_copy".
        module: The model's path of the module.
        what: Its shape, rank, tokens or projection, in words.
        nbytes: Bytes of its tensors.
    """

    kind: str
    module: str
    what: str
    nbytes: int


@dataclass
class Inspection:
    """What `inspect_adapter` found.

    Attributes:
        directory: The folder.
        sha256: Digest of the weights file, byte for byte.
        cache_id: The content's id, as `AttachedModel.cache_id` has it in a pool of `pool_dtype`: equal however the keys are
            spelled and the tensors ordered. None without a model or where it is refused.
        pool_dtype: What `cache_id` is for.
        nbytes: The file's size.
        dtypes: Tensors by dtype.
        written_by: The release of PEFT that wrote it, if it says so.
        base_model: The model it was trained on, by its own word.
        rank: `r` of the config.
        alpha: `lora_alpha` of the config.
        rslora: Whether the scale is alpha / sqrt(r).
        features: What it uses beside plain LoRA, of `extras.FEATURES`.
        modules: Its modules.
        refusal: Why it would be refused whatever the model, or by this model; None if it fits.
        report: What the model would take and what not; None without a model, or where nothing of it fits. It is there beside a
            refusal if only some modules do not fit: then it says what a model without the others would take.
        extras: What the model would take beside the pairs of its linear layers.
        invocation_tokens: aLoRA: the tokens that it is active from.
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
    extras: list[ExtraSummary] = field(default_factory=list)
    invocation_tokens: tuple[int, ...] = ()
    cache_id: str | None = None
    pool_dtype: str = "bfloat16"

    def to_dict(self) -> dict[str, Any]:
        """The findings in values that JSON can hold."""
        found = dict(vars(self))
        found["format"] = "peft"
        found["modules"] = [vars(module) for module in self.modules]
        found["extras"] = [vars(extra) for extra in self.extras]
        found["report"] = None if self.report is None else self.report.to_dict()
        return found

    def __str__(self) -> str:
        """The findings for people."""
        by_kind: dict[tuple[str, int | None, float | None, tuple[str, ...]], list[ModuleSummary]] = {}
        for module in self.modules:
            by_kind.setdefault((module_kind(module.module), module.rank, module.scale, module.holds), []).append(module)
        scale = "alpha / sqrt(r)" if self.rslora else "alpha / r"
        lines = [
            f"{self.directory}",
            f"  format    PEFT LoRA, written by {f'peft {shown(self.written_by)}' if self.written_by else 'an unknown release'}",
            f"  base      {shown(self.base_model or 'not named')}",
            f"  config    r = {self.rank}, alpha = {self.alpha:g}, scale = {scale}",
            f"  weights   {self.nbytes} bytes, {', '.join(f'{count} x {dtype}' for dtype, count in self.dtypes.items())}",
            f"  sha256    {self.sha256} (of the file)",
            *([f"  cache_id  {self.cache_id} (of the content, in a {self.pool_dtype} pool)"] if self.cache_id else []),
            *(f"  uses      {FEATURES[feature]}" for feature in self.features),
            f"  modules   {len(self.modules)}",
        ]
        for (kind, rank, factor, holds), modules in by_kind.items():
            size = sum(module.nbytes for module in modules)
            what = f"rank {rank}, scale {factor:g}" if rank is not None and factor is not None else ", ".join(holds)
            lines.append(f"    {shown(kind):<16} x{len(modules):<4} {what:<24} {size} bytes")
        if self.report is not None:
            title = "  in the model" if self.refusal is None else "  in the model, if it had to take what fits"
            lines += [title, *(f"    {line}" for line in str(self.report).splitlines())]
        grouped = Counter((extra.kind, module_kind(extra.module), extra.what) for extra in self.extras)
        lines += [f"    {kind:<9} {name} x{count}: {what}" for (kind, name, what), count in grouped.items()]
        if self.invocation_tokens:
            lines.append(f"    active    from the last {', '.join(map(str, self.invocation_tokens))} on (aLoRA)")
        if self.refusal is not None:
            lines.append(f"  refused   {self.refusal}")
        return "\n".join(lines)


def inspect_adapter(
    directory: str | os.PathLike[str],
    model: Any = None,
    max_rank: int | None = None,
    *,
    pool_dtype: str = "bfloat16",
    weights_only: bool = False,
) -> Inspection:
    """Look into an adapter's folder, and say what a model would make of it; no pickle is loaded, nothing is downloaded.

    Args:
        directory: A PEFT folder.
        model: A torch model, or a local folder with a transformers model (its config is enough); None looks at the file alone.
        max_rank: The limit of the pool it is meant for; None for the largest that a pool can have.
        pool_dtype: The pool's dtype, which is part of the content's id.
        weights_only: Look at an `adapter_model.bin` with torch's weights-only unpickler.

    Raises:
        AdapterFileError: The folder or a file is missing or malformed.
        AdapterConfigError: It is no LoRA adapter, or `model` names no transformers model.
        RankError, PoolError: `max_rank` or `pool_dtype` is none that a pool can have.
    """
    limit = MAX_RANK if max_rank is None else max_rank
    check_limits(1, limit, pool_dtype, 0)
    if isinstance(model, (str, os.PathLike)):
        model = _load(model)
    opened = nullcontext(read_pickled(directory)) if weights_only else read_adapter(directory)
    with opened as adapter:
        found = _describe(adapter, os.path.join(os.fspath(directory), PICKLE_NAME if weights_only else WEIGHTS_NAME))
        found.pool_dtype = pool_dtype
        try:
            modules = Audit(adapter, FEATURES, lambda _: False, refuse_copies=False).modules()
            alphas = PatternTable(adapter.config.alpha_pattern)
            found.modules = [_summary(adapter, module, roles, alphas) for module, roles in modules.items()]
            found.features = _features(adapter, modules)
            if model is not None:
                from .fitting import fit

                fit(adapter, model, limit, found)
            else:
                for module in found.modules:
                    if module.rank is not None and "experts" not in found.features:
                        adapter.check_rank(module.rank, limit, module.module)
        except AdapterError as error:
            found.refusal = str(error)
        return found


def add_parser(subparsers: Any) -> None:
    """Add the subcommand to the `hotslot` command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "inspect",
        help="look into an adapter, and say what a model would make of it",
        description="Look into a PEFT adapter: ranks, scales, bytes, digest; with --model, what of it would be applied and why "
        "not. No pickle is loaded unless --weights-only says so. Exit status: 0 it fits, 1 it would be refused, 2 it cannot be "
        "read, or the options make no sense.",
    )
    parser.add_argument("directory", metavar="DIR", help="the adapter's folder")
    parser.add_argument("--model", metavar="M", help="a local folder with a transformers model (config.json is enough)")
    parser.add_argument("--max-rank", type=int, metavar="R", help=f"refuse ranks above this (default {MAX_RANK})")
    parser.add_argument(
        "--pool-dtype",
        choices=("bfloat16", "float32"),
        default="bfloat16",
        help="the pool that cache_id is for (default %(default)s)",
    )
    parser.add_argument(
        "--weights-only", action="store_true", help=f"look at {PICKLE_NAME} with torch's weights-only unpickler; needs torch"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = inspect_adapter(
        options.directory, options.model, options.max_rank, pool_dtype=options.pool_dtype, weights_only=options.weights_only
    )
    print(json.dumps(found.to_dict(), indent=2) if options.json else found)
    return 0 if found.refusal is None else 1


def _describe(adapter: Adapter, path: str) -> Inspection:
    config = adapter.config
    dtypes: dict[str, int] = {}
    for tensor in adapter.tensors.values():
        dtypes[tensor.dtype] = dtypes.get(tensor.dtype, 0) + 1
    with nullcontext(adapter.file) if isinstance(adapter, AdapterFile) else open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256()
        for offset in range(0, size, _CHUNK):
            digest.update(read_exact(file, offset, min(_CHUNK, size - offset), path))
    return Inspection(
        directory=os.path.dirname(path),
        sha256=digest.hexdigest(),
        nbytes=size,
        dtypes=dtypes,
        written_by=config.peft_version,
        base_model=config.base_model,
        rank=config.r,
        alpha=config.lora_alpha,
        rslora=config.use_rslora,
    )


def _summary(adapter: Adapter, module: str, roles: Roles, alphas: PatternTable) -> ModuleSummary:
    first = roles.get((Role.A, "weight")) or roles.get((Role.EMBEDDING_A, "weight"))
    shape = () if first is None else adapter.tensors[first.tensor].shape
    rank = shape[0] if shape and shape[0] > 0 else None
    return ModuleSummary(
        module=module,
        holds=tuple(role.value if role is not Role.SAVED else leaf for role, leaf in roles),
        rank=rank,
        scale=None if rank is None else _scale(adapter.config, module, rank, alphas),
        nbytes=sum(adapter.tensors[key.tensor].nbytes for key in roles.values()),
    )


def _scale(config: PeftAdapterConfig, module: str, rank: int, alphas: PatternTable) -> float:
    patterns = alphas.matching(module)
    return config.scale_of(rank, config.alpha_pattern[patterns[0]] if patterns else config.lora_alpha)


def _features(adapter: Adapter, modules: dict[str, Roles]) -> list[str]:
    audit = Audit(adapter, FEATURES, lambda _: False, refuse_copies=False)
    used = {audit.feature_of(key) for roles in modules.values() for key in roles.values()} | set(audit.asked())
    return [feature for feature in FEATURES if feature in used]


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
    try:
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        kind = getattr(transformers, (config.architectures or [""])[0], None)
        with torch.device("meta"):
            return transformers.AutoModelForCausalLM.from_config(config) if kind is None else kind(config)
    except Exception as error:
        raise AdapterConfigError(
            f"model folder {path!r} cannot be made a model of ({type(error).__name__}: {shown(str(error))}); expected one that "
            "this release of transformers knows",
            path=path,
            key="model",
        ) from error
