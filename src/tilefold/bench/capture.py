"""A call captured once as a CUDA graph, to time kernels without the host's part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """``run`` as a graph that replays; what it returns is what the capture returned, with new numbers.

    The graph reads the memory of the tensors that ``run`` holds: the replay holds ``run``.
    """
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()
    return functools.partial(_replay, graph, result, run)


def _replay(graph: torch.cuda.CUDAGraph, result: Any, _held: Callable[[], Any]) -> Any:
    graph.replay()
    return result
