"""What a load did: which tensors were applied, which were ignored and why."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from .keys import shown

if TYPE_CHECKING:
    from ._core import PackedAdapter, PackedFile

_SHARED_EXPERTS: Final = frozenset(("shared_expert", "shared_experts"))


@dataclass(frozen=True)
class IgnoredTensor:
    """A tensor of the file that changes nothing.

    Attributes:
        name: Its name in the file.
        reason: Why it is ignored.
        nbytes: Its size.
    """

    name: str
    reason: str
    nbytes: int


@dataclass
class LoadReport:
    """What was found in one adapter, and what becomes of it.

    Attributes:
        applied: Modules that are adapted.
        modules: How many of them by kind, as `module_kind` names it: {"q_proj": 30, "shared_expert.up_proj": 30, ...}.
        ranks: How many of them by rank.
        scales: The distinct scales, ascending.
        nbytes: Bytes of the tensors that are applied.
        dtypes: How many tensors by dtype.
        ignored: Tensors that change nothing.
        renamed: Modules whose path in the host is another than in the file, as (file, host).
        warnings: What a reader should know though nothing is wrong.
        rounded: Values that the pool's dtype cannot hold exactly; None until the adapter is packed.
        digest: The adapter's `cache_id`; None until the adapter is packed.
    """

    applied: int = 0
    modules: dict[str, int] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)
    scales: tuple[float, ...] = ()
    nbytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    ignored: list[IgnoredTensor] = field(default_factory=list)
    renamed: list[tuple[str, str]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    rounded: int | None = None
    digest: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The report in values that JSON can hold."""
        found = dict(vars(self))
        found["ignored"] = [vars(tensor) for tensor in self.ignored]
        found["renamed"] = [list(pair) for pair in self.renamed]
        found["ranks"] = {str(rank): count for rank, count in self.ranks.items()}
        found["scales"] = list(self.scales)
        return found

    def to_json(self) -> str:
        """The report as text, for `from_json`."""
        return json.dumps(self.to_dict(), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> LoadReport:
        """The report that a packed adapter carries, which may be another process's.

        Raises:
            ValueError: It is none.
        """
        found: Any = json.loads(text)
        if not isinstance(found, dict) or found.keys() != cls.__dataclass_fields__.keys():
            raise ValueError(f"no report: {shown(text)}")
        ignored = [IgnoredTensor(str(it["name"]), str(it["reason"]), int(it["nbytes"])) for it in found.pop("ignored")]
        report = cls(**found, ignored=ignored)
        report.modules = _numbers(report.modules)
        report.ranks = {int(rank): count for rank, count in _numbers(report.ranks).items()}
        report.dtypes = _numbers(report.dtypes)
        report.scales = tuple(float(scale) for scale in report.scales)
        report.renamed = [(str(file), str(host)) for file, host in report.renamed]
        report.warnings = [str(warning) for warning in report.warnings]
        report.applied, report.nbytes = int(report.applied), int(report.nbytes)
        return report

    def twin(self) -> LoadReport:
        """The same for another load, which may add to its own."""
        # Each promotion makes one: a third of what `dataclasses.replace` takes.
        twin = object.__new__(type(self))
        vars(twin).update((name, it.copy() if isinstance(it, (dict, list)) else it) for name, it in vars(self).items())
        return twin

    def __str__(self) -> str:
        """A few lines for people."""
        lines = [
            f"applied   {self.applied} modules ({_counts(self.modules)}), {self.nbytes} bytes ({_counts(self.dtypes)})",
            f"rank      {_counts(self.ranks)}, scale {', '.join(f'{scale:g}' for scale in self.scales)}",
        ]
        if self.renamed:
            lines.append(f"renamed   {len(self.renamed)} modules, e.g. {shown(self.renamed[0][0])} -> {self.renamed[0][1]}")
        if self.rounded is not None:
            lines.append(f"rounded   {self.rounded} values")
        if self.digest is not None:
            lines.append(f"digest    {self.digest}")
        lines += [f"ignored   {shown(tensor.name)}: {tensor.reason} ({tensor.nbytes} bytes)" for tensor in self.ignored]
        lines += [f"warning   {warning}" for warning in self.warnings]
        return "\n".join(lines)


def report_of_packed(packed: PackedAdapter | PackedFile) -> LoadReport:
    """The report that a packed adapter carries; one that came without says what its pairs say."""
    header = json.loads(packed.header) if not hasattr(packed, "report") or packed.report is None else {"report": packed.report}
    try:
        return LoadReport.from_json(header["report"])
    except (ValueError, TypeError, KeyError, AttributeError):
        pairs = json.loads(packed.header)["pairs"]
    report = LoadReport(applied=len(pairs), nbytes=packed.nbytes)
    for pair in pairs:
        kind = module_kind(pair["site"])
        report.modules[kind] = report.modules.get(kind, 0) + 1
        report.ranks[pair["rank"]] = report.ranks.get(pair["rank"], 0) + 1
    report.scales = tuple(sorted({float(pair["scale"]) for pair in pairs}))
    return report


def module_kind(path: str) -> str:
    """What a module is called among its like: the last part of its path, and that of a shared expert with its parent's.

    Example:
        >>> module_kind("model.layers.0.mlp.up_proj"), module_kind("model.layers.0.mlp.shared_expert.up_proj")
        ('up_proj', 'shared_expert.up_proj')
    """
    parent, _, leaf = path.rpartition(".")
    name = parent.rpartition(".")[2]
    return f"{name}.{leaf}" if name in _SHARED_EXPERTS else leaf


def _numbers(found: Mapping[Any, Any]) -> dict[Any, int]:
    return {str(key): int(value) for key, value in found.items()}


def _counts(found: Mapping[Any, int]) -> str:
    return ", ".join(f"{key} x{count}" for key, count in found.items()) or "none"
