"""Which replica gets a request: Serve's request router for adapters."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .placement import Placement, View


class AdapterRouter(RequestRouter):
    """Sends a request to a replica that holds its adapter.

    The adapter is the call's `multiplexed_model_id`, empty for the base model; a `session_id` names the one replica that a call is
    for. What a replica holds is what its pool says, by `Replica.record_routing_stats`: an eviction is seen like a load.
    """

    # A replica that loads a model or prefills answers late; a probe that gives up early would send its adapters elsewhere.
    queue_len_response_deadline_s = 1.0

    def initialize_state(self, **kwargs: Any) -> None:
        """Take `busy`, the requests from which an adapter may spill to another replica, and `slots`, how many each has."""
        self._placement = Placement(int(kwargs["busy"]), int(kwargs["slots"]))

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first; within a rank Serve takes the one with the fewest requests."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        named = by_id.get(pending_request.metadata.session_id)
        if named is not None:
            return [[named]]
        sound = [each for each in candidate_replicas if not each.routing_stats.get("fault")] or candidate_replicas
        adapter = pending_request.metadata.multiplexed_model_id
        if not adapter:
            return [random.sample(sound, min(2, len(sound))), sound]
        ranks = self._placement.ranks(adapter, [self._view(each) for each in sound])
        return [[by_id[replica] for replica in rank] for rank in ranks]

    def _view(self, replica: RunningReplica) -> View:
        stats = replica.routing_stats
        load = self.replica_queue_len_cache.get(replica.replica_id) or 0
        return View(replica.replica_id.unique_id, frozenset(stats.get("adapters", ())), load)
