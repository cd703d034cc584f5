"""Where the ranks of a process group meet, before they share the work on a folder."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilefold.retrieval._group import Desk, Line, connection_of, serve
from tilefold.retrieval.errors import RankError

MEET_SECONDS = 300.0  # in which all ranks must come: models may take a while to load
_CONNECT_SECONDS = 30.0
_LEAVE_SECONDS = 2.0
_PATH_BYTES = 256


@contextmanager
def meeting(group: dist.ProcessGroup, shards: int) -> Iterator[Desk | Line]:
    """The desk, at the first rank of `group`, and the line to it at the others.

    Raises:
        RankError: a rank did not come in time, or runs on another machine.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    home = Path(tempfile.mkdtemp(prefix="tilefold-ranks-")) if rank == 0 else None
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            if home is not None:
                sock.bind(str(home / "desk"))
                sock.listen(size)
            path = _path_for_all(group, "" if home is None else str(home / "desk"))
            sock.settimeout(_CONNECT_SECONDS)
            if home is not None:
                yield from _at_the_desk(sock, size, shards)
            else:
                sock.connect(path)
                connection = connection_of(sock)
                connection.send_bytes(bytes(str(rank), "ascii"))
                with connection:
                    yield Line(rank, connection)
    finally:
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)


def _at_the_desk(sock: socket.socket, size: int, shards: int) -> Iterator[Desk]:
    desk = Desk(shards, size - 1)
    connections, threads = [], []
    try:
        for _ in range(size - 1):
            try:
                connection = connection_of(sock.accept()[0])
                connections.append(connection)
                threads.append(serve(desk, int(connection.recv_bytes()), connection))
            except (OSError, EOFError) as error:
                raise RankError(f"a rank ended before the work began ({type(error).__name__}).") from error
        yield desk
    finally:
        for thread in threads:  # ends when its rank has heard the last word
            thread.join(timeout=_LEAVE_SECONDS)
        for connection in connections:
            with suppress(OSError):
                connection.close()


def _path_for_all(group: dist.ProcessGroup, path: str) -> str:
    """The path that the first rank gives, on every rank, once all have come."""
    cpu, own = _cpu_group(group)
    try:
        _wait_for_all(cpu)
        machines = [torch.zeros(16, dtype=torch.uint8) for _ in range(dist.get_world_size(cpu))]
        dist.all_gather(machines, torch.frombuffer(bytearray(_machine()), dtype=torch.uint8), group=cpu)
        if any(not torch.equal(machine, machines[0]) for machine in machines):
            raise RankError(
                "group: expected ranks of one machine, got several machines. Give each machine a part of the texts, or "
                "encode with an engine that is made for it."
            )
        told = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
        encoded = os.fsencode(path)
        told[: len(encoded)] = torch.frombuffer(bytearray(encoded or b"\0"), dtype=torch.uint8)[: len(encoded)]
        dist.broadcast(told, src=dist.get_global_rank(cpu, 0), group=cpu)
        return os.fsdecode(bytes(told.tolist()).rstrip(b"\0"))
    finally:
        if own:
            dist.destroy_process_group(cpu)


def _cpu_group(group: dist.ProcessGroup) -> tuple[dist.ProcessGroup, bool]:
    """A group of the same ranks over gloo, and whether it was made for this."""
    if dist.get_backend(group) == "gloo":
        return group, False
    timeout = timedelta(seconds=MEET_SECONDS)
    ranks = dist.get_process_group_ranks(group)
    with _come_in_time():
        made = dist.new_group(ranks, timeout=timeout, backend="gloo", use_local_synchronization=True)
    return made, True


def _wait_for_all(group: dist.ProcessGroup) -> None:
    with _come_in_time():
        dist.monitored_barrier(group, timeout=timedelta(seconds=MEET_SECONDS), wait_all_ranks=True)


@contextmanager
def _come_in_time() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankError(
            f"group: expected a call on every rank of the process group within {MEET_SECONDS:.0f} s, and some did not "
            f"come ({' '.join(str(error).split())[:200]}). Call it on all ranks, or with group=None on one alone."
        ) from error


def _machine() -> bytes:
    """16 bytes that tell this machine, since it was booted, from others."""
    name: Any = platform.node()
    with suppress(OSError):
        name += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    return hashlib.sha256(name.encode()).digest()[:16]
