"""Where an adapter's tensors go in one model: sites, shapes, ranks, scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn, Protocol

from .audit import Audit, Roles
from .errors import AdapterConfigError, AdapterShapeError, RankError
from .experts import ExpertLayout, ExpertPlacement
from .extras import FEATURES, BaseCopy, Extras, ResolvedPair, ResolvedSaved, ResolvedTokens, ResolvedVector
from .forms import PARTS, cut, join, other_form, widths
from .keys import HostTree, Key, NameSet, Role, layer_of, listed, shown
from .patterns import PatternTable
from .report import IgnoredTensor, LoadReport, module_kind

_A, _B = (Role.A, "weight"), (Role.B, "weight")
_EMBEDDING_A, _EMBEDDING_B = (Role.EMBEDDING_A, "weight"), (Role.EMBEDDING_B, "weight")
_ROOM = "attach with sites='all-linear' or sites=[...] to reserve room"
_VOCABULARY = frozenset(("embed_tokens", "lm_head", "wte", "embed_in", "embed_out", "shared"))


class SiteLike(Protocol):
    """A layer that can take an adapter: `_core.Site`, or anything with the same attributes."""

    @property
    def path(self) -> str:
        """The module's full path."""

    @property
    def kind(self) -> Any:
        """One of "linear", "conv1d", "embedding", "router", "expert"."""

    @property
    def in_features(self) -> int:
        """Columns of A; the tokens of an embedding."""

    @property
    def out_features(self) -> int:
        """Rows of B; the width of an embedding."""


