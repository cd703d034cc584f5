"""Ports for programs that must be told one before they listen on it."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack
from pathlib import Path

# Linux takes the ports of connections, and of listeners that ask for any port, from a range.
_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10_000


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback address that are free now.

    They are below the range from which the system gives ports away, so that no other program gets
    one of them before it is used.
    """
    lowest_ephemeral = 32_768
    if _EPHEMERAL_RANGE.exists():
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    candidates = list(range(_LOWEST, lowest_ephemeral))
    random.SystemRandom().shuffle(candidates)
    ports: list[int] = []
    with ExitStack() as bound:
        for port in candidates or [0] * count:
            listener = bound.enter_context(socket.socket())
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:  # another program has this port
                continue
            ports.append(listener.getsockname()[1])
            if len(ports) == count:
                break
    return ports
