"""A model with its adapters, engine and queue: what `hotslot serve` runs, without HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..errors import AdapterNotFoundError, HotslotError, PoolError, PoolFullError, SlotBusyError
from ..model import attach
from ..pool import plan
from .admission import Admission
from .checkpoint import cache_bytes, end_tokens, load_model, num_tokens, served_length
from .engine import EngineLimits, build
from .loading import Loader
from .metrics import BASE_LABEL, Metrics
from .neighbours import Neighbours
from .problems import Problem, problem_of, unknown_model
from .sources import Sources
from .watch import RootWatch

if TYPE_CHECKING:
    from .._core import PeerServer
    from .sequence import Call
    from .settings import Settings

_LOG = logging.getLogger("hotslot.server")
_WATCH_SECONDS = 0.05
_ROOT_SECONDS = 1.0
_POLL_SECONDS = 0.01
_INPLACE_SECONDS = 60.0


class Service:
    """One served model.

    Args:
        settings: The options.
        model: A transformers model.
        tokenizer: Its tokenizer.

    Raises:
        HotslotError: A startup adapter is refused, or an option does not fit the model.
    """

    def __init__(self, settings: Settings, model: Any, tokenizer: Any) -> None:
        self.settings = settings
        self.tokenizer = tokenizer
        self.started = time.time()
        self.draining = False
        self.metrics = Metrics()
        config = model.config.get_text_config()
        self.vocab_size = num_tokens(model)
        self.max_length = served_length(config, settings.max_model_len)
        self.end_tokens = end_tokens(model, tokenizer, self.vocab_size)
        self.sources = Sources(settings.base_name, settings.lora_modules, settings.adapter_root)
        limits = self._limits(model)
        tiers, pinned = settings.tiers(), self._pinned()
        self.lora = attach(
            model,
            pinned,
            max_loras=settings.max_loras,
            max_rank=settings.max_lora_rank,
            pool_dtype=cast("Any", settings.pool_dtype),
            extras_bytes=settings.extras_bytes,
            experts=settings.experts,
            unrouted="error",
            tiers=tiers,
            room_for=[path for name, path in settings.lora_modules.items() if name not in pinned],
        )
        try:
            if settings.peers:
                self.sources.neighbours = Neighbours(settings.peers, tiers, self.sources.is_name)
            self.exports = None if settings.serve_peers is None else self._export(*settings.export_address())
        except (HotslotError, ValueError) as error:
            raise PoolError(f"peers cannot be spoken to: {error}") from error
        self.engine = build(model, self.lora, limits)
        self.loader = Loader(self.lora, self.sources, self.metrics, settings.load_threads)
        self.admission = Admission(
            self.lora,
            self.loader,
            lambda call: call.begin(self.engine.submit),
            max_rows=settings.max_num_seqs,
            max_queue=settings.max_queue,
            max_queue_per_adapter=settings.max_queue_per_adapter,
            lookup=self.metrics.lookup,
            waited=self.metrics.waited,
        )
        self.metrics.watch(self.lora, self.admission, self.engine)
        self._lookups, self._asking = ThreadPoolExecutor(4, "hotslot-lookup"), ThreadPoolExecutor(4, "hotslot-asking")
        # A tokenizer's settings are looked at, and may be set, at each call.
        self._tokenizing = threading.Lock()
        self._stop_watch = threading.Event()
        self._watch = threading.Thread(target=self._keep, name="hotslot-watch", daemon=True)
        self._root = threading.Thread(target=self._watch_root, name="hotslot-root", daemon=True)

    @classmethod
    def load(cls, settings: Settings) -> Service:
        """Load the model that the settings name, and make its service.

        Raises:
            HotslotError: The model cannot be loaded, or as in the constructor.
        """
        model, tokenizer = load_model(settings)
        return cls(settings, model, tokenizer)

    def start(self) -> None:
        """Look after the engine, which runs since the service was made."""
        self._watch.start()
        if self.settings.adapter_root is not None:
            self._root.start()

    def close(self) -> None:
        """End everything that runs, and take the pool off the model."""
        stopped = Problem(503, "the server has stopped", code="stopped")
        self.admission.close(stopped)
        self.admission.fail_waiting(stopped)
        self.engine.stop(timeout=10.0)
        self._stop_watch.set()
        if self.sources.neighbours is not None:
            self.sources.neighbours.close()
        if self.exports is not None:
            self.exports.close()
        if self._watch.is_alive():
            self._watch.join()
        self.loader.close()
        self._lookups.shutdown(wait=False)
        self._asking.shutdown(wait=False)
        self.admission.fail_waiting(stopped)
        try:
            self.lora.detach()
        except SlotBusyError as error:
            # Leases that somebody else in this process holds; theirs to return.
            _LOG.warning("the pool stays on the model: %s", error)

    # --- requests --------------------------------------------------------------------------------------------------------

    async def resolve(self, model: str) -> str | None:
        """The adapter that a request's `model` names, None for the base model: one function for every endpoint.

        Raises:
            Problem: 404, with the names that are served.
        """
        if model == self.settings.base_name:
            return None
        if self.lora.weights.slot_of(model) is None:
            # Folders are looked at, and peers may be asked: not on the event loop, and the second holds up none of the first.
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._lookups, self.sources.find, model)
            if found is None and self.sources.neighbours is not None:
                found = await loop.run_in_executor(self._asking, partial(self.sources.find, model, ask=True))
            if found is None:
                raise unknown_model(model, await loop.run_in_executor(self._lookups, self.sources.names))
        return model

    def encode(self, text: str, special: bool) -> list[int]:
        """The token ids of a text, with the model's special tokens around it or not."""
        with self._tokenizing:
            found: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return found

    def submit(self, call: Call) -> None:
        """Queue a call; its pieces go to its sink.

        Raises:
            Problem: It cannot be taken; it leaves no trace.
        """
        if self.draining:
            raise Problem(503, "the server is shutting down", code="draining", retry_after=5.0)
        if self.engine.fault is not None:
            raise Problem(503, f"the engine does not run: {self.engine.fault}", code="engine", retry_after=5.0)
        call.on_token = self._token
        call.on_done = self._done
        self.admission.submit(call)

    def cancel(self, call: Call) -> None:
        """End a call, wherever it is."""
        if not self.admission.withdraw(call):
            for sequence in call.sequences:
                if not sequence.ended:
                    self.engine.cancel(sequence)

    def _token(self, call: Call, seconds: float | None) -> None:
        if seconds is None:
            self.metrics.first_token(call.adapter, time.monotonic() - call.created)
        else:
            self.metrics.next_token(call.adapter, seconds)

    def _done(self, call: Call) -> None:
        self.admission.ended(call)
        reasons = {sequence.finish_reason or "error" for sequence in call.sequences}
        outcome = next((reason for reason in ("error", "abort", "length", "stop") if reason in reasons), "stop")
        generated = sum(len(sequence.tokens) for sequence in call.sequences)
        cached = call.sequences[0].cached_tokens
        self.metrics.ended(call.adapter, outcome, len(call.prompt), cached, generated)
        facts = {
            "request_id": call.id,
            "adapter": call.adapter or BASE_LABEL,
            "outcome": outcome,
            "prompt_tokens": len(call.prompt),
            "cached_tokens": cached,
            "generated_tokens": generated,
            "queue_seconds": None if call.started is None else round(call.started - call.created, 4),
            "seconds": round(time.monotonic() - call.created, 4),
        }
        _LOG.info("request ended", extra={"facts": facts})

    # --- adapters --------------------------------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, inplace: bool) -> None:
        """Serve an adapter under a name from a folder in the adapter root, and bring it into a slot.

        Raises:
            Problem: 400, 403, 409: as it says; nothing was changed.
        """
        self.sources.check_name(name)
        real = await asyncio.to_thread(self.sources.allowed_path, path)
        known = await asyncio.to_thread(self.sources.find, name)
        is_resident = self.lora.weights.slot_of(name) is not None
        is_listed_only = known is not None and known.kind == "folder" and known.path == real and not is_resident
        if (known is not None or is_resident) and not inplace and not is_listed_only:
            raise Problem(
                409,
                f"the adapter {name!r} is loaded already; unload it first, or replace its weights with load_inplace",
                param="lora_name",
                code="already_loaded",
            )
        with self.sources.changing(name) as before:
            if is_resident and await asyncio.to_thread(self.replace, name, real):
                self.loader.note(name, self.sources.register(name, real))
                return
            # Most of what can be wrong is found here, before the name is known to anybody.
            await asyncio.to_thread(self._check, name, real)
            version = self.sources.register(name, real)
            try:
                await asyncio.wrap_future(self.admission.want(name))
                # It may have come into a slot while the new files were checked, with the old weights.
                if not self.loader.is_current(name) and await asyncio.to_thread(self.replace, name, real):
                    self.loader.note(name, version)
            except BaseException:
                self.sources.restore(name, before, version)
                raise

    async def unload_adapter(self, name: str) -> None:
        """Serve an adapter no more: what waits for it fails, what runs finishes, its slot empties then.

        Raises:
            Problem: 404.
        """
        # Of two calls at once, one gets this.
        if not await asyncio.to_thread(self.sources.forget, name):
            raise Problem(
                404,
                f"the adapter {name[:200]!r} is not loaded; loaded are {', '.join(self.sources.names()[1:][:20]) or 'none'}",
                param="lora_name",
                code="adapter_not_found",
            )
        self.admission.forget(name, Problem(404, f"the adapter {name!r} was unloaded", code="model_not_found"))
        await asyncio.to_thread(self._unload, name)
        with contextlib.suppress(AdapterNotFoundError):
            self.lora.unregister(name)
        self.metrics.forget(name)

    def _check(self, name: str, path: str) -> None:
        """Refuse a folder that does not fit the pool, as a load would; nothing but headers is read."""
        with ExitStack() as files:
            try:
                self.lora._reader.open(path, files)
            except Exception as error:
                self.metrics.refused(name, error)
                raise problem_of(error) from error

    def replace(self, name: str, path: str) -> bool:
        """New weights for a resident name; where no slot is free for them, in place once its running rows are done.

        False if others took its slot meanwhile: then the next load brings the new ones.
        """
        end = time.monotonic() + _INPLACE_SECONDS
        try:
            while True:
                try:
                    self.loader.replace(name, path)
                    return True
                except AdapterNotFoundError:
                    return False
                except PoolFullError as error:
                    self.admission.hold(name)
                    while self._references(name):
                        if time.monotonic() > end:
                            raise Problem(503, f"no slot became free: {error}", code="pool", retry_after=5.0) from error
                        time.sleep(_POLL_SECONDS)
        except Exception as error:
            raise problem_of(error) from error
        finally:
            self.admission.refresh(name)

    def _references(self, name: str) -> int:
        slot = self.lora.weights.slot_of(name)
        return 0 if slot is None else self.lora.weights.slot_info(slot).ref_count

    def _unload(self, name: str) -> None:
        try:
            self.lora.unload(name, deferred=True)
        except AdapterNotFoundError:
            return
        self.metrics.events.add("unloaded", adapter=name)

    # --- what there is ---------------------------------------------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """Why this server is not healthy, or None."""
        return self.engine.fault

    def models(self) -> list[dict[str, Any]]:
        """The base model and every adapter that is served, as /v1/models shows them."""
        base = self.settings.base_name
        created = int(self.started)
        common = {"object": "model", "created": created, "owned_by": "hotslot"}
        found = [{"id": base, **common, "root": self.settings.model, "parent": None, "max_model_len": self.max_length}]
        infos = {info.name: info for info in self.lora.slots() if info.name and info.state in ("ready", "loading")}
        states = self.admission.states()
        for source in self.sources.all():
            info = infos.get(source.name)
            state = "resident" if info is not None else "registered"
            if states.get(source.name, ("",))[0] == "loading" and info is None:
                state = "loading"
            found.append(
                {
                    "id": source.name,
                    **common,
                    "root": source.path,
                    "parent": base,
                    "max_model_len": self.max_length,
                    "rank": None if info is None else info.rank,
                    "digest": (source.offer and source.offer.cache_id) if info is None else info.cache_id,
                    "state": state,
                    "source": source.kind,
                }
            )
        return found

    def slots(self, after: int = 0) -> dict[str, Any]:
        """The slots as they are now, and what happened to them since an event."""
        states = self.admission.states()
        slots = []
        for info in self.lora.slots():
            state, rows, waiting = states.get(info.name, ("idle", 0, 0)) if info.name else ("", 0, 0)
            slots.append(
                {
                    "slot": info.slot,
                    "name": info.name,
                    "state": info.state,
                    "pinned": info.pinned,
                    "references": info.ref_count,
                    "tick": info.last_used,
                    "tier": "device" if info.state == "ready" else "",
                    "rank": info.rank,
                    "bytes": info.nbytes,
                    "generation": info.generation,
                    "digest": info.cache_id,
                    "turn": state,
                    "rows": rows,
                    "waiting": waiting,
                    **(self.metrics.counts_of(info.name) if info.name else {"hits": 0, "misses": 0}),
                }
            )
        queued = {name: waiting for name, (state, _, waiting) in states.items() if state in ("waiting", "loading")}
        return {
            "slots": slots,
            "waiting": queued,
            "running_sequences": self.admission.num_running,
            "waiting_requests": self.admission.num_waiting,
            "engine": {"kind": self.engine.kind, "steps": self.engine.num_steps, "cache_usage": self.engine.cache_usage},
            "peers": [] if self.sources.neighbours is None else self.sources.neighbours.states(),
            "events": self.metrics.events.after(after),
        }

    def _pinned(self) -> dict[str, str]:
        """The startup adapters that get slots of their own; one slot stays free if others can be asked for."""
        modules, settings = self.settings.lora_modules, self.settings
        can_load = settings.adapter_root is not None or bool(settings.peers) or len(modules) > settings.max_loras
        room = settings.max_loras - int(can_load)
        return dict(list(modules.items())[:room])

    def _export(self, host: str, port: int) -> PeerServer:
        """Let other servers read what this one holds, with their token, and their certificates where there is an authority."""
        server = self.lora.serve_peers(host, port, token=self.settings.peer_token, tls=self.settings.peer_tls)
        _LOG.info("serving peers", extra={"facts": {"address": server.address}})
        return server

    def _limits(self, model: Any) -> EngineLimits:
        settings, length = self.settings, self.max_length
        tokens = max(length, settings.max_num_seqs * length // 4)
        num_blocks = settings.num_blocks or -(-tokens // settings.block_size) + 1
        if num_blocks * settings.block_size < length:
            raise PoolError(
                f"{num_blocks} blocks of {settings.block_size} tokens hold less than --max-model-len {length}; raise --num-blocks "
                "or lower --max-model-len"
            )
        config = model.config.get_text_config()
        room = cache_bytes(config, num_blocks * settings.block_size, model.dtype.itemsize)
        sites = plan(model, settings.max_loras, settings.max_lora_rank, pool_dtype=settings.pool_dtype)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if model.device.type == "cpu" and room + sites.total_bytes + settings.host_bytes > memory:
            raise PoolError(
                f"the cache takes {room >> 20} MiB, the pool {sites.total_bytes >> 20} MiB and the host tier "
                f"{settings.host_bytes >> 20} MiB, and this machine has {memory >> 20} MiB; lower --num-blocks, "
                "--max-loras, --max-lora-rank or --host-bytes"
            )
        return EngineLimits(
            max_rows=settings.max_num_seqs,
            max_batch_tokens=settings.max_num_batched_tokens,
            max_length=length,
            block_size=settings.block_size,
            num_blocks=num_blocks,
            share_prefixes=settings.enable_prefix_caching,
        )

    def _watch_root(self) -> None:
        """Look at the adapter root every now and then; on a thread of its own, since disks may not answer."""
        watch = RootWatch(self)
        while not self._stop_watch.wait(_ROOT_SECONDS):
            watch.look()

    def _keep(self) -> None:
        """Look after what nobody's call looks after: loads that stood back, and an engine that is gone."""
        while not self._stop_watch.wait(_WATCH_SECONDS):
            if self.engine.fault is not None:
                self.admission.fail_waiting(Problem(503, f"the engine does not run: {self.engine.fault}", code="engine"))
            elif self.admission.num_waiting or not self.admission.is_idle():
                self.admission.poke()