class Placement:
    """One adapter against one list of sites.

    Args:
        audit: The adapter's audit, for what its tensors are.
        sites: The sites, in the pool's order.
        index: Site paths to their place in it.
        host: All of the model's module paths.
        max_rank: The pool's limit.
        strict: Refuse an adapter of which some modules do not fit.
        vocab_size: Rows of the model's embedding, if known.
        experts: The model's routed experts, by module path.
        room_hint: What to do about a module of the model that has no site, by its path; None where nothing special is known.
    """

    def __init__(
        self,
        audit: Audit,
        sites: Sequence[SiteLike],
        index: Mapping[str, int],
        host: HostTree,
        max_rank: int,
        strict: bool,
        vocab_size: int | None,
        experts: Mapping[str, ExpertLayout],
        room_hint: Callable[[str], str | None],
    ) -> None:
        self.room_hint = room_hint
        self.audit, self.adapter, self.config = audit, audit.adapter, audit.config
        self.sites, self.index, self.host = sites, index, host
        self.max_rank, self.strict, self.vocab_size, self.experts = max_rank, strict, vocab_size, experts
        self.rank_patterns, self.alpha_patterns = PatternTable(self.config.rank_pattern), PatternTable(self.config.alpha_pattern)
        self.report = LoadReport(warnings=list(self.adapter.warnings))
        self.parameters = NameSet(self.config.target_parameters)
        self.token_modules = NameSet(self.config.trainable_token_indices)
        # Modules that the host stores in another form, by the site of each part, or by the fused site and part.
        self.cuts: dict[str, tuple[Roles, tuple[int, ...]]] = {}
        self.joins: dict[int, dict[str, tuple[str, Roles]]] = {}
        self.extras = Extras(
            invocation_tokens=self.config.alora_invocation_tokens,
        )

    def place(self, modules: Mapping[str, Roles]) -> list[ResolvedPair]:
        """The pairs, sorted by site; `extras` and `report` are filled on the way.

        Raises:
            AdapterShapeError: Modules that the model lacks or that have no room, or other shapes than the model's.
            AdapterConfigError: A rank other than the config's, or tensors that contradict the config's flags.
            RankError: A rank above the limit.
        """
        placed = self._by_site(self._place_experts(modules))
        pairs = sorted([*self._pairs(placed), *self._reformed()], key=lambda pair: pair.site_index)
        for index in sorted(placed):
            for key in placed[index].values():
                self._place_extra(index, key)
        self._check_completeness(pairs)
        self._check_added_tokens()
        self._check_hints(modules)
        plain = [pair for pair in pairs if _kind(self.sites[pair.site_index]) not in ("embedding", "router")]
        self.extras.embeddings = [pair for pair in pairs if _kind(self.sites[pair.site_index]) == "embedding"]
        self.extras.routers = [pair for pair in pairs if _kind(self.sites[pair.site_index]) == "router"]
        self._fill_report(pairs, placed)
        return plain

    def _place_experts(self, modules: Mapping[str, Roles]) -> dict[str, Roles]:
        """Take the pairs of routed experts out of the modules; the others are returned."""
        rest: dict[str, Roles] = {}
        experts: dict[str, Roles] = {}
        for module, roles in modules.items():
            features = {self.audit.feature_of(key) for key in roles.values()}
            (experts if "experts" in features else rest)[module] = roles
        placement = ExpertPlacement(self.adapter, self.experts, self.host, self.max_rank)
        self.extras.experts = placement.place(experts)
        self.report.warnings += placement.warnings
        return rest | {module: experts[module] for module in placement.absent}

    def _by_site(self, modules: Mapping[str, Roles]) -> dict[int, Roles]:
        """The tensors of each site; copies of base weights need none."""
        placed: dict[int, Roles] = {}
        absent: list[str] = []
        roomless: list[str] = []
        for module, roles in modules.items():
            path = self.host.find(module)
            copies = [key for key in roles.values() if key.role is Role.BASE_COPY and self.audit.feature_of(key) is None]
            self._skip_copies(copies, path)
            rest: Roles = {role: key for role, key in roles.items() if key not in copies}
            if not rest:
                continue
            site = None if path is None else self.index.get(path)
            forms = other_form(module, self.host) if path is None else []
            if forms and all(form in self.index for form in forms):
                self._note_form(module, rest, forms)
                continue
            if path is None or site is None:
                is_there = path is not None or bool(forms)
                (roomless if is_there else absent).append(module)
                reason = "the pool has no room for its module" if is_there else "the model has no such module"
                self.report.ignored += [IgnoredTensor(key.tensor, reason, self._nbytes(key)) for key in rest.values()]
                continue
            if site in placed:
                self.audit.refuse_twins(next(iter(placed[site].values())).tensor, next(iter(rest.values())).tensor, path)
            if path != module:
                self.report.renamed.append((module, path))
            placed[site] = rest
        self._refuse_both_forms(placed)
        any_placed = bool(placed or self.extras.experts or self.cuts or self.joins)
        if (absent or roomless) and (self.strict or not any_placed):
            self._refuse_unplaced(absent, roomless, any_placed)
        return placed

    def _note_form(self, module: str, roles: Roles, paths: list[str]) -> None:
        """Keep a module that the host stores in another form, if all that it holds is A and B."""
        others = {self.audit.feature_of(key): key.tensor for role, key in roles.items() if role not in (_A, _B)}
        if others:
            feature = next(iter(others))
            what = FEATURES.get(str(feature), str(feature))
            stored = ", ".join(path.rpartition(".")[2] for path in paths)
            self.audit.refuse_names(
                list(others.values()),
                f"{what} at {shown(module)}, which this model stores as {stored}: only pairs can be moved to that form",
                str(feature),
            )
        self.report.renamed += [(module, path) for path in paths]
        sites = tuple(self.index[path] for path in paths)
        leaf = module.rpartition(".")[2]
        if leaf in PARTS:
            self.cuts[module] = roles, sites
            self._warn(f"the model stores {leaf} as {', '.join(PARTS[leaf])}: each gets its rows of B")
            return
        twin = self.joins.setdefault(sites[0], {}).setdefault(leaf, (module, roles))
        if twin[0] != module:
            self.audit.refuse_twins(twin[1][_A].tensor, roles[_A].tensor, module)

    def _refuse_both_forms(self, placed: Mapping[int, Roles]) -> None:
        """Refuse a layer that the file holds as it is in the model and in another form too, or in that form twice."""
        seen = {index: next(iter(roles.values())).tensor for index, roles in placed.items()}
        reformed = [(site, roles) for roles, sites in self.cuts.values() for site in sites]
        reformed += [(site, next(iter(parts.values()))[1]) for site, parts in self.joins.items()]
        for site, roles in reformed:
            if site in seen:
                self.audit.refuse_twins(seen[site], roles[_A].tensor, self.sites[site].path)
            seen[site] = roles[_A].tensor

    def _reformed(self) -> list[ResolvedPair]:
        """The pairs of modules that the host stores in another form, in its form."""
        found: list[ResolvedPair] = []
        for module, (roles, indices) in self.cuts.items():
            sizes = [self.sites[index].out_features for index in indices]
            rest = f"which this model has as {', '.join(PARTS[module.rpartition('.')[2]])} of {', '.join(map(str, sizes))} rows"
            whole = [self._checked(roles, indices[0], module, sum(sizes), rest)]
            columns = {self.sites[index].in_features for index in indices}
            if len(columns) != 1:
                a = whole[0].a
                self._refuse_shape(a.name, module, a.shape, (a.shape[0], max(columns)), f"A is [rank, in], {rest}")
            found += cut(self._scaled(whole[0]), list(zip(indices, sizes, strict=True)))
        return found + [self._joined(index, parts) for index, parts in self.joins.items()]

    def _joined(self, index: int, parts: Mapping[str, tuple[str, Roles]]) -> ResolvedPair:
        site = self.sites[index]
        parent, _, fused = site.path.rpartition(".")
        beside = self.index.get(f"{parent}.o_proj")
        rows = {part: (self.adapter.tensors[roles[_B].tensor].shape or (0,))[0] for part, (_, roles) in parts.items()}
        sizes = widths(fused, site.out_features, rows, None if beside is None else self.sites[beside].in_features)
        rest = f"which is part of {site.path} of {site.out_features} rows here"
        checked = {
            part: self._scaled(self._checked(roles, index, module, sizes[part], rest)) for part, (module, roles) in parts.items()
        }
        ordered = {part: checked[part] for part in sizes if part in checked}
        # Without keys or values to tell, what q_proj leaves must be halves.
        if len(set(list(sizes.values())[1:])) > 1 or min(sizes.values()) < 1:
            first = next(iter(ordered.values())).b
            self._refuse_shape(first.name, site.path, first.shape, (site.out_features, first.shape[1]), rest)
        pair = join(index, ordered, sizes, f"{next(iter(parts.values()))[0].rpartition('.')[0]}.{fused}")
        names = ", ".join(ordered)
        if pair.rank > self.max_rank:
            ranks = " + ".join(str(part.rank) for part in ordered.values())
            raise RankError(
                f"adapter {self.adapter.where} has rank {pair.rank} at {site.path}, which this model has in place of {names} "
                f"({ranks}); expected at most max_rank = {self.max_rank}: attach with max_rank={pair.rank} or more",
                path=self.adapter.path,
                rank=pair.rank,
                max_rank=self.max_rank,
                module=site.path,
            )
        self._warn(f"the model stores {', '.join(PARTS[fused])} as {fused}: {names} are joined to one pair of rank {pair.rank}")
        return pair

    def _checked(self, roles: Roles, index: int, module: str, rows: int, rest: str) -> ResolvedPair:
        """A and B of a module in another form, their shapes compared with the site's columns and so many rows."""
        a, b = (self.adapter.tensors[roles[half].tensor] for half in (_A, _B))
        rank = a.shape[0] if a.shape else 0
        for tensor, expected, what in (
            (a, (rank, self.sites[index].in_features), "A is [rank, in]"),
            (b, (rows, rank), "B is [out, rank]"),
        ):
            if tensor.shape != expected:
                self._refuse_shape(tensor.name, module, tensor.shape, expected, f"{what} of {shown(module)}, {rest}")
        return ResolvedPair(index, rank, 0.0, a, b, module)

    def _refuse_unplaced(self, absent: list[str], roomless: list[str], any_placed: bool) -> NoReturn:
        """Say which modules do not fit, of what kinds, and what the model has in their place."""
        names = absent or roomless
        kinds = Counter(map(module_kind, names))
        known = ", ".join(list(Counter(module_kind(site.path) for site in self.sites))[:12]) or "none"
        most = ", ".join(f"{shown(kind, 40)} x{count}" for kind, count in kinds.most_common(8))
        if absent:
            what, fix = "the model does not have", f"expected paths as in the model, whose adapted modules are {known}"
            layers = [layer for module in absent if (layer := layer_of(module)) is not None]
            hosts = [layer for site in self.sites if (layer := layer_of(site.path)) is not None]
            if layers and hosts and max(layers) > max(hosts):
                fix += f"; its last layer is {max(hosts)}, the adapter's {max(layers)}"
            if self.config.base_model:
                fix += f"; the adapter was trained on '{shown(self.config.base_model)}'"
        else:
            what = "the pool has no room for"
            hint = self.room_hint(self.host.find(roomless[0]) or roomless[0])
            fix = f"expected modules among {known}; {hint or _ROOM}"
        rest = f" and {len(roomless)} without room" if absent and roomless else ""
        scope = f"the others{rest} fit (strict=False ignores these)" if any_placed else "nothing of it fits"
        raise AdapterShapeError(
            f"adapter {self.adapter.where} targets {len(names)} modules that {what} ({most}): {listed(names)}; {scope}; {fix}",
            path=self.adapter.path,
            module=names[0],
            count=len(names),
            samples=tuple(names[:3]),
        )

    def _skip_copies(self, copies: list[Key], path: str | None) -> None:
        """Note copies of base weights; one of another size means another base."""
        for key in copies:
            tensor = self.adapter.tensors[key.tensor]
            site = None if path is None else self.index.get(path)
            expected = None if site is None else _parameter_shape(self.sites[site], key.leaf)
            if expected is None and key.module.rpartition(".")[2] in _VOCABULARY and self.vocab_size and tensor.shape:
                expected = (self.vocab_size, *tensor.shape[1:])
            if expected is not None and tensor.shape != expected:
                what = "it is a copy of a base weight of another size (was the vocabulary resized?)"
                self._refuse_shape(key.tensor, key.module, tensor.shape, expected, what)
            self.report.ignored.append(IgnoredTensor(key.tensor, "a copy of the base model's own weight", tensor.nbytes))
            if path is not None:
                self.extras.base_copies.append(BaseCopy(path, key.leaf, tensor))
        if copies:
            self._warn("copies of base weights in the file are ignored: the served base must be the one it was trained on")

    def _pairs(self, placed: Mapping[int, Roles]) -> list[ResolvedPair]:
        """A and B of each site that has them, with shapes and ranks checked."""
        found: list[ResolvedPair] = []
        wrong: list[tuple[str, str, tuple[int, ...], tuple[int, ...], str]] = []
        for index in sorted(placed):
            site, roles = self.sites[index], placed[index]
            halves = (_EMBEDDING_A, _EMBEDDING_B) if _kind(site) == "embedding" else (_A, _B)
            if halves[0] not in roles:
                continue
            if _kind(site) == "router" and "router" not in self.audit.supported:
                names = [key.tensor for key in roles.values()]
                self.audit.refuse_names(names, f"{FEATURES['router']}, which is not supported here", "router")
            a, b = (self.adapter.tensors[roles[half].tensor] for half in halves)
            rank = a.shape[0] if a.shape else 0
            if a.shape != (rank, site.in_features):
                wrong.append((a.name, site.path, a.shape, (rank, site.in_features), "A is [rank, in]"))
            elif b.shape != (site.out_features, rank):
                wrong.append((b.name, site.path, b.shape, (site.out_features, rank), "B is [out, rank]"))
            else:
                found.append(ResolvedPair(index, rank, 0.0, a, b, roles[halves[0]].module))
        if wrong:
            name, module, shape, expected, what = wrong[0]
            self._refuse_shape(name, module, shape, expected, what, tuple(item[0] for item in wrong))
        return [self._scaled(pair) for pair in found]

    def _scaled(self, pair: ResolvedPair) -> ResolvedPair:
        """The pair with its scale, once its rank agrees with the config: otherwise the scale would be anybody's guess."""
        config, rank, where = self.config, pair.rank, self.adapter.where
        # PEFT matches patterns against the parameter's name where it was targeted as one.
        parameter = f"{pair.module}.weight"
        module = parameter if self.parameters.ends(parameter) else pair.module
        patterns = self.rank_patterns.matching(module)
        ranks = {config.rank_pattern[pattern] for pattern in patterns}
        expected = config.rank_pattern[patterns[0]] if patterns else config.r
        if rank != expected and rank not in ranks:
            key = "rank_pattern" if ranks else "r"
            raise AdapterConfigError(
                f"adapter {where} holds {pair.a.name!r} of rank {rank}, and its config says {key} = {expected} for that module; "
                "expected both to be equal, or the scale is ambiguous",
                path=self.adapter.path,
                key=key,
                value=expected,
                samples=(pair.a.name,),
            )
        if len(ranks) > 1:
            self._warn("several rank patterns match one module (PEFT sorts them when it saves); the tensors' own rank is taken")
        self.adapter.check_rank(rank, self.max_rank, pair.module)
        patterns = self.alpha_patterns.matching(module)
        alphas = {config.alpha_pattern[pattern] for pattern in patterns}
        if len(alphas) > 1:
            values = ", ".join(f"{alpha:g}" for alpha in sorted(alphas))
            self._warn(f"alpha patterns of different values ({values}) match one module; the first in the file counts, as in PEFT")
        scale = config.scale_of(rank, config.alpha_pattern[patterns[0]] if patterns else config.lora_alpha)
        if scale == 0:
            self._warn("a scale is 0 (lora_alpha = 0), so those modules change nothing")
        return replace(pair, scale=scale)

    def _place_extra(self, index: int, key: Key) -> None:
        """Put one tensor that is neither A nor B into its list."""
        site, tensor = self.sites[index], self.adapter.tensors[key.tensor]
        is_embedding = _kind(site) == "embedding"
        if key.role in ((Role.EMBEDDING_A, Role.EMBEDDING_B) if is_embedding else (Role.A, Role.B)):
            return
        if key.role in (Role.MAGNITUDE, Role.B_BIAS) and not is_embedding:
            self._require_shape(key, (site.out_features,))
            (self.extras.gains if key.role is Role.MAGNITUDE else self.extras.lora_biases).append(ResolvedVector(index, tensor))
        elif key.role in (Role.SAVED, Role.BASE_COPY):
            self._require_shape(key, _parameter_shape(site, key.leaf))
            saved = ResolvedSaved(index, key.leaf, tensor)
            (self.extras.biases if self.audit.feature_of(key) == "bias" else self.extras.saved).append(saved)
        elif key.role is Role.TOKENS:
            self._place_tokens(index, key)
        else:
            what = f"{key.role.value} at {site.path}, which is of kind {_kind(site)}"
            self.audit.refuse_names([key.tensor], what, key.role.value)

    def _place_tokens(self, index: int, key: Key) -> None:
        site, tensor = self.sites[index], self.adapter.tensors[key.tensor]
        tokens, width = _parameter_shape(site, "weight")
        named = self.token_modules.ends(key.module)
        if len(named) != 1:
            self.audit.refuse_names(
                [key.tensor], "token rows whose ids trainable_token_indices does not give", "trainable_token_indices"
            )
        ids = self.config.trainable_token_indices[named[0]]
        self._require_shape(key, (len(ids), width))
        if max(ids) >= tokens:
            raise AdapterConfigError(
                f"adapter {self.adapter.where} trains token {max(ids)}; expected ids below the model's {tokens} tokens",
                path=self.adapter.path,
                key="trainable_token_indices",
                value=max(ids),
            )
        self.extras.tokens.append(ResolvedTokens(index, ids, tensor))

    def _check_completeness(self, pairs: list[ResolvedPair]) -> None:
        """A flag that holds for all modules must have its tensor at each of them."""
        sites = {pair.site_index for pair in pairs if _kind(self.sites[pair.site_index]) != "embedding"}
        for key, flag, found in (
            ("use_dora", self.config.use_dora, self.extras.gains),
            ("lora_bias", self.config.lora_bias, self.extras.lora_biases),
        ):
            have = {vector.site_index for vector in found}
            if (flag and have != sites) or (found and not flag):
                raise AdapterConfigError(
                    f"adapter {self.adapter.where} has {key} = {str(flag).lower()} in its config and its tensors at {len(have)} of "
                    f"{len(sites)} modules; expected all or none",
                    path=self.adapter.path,
                    key=key,
                    value=flag,
                )
        saved = [self.sites[item.site_index].path for item in self.extras.saved]
        names = NameSet(() if self.config.ensure_weight_tying else self.config.modules_to_save)
        # Names that the model lacks are no fault: PEFT adds "classifier" and "score" to every classifier's.
        known = {name for path in self.host.paths for name in names.ends(path)}
        # A name may be a container's: then what is saved lies within it.
        missing = sorted(name for name in known if not any(f".{name}." in f".{path}." for path in saved))
        if missing:
            raise AdapterConfigError(
                f"adapter {self.adapter.where} names {listed(missing)} in modules_to_save, and the file holds no weight for it; "
                "expected the module that was trained",
                path=self.adapter.path,
                key="modules_to_save",
                value=missing[0],
            )
        expected = set(self.config.trainable_token_indices)
        if len(self.extras.tokens) != len(expected):
            raise AdapterConfigError(
                f"adapter {self.adapter.where} holds token rows for {len(self.extras.tokens)} modules; expected those of "
                f"trainable_token_indices ({listed(sorted(expected))})",
                path=self.adapter.path,
                key="trainable_token_indices",
            )

    def _check_added_tokens(self) -> None:
        vocab = self.vocab_size
        added = [] if vocab is None else sorted(token for token in self.adapter.added_tokens.values() if token >= vocab)
        if not added:
            return
        what = f"added_tokens.json names {len(added)} tokens from id {added[0]} on; the model has {vocab}"
        if self.extras.embeddings or self.extras.tokens or self.extras.saved or self.extras.base_copies:
            raise AdapterConfigError(
                f"adapter {self.adapter.where}: {what} and the file holds embedding weights; expected the base with "
                "the same vocabulary",
                path=self.adapter.path,
                key="added_tokens",
                value=added[0],
            )
        self._warn(what)

    def _check_hints(self, modules: Mapping[str, Roles]) -> None:
        """What the config says of its targets is a hint; a contradiction is worth a word."""
        config = self.config
        layers = {layer for module in modules if (layer := layer_of(module)) is not None}
        if config.layers_to_transform and layers - set(config.layers_to_transform):
            self._warn(
                f"layers_to_transform leaves out layers {sorted(layers - set(config.layers_to_transform))[:8]} that have tensors"
            )
        if isinstance(config.target_modules, tuple) and not config.exclude_modules and not config.target_parameters:
            names = NameSet(config.target_modules)
            used = {name for module in modules for name in names.ends(module)}
            idle = [name for name in config.target_modules if name not in used]
            if idle:
                self._warn(f"target_modules names {listed(idle)}, and the file holds no tensors for that")

    def _fill_report(self, pairs: list[ResolvedPair], placed: Mapping[int, Roles]) -> None:
        report = self.report
        reformed = [roles for roles, _ in self.cuts.values()]
        reformed += [roles for parts in self.joins.values() for _, roles in parts.values()]
        tensors = [self.adapter.tensors[key.tensor] for roles in (*placed.values(), *reformed) for key in roles.values()]
        experts = self.extras.experts
        tensors += [tensor for pair in experts for tensor in (pair.a, pair.b)]
        sites = sorted({*placed, *self.joins, *(index for _, indices in self.cuts.values() for index in indices)})
        report.applied = len(sites) + len(experts)
        report.modules = dict(Counter(module_kind(self.sites[index].path) for index in sites))
        report.modules |= Counter(f"experts.{pair.projection}" for pair in experts)
        factors = [(pair.rank, pair.scale) for pair in pairs] + [(pair.rank, pair.scale) for pair in experts]
        report.ranks = dict(sorted(Counter(rank for rank, _ in factors).items()))
        report.scales = tuple(sorted({scale for _, scale in factors}))
        report.nbytes = sum(tensor.nbytes for tensor in tensors)
        report.dtypes = dict(Counter(tensor.dtype for tensor in tensors))

    def _nbytes(self, key: Key) -> int:
        return self.adapter.tensors[key.tensor].nbytes

    def _warn(self, what: str) -> None:
        if what not in self.report.warnings:
            self.report.warnings.append(what)

    def _require_shape(self, key: Key, expected: tuple[int, ...]) -> None:
        found = self.adapter.tensors[key.tensor].shape
        if found != expected:
            self._refuse_shape(key.tensor, key.module, found, expected, f"{key.role.value} is per output row")

    def _refuse_shape(
        self, name: str, module: str, found: tuple[int, ...], expected: tuple[int, ...], what: str, others: Sequence[str] = ()
    ) -> NoReturn:
        count = max(1, len(others))
        trained = f", the adapter was trained on '{shown(self.config.base_model)}'" if self.config.base_model else ""
        more = f"; {count} tensors do not fit: {listed(others)}" if count > 1 else ""
        raise AdapterShapeError(
            f"adapter {self.adapter.where} holds '{shown(name)}' of shape {list(found)}, expected {list(expected)} for "
            f"{shown(module)}: {what}{more}; is it another model's{trained}?",
            path=self.adapter.path,
            tensor=name,
            module=module,
            found=found,
            expected=expected,
            count=count,
            samples=tuple(others[:3]) or (name,),
        )


def _kind(site: SiteLike) -> str:
    return str(site.kind).rpartition(".")[2].lower()


def _parameter_shape(site: SiteLike, leaf: str) -> tuple[int, ...]:
    """The shape of a site's own weight or bias."""
    if leaf == "bias":
        return (site.out_features,)
    is_in_first = _kind(site) in ("conv1d", "embedding")
    return (site.in_features, site.out_features) if is_in_first else (site.out_features, site.in_features)
