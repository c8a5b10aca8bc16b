"""What hooks and routes ask of a device: the step of a route, and one site's part of an output.

Nothing here waits, allocates or reads from the device once a route's first call of a size has been made: the rows went to the
device when the route was entered, and what is launched is the same at every step. Launches go to the stream that is current then.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import DeviceError
from . import DTYPE_CODES
from .cuda import CudaKernels, Group, Launches, SiteTables
from .experts import ExpertGroups, ExpertLaunches, ExpertSites
from .reference import pool_dtype
from .step import Entries, Step

if TYPE_CHECKING:
    import torch

    from .._core import LoraWeights
    from .launcher import Buffer, Launcher

_FEWEST_ROWS = 8


class DeviceBackend:
    """The kernels of one pool on its device.

    Args:
        launcher: The device.
        weights: The pool, whose tables lie there.
        stream: The stream that is current now; asked at every launch, for a capture has its own.
        is_capturing: Whether a graph is being captured there now.
    """

    def __init__(
        self, launcher: Launcher, weights: LoraWeights, stream: Callable[[], int], is_capturing: Callable[[], bool] = lambda: False
    ) -> None:
        self.kernels = CudaKernels(launcher, weights.max_loras, weights.max_rank, DTYPE_CODES[pool_dtype(weights)])
        self.stream, self.is_capturing = stream, is_capturing
        self._launcher, self._weights = launcher, weights
        self._groups: dict[tuple[int, ...], Group] = {}
        self._experts: dict[ExpertSites, ExpertGroups] = {}
        self._free: dict[tuple[int, int, int], list[Step]] = {}
        self._mutex = threading.Lock()

    def prepare(self, groups: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], experts: Sequence[ExpertSites] = ()) -> None:
        """Put the tables of these sites, together and each alone, on the device, and load the kernels for these activations.

        Args:
            groups: Sites that read the same x.
            dtypes: Of the activations that are expected.
            experts: Modules of routed experts, whose sites are in no group.

        Raises:
            KernelCompileError: The kernels cannot be compiled.
            DeviceError: The driver refuses them.
        """
        self.kernels.warm(*(DTYPE_CODES[dtype] for dtype in dtypes))
        for sites in groups:
            self.group(tuple(sites))
            for site in sites:
                self.group((site,))
        for module in experts:
            self.expert_groups(module)

    def group(self, sites: tuple[int, ...]) -> Group:
        """Sites that read the same x, as one launch shrinks them."""
        group = self._groups.get(sites)
        if group is None:
            self._refuse_capture("a group of sites")
            known = self._weights.sites
            members = [[self._tables_of(site)] for site in sites]
            group = Group(self.kernels, members, known[sites[0]].in_features, [known[site].out_features for site in sites])
            # Two threads may both have made it; one of them stays.
            group = self._groups.setdefault(sites, group)
        return group

    def expert_groups(self, sites: ExpertSites) -> ExpertGroups:
        """The experts of one module, as their launches read them."""
        groups = self._experts.get(sites)
        if groups is None:
            self._refuse_capture("the tables of routed experts")
            first, second = (
                [[self._tables_of(site) for site in member] for member in members] for members in (sites.first, (sites.second,))
            )
            known = self._weights.sites
            widths, down = [known[member[0]].out_features for member in sites.first], known[sites.second[0]]
            groups = ExpertGroups(
                Group(self.kernels, first, known[sites.first[0][0]].in_features, widths, max(widths)),
                Group(self.kernels, second, down.in_features, [down.out_features]),
                sites.offsets,
            )
            groups = self._experts.setdefault(sites, groups)
        return groups

    def _tables_of(self, site: int) -> SiteTables:
        tables = self._weights.tables
        cells = (tables.a_table(site), tables.b_table(site), tables.gain_table(site), tables.bias_table(site))
        return SiteTables(*cells, tables.site_scales(site), tables.site_ranks(site))

    def take(self, rows: Entries, *, max_rows: int = 0, max_entries: int = 0) -> Step:
        """A step that holds `rows`, on the current stream; `give_back` returns it.

        Raises:
            RouteError: There are more rows or entries than asked for.
        """
        entries = max_entries or max(1, *map(len, rows))
        room = max_rows or max(_FEWEST_ROWS, 1 << (len(rows) - 1).bit_length())
        step = self._step(room, entries, 0)
        self.fill(step, rows)
        return step

    def take_packed(self, rows: Entries, lengths: Sequence[int]) -> Step:
        """A step of a packed batch, whose tokens lie row after row; as `take`."""
        entries, tokens = max(1, *map(len, rows)), 1 << (sum(lengths) - 1).bit_length()
        room = max(_FEWEST_ROWS, 1 << (len(rows) - 1).bit_length())
        step = self._step(room, entries, tokens)
        self._on_stream(step, self.stream())
        step.set_packed(rows, lengths, self.stream())
        return step

    def fill(self, step: Step, rows: Entries) -> None:
        """Give a step other rows, on the current stream.

        Raises:
            RouteError: It has no room for them.
        """
        self._on_stream(step, self.stream())
        step.set_rows(rows, self.stream())

    def give_back(self, step: Step) -> None:
        """Keep a step for the next route of its size, whose launches come behind what is still enqueued for this one."""
        with self._mutex:
            self._free.setdefault((step.max_rows, step.num_entries, step.max_tokens), []).append(step)

    def streams(self, steps: Sequence[Step]) -> list[int]:
        """The streams on which launches of these steps may still run, or their graph is replayed: the present one too."""
        return sorted({self.stream(), *(step.stream for step in steps)})

    def add(self, sites: tuple[int, ...], member: int, step: Step, x: torch.Tensor, out: torch.Tensor, tokens: int) -> None:
        """Add to `out`, in place, what a step's adapters make of `x` at one member of a group; contiguous and of one dtype.

        The group's shrink is made for its first member and used by the others, as long as they bring the very same x.

        Raises:
            DeviceError: It would have to allocate, and a graph is being captured.
        """
        stream = self.stream()
        self._on_stream(step, stream)
        space = step.space(threading.get_ident(), _Space)
        launches = space.launches_of(self, sites, step, tokens, DTYPE_CODES[out.dtype])
        key = (x._version, step.stamp)
        # A member that comes twice begins anew: what it is called with may have changed in a way that no version tells.
        if space.holder is not launches or space.x() is not x or space.key != key or member in space.served:
            space.holder = None
            launches.shrink(x.data_ptr(), stream)
            space.holder, space.x, space.key = launches, weakref.ref(x), key
            space.served.clear()
        launches.expand(member, out.data_ptr(), stream)
        space.served.add(member)

    def add_one(self, site: int, step: Step, x_address: int, out_address: int, tokens: int, code: int) -> None:
        """As `add` for a site alone, by addresses: for activations that have no version to tell them by."""
        stream = self.stream()
        self._on_stream(step, stream)
        space = step.space(threading.get_ident(), _Space)
        launches = space.launches_of(self, (site,), step, tokens, code)
        space.holder = None
        launches.shrink(x_address, stream)
        launches.expand(0, out_address, stream)

    def experts(self, sites: ExpertSites, step: Step, tokens: int, top_k: int, code: int) -> BoundExperts:
        """The launches for one call of a module of routed experts, on the current stream.

        Raises:
            DeviceError: It would have to allocate, and a graph is being captured.
        """
        stream = self.stream()
        self._on_stream(step, stream)
        space = step.space(threading.get_ident(), _Space)
        space.holder = None
        return BoundExperts(space.experts_of(self, sites, step, tokens, top_k, code), stream)

    def allocate(self, nbytes: int, what: str) -> Buffer:
        """Memory on the device.

        Raises:
            DeviceError: There is no room, or a graph is being captured.
        """
        self._refuse_capture(what)
        return self._launcher.allocate(nbytes)

    def _step(self, max_rows: int, entries: int, max_tokens: int) -> Step:
        with self._mutex:
            free = self._free.get((max_rows, entries, max_tokens))
            if free:
                return free.pop()
        self._refuse_capture("a route's first rows")
        return Step(self._launcher, max_rows, entries, max_tokens, has_tiles=self.kernels.has_tiles)

    def _on_stream(self, step: Step, stream: int) -> None:
        """Go on with a step on another stream: what was enqueued on its last one is waited for, once."""
        if stream == step.stream or self.is_capturing():
            # torch.cuda.graph waits for the whole device before it begins to capture.
            return
        if step.stamp:
            self._launcher.synchronize(step.stream)
        step.stream = stream

    def _refuse_capture(self, what: str) -> None:
        if self.is_capturing():
            raise DeviceError(
                f"{what} would be allocated while a CUDA graph is captured; run the same call once before the capture",
                call="capture",
            )


class _Space:
    """What one thread has of a step: its launches, and what stands in the h that they share."""

    def __init__(self) -> None:
        self.holder: Launches | None = None
        self.x: Callable[[], torch.Tensor | None] = lambda: None
        self.key = (0, 0)  # version of x, stamp of the step
        self.served: set[int] = set()
        self._launches: dict[tuple[tuple[int, ...], int, int, int], Launches] = {}
        self._experts: dict[tuple[ExpertSites, int, int, int, int], ExpertLaunches] = {}
        self._pairs: list[Buffer] = []  # what was handed out before may be in a graph

    def launches_of(self, backend: DeviceBackend, sites: tuple[int, ...], step: Step, tokens: int, code: int) -> Launches:
        """Made once for each group, number of tokens and of rows, and element type."""
        key = (sites, tokens, 0 if step.is_packed else step.tokens_per_row(tokens), code)
        found = self._launches.get(key)
        if found is None:
            group = backend.group(sites)
            if not step.has_room(threading.get_ident(), group.bytes_of_h(tokens, step.num_entries)):
                backend._refuse_capture("room for h")
            found = self._launches[key] = Launches(group, step, tokens, code)
        return found

    def experts_of(
        self, backend: DeviceBackend, sites: ExpertSites, step: Step, tokens: int, top_k: int, code: int
    ) -> ExpertLaunches:
        """As `launches_of`, for a module of routed experts."""
        key = (sites, tokens, top_k, 0 if step.is_packed else step.tokens_per_row(tokens), code)
        found = self._experts.get(key)
        if found is None:
            groups, pairs = backend.expert_groups(sites), tokens * top_k
            if not step.has_room(threading.get_ident(), groups.bytes_of_h(pairs, step.num_entries)):
                backend._refuse_capture("room for h")
                step.room(groups.bytes_of_h(pairs, step.num_entries))
            if not self._pairs or self._pairs[-1].nbytes < 12 * pairs:
                self._pairs.append(backend.allocate(max(256, 1 << (12 * pairs - 1).bit_length()), "room for pairs"))
            found = self._experts[key] = ExpertLaunches(groups, step, tokens, top_k, code, self._pairs[-1].address)
        return found


class BoundExperts:
    """The launches of one call of routed experts, on the stream that was current when it began."""

    def __init__(self, launches: ExpertLaunches, stream: int) -> None:
        self._launches, self._stream = launches, stream

    def find(self, index: torch.Tensor, places: torch.Tensor | None = None, adapted: torch.Tensor | None = None) -> None:
        """Find the pairs of the chosen experts `index` [tokens, top_k] int64.

        Args:
            index: The choices.
            places: The row of each pair [tokens * top_k] int64 in what is of pairs; None: in the order of `index`.
            adapted: Filled with whether a token [tokens] bool has adapters at its experts.
        """
        to, of_tokens = (0 if tensor is None else tensor.data_ptr() for tensor in (places, adapted))
        self._launches.find(index.data_ptr(), to, of_tokens, self._stream)

    def add_first(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' part to the first product `out` [pairs, width] of `x` [tokens, in], in place.

        Both are contiguous and of the dtype that the launches are for.
        """
        self._launches.add_first(x.data_ptr(), out.data_ptr(), self._stream)

    def add_second(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Add the adapters' part to the second product `out` [pairs, out] of `x` [pairs, width], in place."""
        self._launches.add_second(x.data_ptr(), out.data_ptr(), self._stream)


def open_backend(launcher: Launcher, weights: LoraWeights) -> DeviceBackend:
    """The kernels of a pool that torch's own streams run."""
    import torch

    device = launcher.device
    # What torch.cuda.current_stream(device).cuda_stream is, without the objects around it: it is asked for at every launch.
    current: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

    def stream() -> int:
        return torch.cuda.current_stream(device).cuda_stream if current is None else current(device)

    return DeviceBackend(launcher, weights, stream, torch.cuda.is_current_stream_capturing)
