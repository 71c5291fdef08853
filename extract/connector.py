"""vLLM's KV connector that publishes the states of named requests, loaded out of tree (`kv_connector_module_path`).

vLLM's method `extract_hidden_states` writes each token's taps and last state into a cache of their own, whole on every
tensor-parallel rank. A request that names a sample (`kv_transfer_params: {"sample": NAME}`) goes this way:

    scheduler   the request has finished: its blocks are held, the next step carries a Save to every rank
    each rank   copies its range of tokens out of the blocks (they are free again: a slow store holds no cache), then a writer
                thread puts and examines it; what became of it goes back with a later step, also where it failed
    scheduler   has every rank's report: publishes the manifest, or removes what was put, and tells the API server the verdict

Requests that name no sample go the same way without a copy: whether they are finite is a verdict too. Aborted ones publish
nothing. `extract.middleware` in the API server's process holds each response until the verdict. Verdicts travel there as Unix
datagrams: the kernel keeps order and whole messages, no thread or port is needed, an abstract address leaves no file behind.
"""

from __future__ import annotations

import json
import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import HiddenStateCacheSpec, KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from configs.schema import Config
from extract.engine_vllm import state_contract
from extract.rank import Failure, Save, Worker
from store.objects import StoreError, open_store
from store.sample import Slice, publish

log = logging.getLogger(__name__)

IDLE_S = 0.02  # a rank with nothing to compute waits this long for its writers before the engine spins once more
VERDICT_S = 10.0  # the API server reads within milliseconds, or is dead
ANSWERED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


@dataclass
class Saves(KVConnectorMetadata):
    """From the scheduler to every rank, with each step."""

    saves: list[Save]
    idle: bool  # nothing is computed in this step


@dataclass
class Reports(KVConnectorWorkerMetadata):
    """From the ranks to the scheduler: {request: {rank: what it put, None for an empty range, or why it could not}}."""

    of: dict[str, dict[int, Slice | Failure | None]]

    def aggregate(self, other: Reports) -> Reports:
        requests = self.of.keys() | other.of.keys()
        return Reports({request: self.of.get(request, {}) | other.of.get(request, {}) for request in requests})


