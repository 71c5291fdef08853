"""The store on Mooncake: objects live in memory of the processes that put them, a master knows where, readers copy them over.

Who owns the memory: the processes that put (`share` of `open_store`), not a store process beside them. A put into one's own
segment is a memcpy (64 MB in 0.02 s of CPU on the test machine), into another process's a second transfer as dear as the read
(0.1 s). What that would save, samples that outlive a dead engine, is worth little: each is read as soon as it is there, so a
death costs the few that are between their put and their read, and those are made again. Trainers own nothing and can lose nothing.

Every call ends in time by Mooncake's own deadlines, set here: they close the connection, so that nothing is written into a
reader's memory after the call has failed. A call given up from outside would go on writing, so only one is ever given up, the
first contact with a process that holds objects (`_meet`), which lands in memory of its own.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import numpy as np

from configs.schema import Mooncake, Store
from store.master_http import find_master, metrics
from store.objects import Full, Gone, Lost, StoreError, Torn, Usage

ROUNDING = 9 / 8  # the allocator rounds a size up by an eighth at most
SEGMENT = 16 << 20  # the smallest that Mooncake mounts

NO_ROOM, BAD_SIZE, BAD_CHECKSUM = -200, -600, -801
ABSENT = {-703: "its put has not ended", -704: "not in the store", -706: "it is being removed"}
NOT_SENT = -800
UNREAD = {-707: "reading took longer than its lease (store.mooncake.lease_s)", NOT_SENT: "whoever holds it does not send it"}
SILENT = {-900: "the master cannot be reached", -901: "the master does not answer"}


class MooncakeStore:
    """`ObjectStore` on Mooncake. `share` of the store's budget is this process's memory, where its own puts go; 0: none."""

    def __init__(self, config: Store, share: float):
        rpc, self._http = find_master(config)
        self._client = connect(config.mooncake, rpc, int(max(SEGMENT, config.bytes * share * ROUNDING)) if share else 0)
        self._where = _placement(self._client.get_hostname() if share else "")
        self._pid, self._idle, self._calls, self._closed = os.getpid(), threading.Condition(), 0, False
        # One read at a time: over TCP four threads need two to three times the CPU of one for the same bytes, and are slower.
        self._reading = threading.Lock()
        self._deadline_s = config.mooncake.deadline_s
        self._meetings: dict[str, Future[int]] = {}  # by "host:port" of who holds objects; done: it has answered
        self._registered: list[range] = []

    def put(self, name: str, data: memoryview) -> None:
        with self._use(name) as client:
            # Mooncake answers "stored" for a name that is taken and keeps the old value. A manifest's checksums would find out
            # in the end; this finds all but a race. A lease that it grants is no matter: we remove by force.
            if _check(client.is_exist(name), name, absent=Gone):
                raise ValueError(f"{name}: exists; a name is used once")
            _check(client.put_from(name, _address(data), data.nbytes, self._where), name, absent=Gone)

    def replace(self, name: str, data: bytes) -> None:
        memory = np.frombuffer(data, np.uint8)
        with self._use(name) as client, self._registering(client, memory.data):
            _check(client.upsert_from(name, memory.ctypes.data, len(data), self._where), name, absent=Gone)

    def read(self, name: str) -> bytes:
        with self._use(name) as client:
            out = np.empty(self._meet(client, name) or 1, np.uint8)
            self._get(client, name, out.data)
            return out.tobytes()

    def read_into(self, name: str, out: memoryview) -> int:
        with self._use(name) as client:
            self._meet(client, name)
            return self._get(client, name, out)

    def remove(self, names: Iterable[str]) -> None:
        names = list(names)
        with self._use(names[0] if names else "remove") as client:
            for name, code in zip(names, client.batch_remove(names, True)):
                if code not in ABSENT:  # an unfinished put among them: the master takes its space back (release_s)
                    _check(code, name)

    def remove_run(self, run: str) -> None:
        with self._use(run) as client:
            _check(client.remove_by_regex(f"^{re.escape(run)}", True), run)

    def register(self, memory: memoryview) -> None:
        with self._use("register") as client:
            if code := client.register_buffer(_address(memory), memory.nbytes):
                raise ValueError(f"{memory.nbytes} bytes cannot be registered, or are already (Mooncake's code {code})")
        self._registered.append(range(_address(memory), _address(memory) + memory.nbytes))

    def usage(self) -> Usage:
        values = metrics(self._http, self._deadline_s)
        used, there = values["master_allocated_bytes"], values["master_total_capacity_bytes"]
        return Usage(int(values["master_key_count"]), int(used), int(there))

    def close(self) -> None:
        """Wait for the calls that run, then let go of the client and of what it holds: Mooncake crashes on any call after."""
        with self._idle:
            if self._closed or os.getpid() != self._pid:
                return
            self._closed = True
            self._idle.wait_for(lambda: not self._calls)
        self._client.close()

    @contextmanager
    def _use(self, name: str) -> Iterator:
        """The client for one call, never after `close` and never in a fork, where a call would hang and break the parent's."""
        with self._idle:
            if self._closed:
                raise Gone(f"{name}: this client of the store is closed")
            if os.getpid() != self._pid:
                raise RuntimeError("a Mooncake client does not survive a fork: open the store after it")
            self._calls += 1
        try:
            yield self._client
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()

    def _get(self, client, name: str, out: memoryview) -> int:
        with self._reading, self._registering(client, out):
            size = client.get_into(name, _address(out), out.nbytes)
        if size == BAD_SIZE or 0 <= size != out.nbytes:
            raise Torn(f"{name}: {size if size >= 0 else 'more'} bytes in the store, {out.nbytes} expected", cause="size")
        return _check(size, name)

    @contextmanager
    def _registering(self, client, memory: memoryview) -> Iterator[None]:
        """RDMA moves registered memory alone: what `register` has not been told is registered for one call."""
        address = _address(memory)
        known = any(address in held and address + memory.nbytes <= held.stop for held in self._registered)
        if not known and (code := client.register_buffer(address, memory.nbytes)):
            raise Gone(f"{memory.nbytes} bytes cannot be registered (Mooncake's code {code})")
        try:
            yield
        finally:
            if not known:
                client.unregister_buffer(address)

    def _meet(self, client, name: str) -> int:
        """Get one byte of an object from each process that holds it and has not been talked to before. Raises Lost in time.

        Mooncake waits 60 s for a first answer, whatever its deadlines, and delivers into the reader's memory even then.
        Returns the object's size, 0 where there is none.
        """
        size = 0
        for replica in client.get_replica_desc(name):
            buffer = replica.get_memory_descriptor().buffer_descriptor
            holder, size = buffer.transport_endpoint, buffer.size
            with self._idle:
                if holder not in self._meetings:
                    self._meetings[holder] = Future()
                    self._calls += 1
                    arguments = client, name, self._meetings[holder], holder
                    threading.Thread(target=self._greet, args=arguments, daemon=True, name="meet").start()
                meeting = self._meetings[holder]
            try:
                code = meeting.result(self._deadline_s)
            except TimeoutError:
                code = NOT_SENT
            if code != 1:
                raise Lost(f"{name}: {(ABSENT | UNREAD).get(code, 'cannot be read')} (code {code})")
        return size

    def _greet(self, client, name: str, meeting: Future, holder: str) -> None:
        byte, code = np.empty(1, np.uint8), NOT_SENT
        try:
            client.register_buffer(byte.ctypes.data, 1)
            ((code,),) = client.get_into_ranges([byte.ctypes.data], [[name]], [[[0]]], [[[0]]], [[[1]]])[0]
            client.unregister_buffer(byte.ctypes.data)
        finally:
            with self._idle:
                if code != 1:
                    del self._meetings[holder]  # the next one tries again
                self._calls -= 1
                self._idle.notify_all()
            meeting.set_result(code)