class StateConnector(KVConnectorBase_V1, SupportsHMA):
    """The two sides of one engine: `Scheduler` in the engine's process, `Worker` in each rank's."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self.scheduler = Scheduler(vllm_config)
        else:
            self.worker = Worker(vllm_config, kv_cache_config, *_hidden_state_group(kv_cache_config))

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        # All taps of one token side by side: the copy out of a block is then one run of memory. The CPU has one layout only.
        return None if current_platform.is_cpu() else "LBNHC"

    # scheduler side

    def request_finished_all_groups(self, request: Request, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids), None

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Saves:
        return Saves(self.scheduler.take_saves(), idle=scheduler_output.total_num_scheduled_tokens == 0)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        if isinstance(connector_output.kv_connector_worker_meta, Reports):
            self.scheduler.receive(connector_output.kv_connector_worker_meta)

    def has_pending_push_work(self) -> bool:
        return bool(self.scheduler.open)  # keeps an engine without requests stepping: reports only travel with steps

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens) -> None: ...

    # worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.worker.register(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Saves) -> None:
        super().bind_connector_metadata(connector_metadata)
        for save in connector_metadata.saves:  # before this step's forward, so that putting runs beside it
            self.worker.save(save)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self.worker.take_copied() or None, None

    def build_connector_worker_meta(self) -> Reports | None:
        reports = self.worker.take_reports(wait_s=IDLE_S if self._get_connector_metadata().idle else 0.0)
        return Reports(reports) if reports else None

    def start_load_kv(self, forward_context, **kwargs) -> None: ...

    def wait_for_layer_load(self, layer_name) -> None: ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None: ...

    def wait_for_save(self) -> None: ...

    def shutdown(self) -> None:
        (self.scheduler if self.role is KVConnectorRole.SCHEDULER else self.worker).close()


@dataclass
class _Open:
    """A request between its end and its verdict."""

    ticket: str | None  # what the API server knows it by; None: it does not ask
    sample: str | None
    token_ids: list[int]
    failure: Failure | None  # it ended without an answer
    reports: dict[int, Slice | Failure | None] = field(default_factory=dict)


class Scheduler:
    """Follows each named request from its last token to its verdict. Only `_conclude` runs in a thread of its own."""

    def __init__(self, vllm_config: VllmConfig):
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.contract = state_contract(vllm_config)
        self.store = open_store(Config.model_validate(extra["config"]).store)
        self.ranks = vllm_config.parallel_config.world_size
        self.saves: list[Save] = []
        self.open: dict[str, _Open] = {}
        self.publisher = ThreadPoolExecutor(1, "publish")  # a store that stalls must not stall the engine
        self.verdicts = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.verdicts.settimeout(VERDICT_S)
        self.address = "\0" + extra["verdicts"]

    def finished(self, request: Request, blocks: tuple[list[int], ...]) -> bool:
        """Whether the request's blocks must be held until the ranks have looked at them.

        Every request is looked at: one that is not finite must not leave its blocks to the next.
        """
        params = request.kv_transfer_params or {}
        ticket = params.get("sample") or params.get("ticket")
        answered = request.status in ANSWERED
        failure = None if answered else Failure("engine", f"the request ended as {request.status.name}")
        rows = min(request.num_computed_tokens, request.num_tokens - 1)  # the last generated token was never an input
        if not rows:
            self.publisher.submit(self._tell, ticket, failure)
            return False
        sample = params.get("sample") if answered else None
        token_ids = list(request.all_token_ids if params.get("include_output_tokens") else request.prompt_token_ids)[:rows]
        self.open[request.request_id] = _Open(ticket, sample, token_ids, failure)
        self.saves.append(Save(request.request_id, sample, len(token_ids), rows, tuple(map(list, blocks))))
        return True

    def take_saves(self) -> list[Save]:
        saves, self.saves = self.saves, []
        return saves

    def receive(self, reports: Reports) -> None:
        for request, of_ranks in reports.of.items():
            self.open[request].reports |= of_ranks
            if len(self.open[request].reports) == self.ranks:
                self.publisher.submit(self._conclude, self.open.pop(request))

    def _conclude(self, done: _Open) -> None:
        slices = [report for report in done.reports.values() if isinstance(report, Slice)]
        failure = done.failure or next((report for report in done.reports.values() if isinstance(report, Failure)), None)
        try:
            if failure is None and done.sample:
                publish(self.store, done.sample, self.contract, done.token_ids, slices)
        except Exception as error:  # whatever it is, an asker waits for the verdict
            failure = Failure.of(error)
        if failure is not None:
            try:
                self.store.remove([piece.object for piece in slices])
            except StoreError as error:
                log.warning("%s: its slices could not be removed (%s)", done.sample, error)
        self._tell(done.ticket, failure, published=done.sample is not None and failure is None)

    def _tell(self, ticket: str | None, failure: Failure | None, published: bool = False) -> None:
        if ticket is None:
            return
        verdict = {"ticket": ticket, "published": published} | ({"cause": failure.cause, "message": failure.message} if failure else {})
        try:
            self.verdicts.sendto(json.dumps(verdict).encode(), self.address)
        except OSError as error:
            log.error("%s: the API server does not take its verdict (%s)", ticket, error)

    def close(self) -> None:
        self.publisher.shutdown()
        self.store.close()


def _hidden_state_group(kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Index and block size of the cache group that holds the states, found by its spec.

    A verifier whose own layers have the same shape of cache shares one group with it, and the scheduler's copy of that group has
    lost the layers' specs: then there is only one group to choose from.
    """
    groups = kv_cache_config.kv_cache_groups
    found = [index for index, group in enumerate(groups) if isinstance(group.kv_cache_spec, HiddenStateCacheSpec)]
    if not found and len(groups) == 1:
        found = [0]
    if len(found) != 1:
        raise ValueError(f"{len(found)} of the engine's {len(groups)} cache groups hold hidden states, expected one")
    return found[0], groups[found[0]].kv_cache_spec.block_size