def connect(config: Mooncake, rpc: str, segment: int):
    """A set-up Mooncake client that gives `segment` bytes of this process to the store. Raises Gone."""
    deadline_ms = str(config.deadline_s * 1000)
    os.environ |= {
        "MC_RPC_TIMEOUT_MS": deadline_ms,  # of the master's answer (Mooncake's own 30 s)
        "MC_RPC_CONNECT_TIMEOUT_MS": deadline_ms,
        "MC_TCP_PROGRESS_TIMEOUT_SEC": str(config.deadline_s),  # without a byte from a peer (30 s)
        "MC_TCP_STATUS_TIMEOUT_SEC": str(config.deadline_s),
        "MC_SLICE_TIMEOUT": str(config.deadline_s),  # the same over RDMA (none)
        "MC_STORE_MEMCPY": "1",  # a put into one's own segment needs no transport, and no registered memory
        "MC_STORE_CLIENT_SETUP_RETRIES": "3",  # of another port each time, where one is taken (20)
    }
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise Gone(f"store.kind mooncake needs the package mooncake-transfer-engine and libibverbs.so.1: {error}") from None
    client = MooncakeDistributedStore()
    # No local buffer: it only serves calls that copy. No metadata server: clients tell each other.
    code = client.setup(_address_towards(rpc), "P2PHANDSHAKE", segment, 0, config.protocol, config.devices, rpc)
    if code:
        raise Gone(f"a Mooncake client with a segment of {segment} bytes cannot be set up at {rpc} (code {code})")
    return client


def _placement(own: str):
    """Where objects go: one copy, pinned (never evicted), in one's own segment while it has room."""
    from mooncake.store import ReplicateConfig

    where = ReplicateConfig()
    where.replica_num = 1
    where.with_hard_pin = True
    if own:
        where.preferred_segment = own
    return where


def _check(code: int, name: str, absent: type[StoreError] = Lost) -> int:
    """A non-negative return code, or the error that it means. Raises Full, Torn, Gone, and `absent` for what cannot be read."""
    if code >= 0:
        return code
    if code == NO_ROOM:
        raise Full(f"{name}: no room in the store")
    if code == BAD_CHECKSUM:
        raise Torn(f"{name}: checksum differs", cause="checksum")
    if reason := ABSENT.get(code) or UNREAD.get(code):
        raise absent(f"{name}: {reason}")
    raise Gone(f"{name}: {SILENT.get(code, 'Mooncake fails')} (code {code})")


def _address(memory: memoryview) -> int:
    return np.frombuffer(memory, np.uint8).ctypes.data


def _address_towards(rpc: str) -> str:
    """This machine's address on the way to the master: what other machines on that network reach (a container's bridge is not)."""
    host, _, port = rpc.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        return probe.getsockname()[0]
