"""One CUDA graph of an encoding, its input buffers, and the memory that graphs of a model share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from tilefold.integrations.sentence_transformers.graphs.capture import WARM_UP_RUNS, GraphMemory
from tilefold.integrations.transformers.packed import LONGEST_NAMES, OFFSET_NAMES, OFFSETS
from tilefold.modules.fused_pooling import Features

# Computes a graph's results from its static inputs.
Body = Callable[[], Sequence[Tensor]]


class GraphSize(NamedTuple):
    """Numbers of texts and of tokens of all texts that a graph is captured for."""

    texts: int
    tokens: int


class InputBuffers:
    """Input tensors of a graph, which one copy from the CPU fills.

    Packed texts are followed by one more text with the unused tokens, whose results are discarded.
    Padded features keep their shapes.

    Args:
        features: features of a batch on the CPU.
        size: size of the graph.
        device: device of the model.

    Attributes:
        size: size of the graph.
    """

    def __init__(self, features: Features, size: GraphSize, device: torch.device) -> None:
        """Allocate one buffer on the CPU and one on the device, and divide them into tensors.

        The class describes the arguments.
        """
        self.size = size
        self._packed = OFFSETS in features
        # Features that are the same for every batch of the graph.
        self._constants: Features = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        shapes = {
            name: value.shape for name, value in features.items() if isinstance(value, Tensor)
        }
        self._dtypes = {
            name: value.dtype for name, value in features.items() if isinstance(value, Tensor)
        }
        if self._packed:
            for name in LONGEST_NAMES:
                self._constants[name] = size.tokens
            n_offsets = size.texts + 2  # one more than texts, of which one holds the unused tokens
            shapes = {
                "input_ids": torch.Size([1, size.tokens]),
                "position_ids": torch.Size([1, size.tokens]),
                OFFSETS: torch.Size([n_offsets]),
            }
            self._dtypes = {
                "input_ids": torch.int64,
                "position_ids": torch.int64,
                OFFSETS: torch.int32,
            }
        # All tensors are parts of one buffer of int64, so that one copy moves them.
        lengths = [shape.numel() for shape in shapes.values()]
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(sum(lengths), dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(sum(lengths), dtype=torch.int64, device=device)
        self._host_arrays: dict[str, npt.NDArray[Any]] = {}
        self._device_tensors: dict[str, Tensor] = {}
        host_parts = torch.split(self._host, lengths)
        device_parts = torch.split(self._device, lengths)
        for name, host_part, device_part in zip(shapes, host_parts, device_parts, strict=True):
            self._host_arrays[name] = host_part.view(shapes[name]).numpy()
            self._device_tensors[name] = device_part.view(shapes[name])

    def fill(self, features: Features) -> None:
        """Write the features of a batch to the buffer on the CPU; unused tokens keep old values."""
        for name, array in self._host_arrays.items():
            values = features[name].numpy()
            if not self._packed:
                array[:] = values
            elif values.ndim == 2:  # a value per token
                array[:, : values.shape[1]] = values
            else:  # offsets: texts that the batch lacks are empty, the last one has unused tokens
                array[: values.size] = values
                array[values.size : -1] = values[-1]
                array[-1] = self.size.tokens

    def features(self) -> Features:
        """Copy the buffer to the device and return the model's features."""
        self._device.copy_(self._host, non_blocking=True)
        features: Features = {
            name: tensor.to(self._dtypes[name]) for name, tensor in self._device_tensors.items()
        }
        if self._packed:
            for name in OFFSET_NAMES:
                features[name] = features[OFFSETS]
        return {**features, **self._constants}


class EncodingMemory(GraphMemory):
    """Memory of a model's graphs, which threads replay on their own CUDA streams.

    A replay overwrites the results of the one before it, so it waits until these have been read.
    """

    def __init__(self) -> None:
        super().__init__()
        # Stream of the last replay, and the event after which its results are no longer read.
        self._last_stream: torch.cuda.Stream | None = None
        self._last_read = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph on the current stream, after earlier work such as changes of weights."""
        stream = torch.cuda.current_stream(self.stream.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_event(self._last_read)
        graph.replay()
        self._last_stream = stream
        self._last_read.record(stream)

    def wait(self) -> None:
        """Wait until the GPU has finished the last replay."""
        self._last_read.synchronize()

    def record_read(self) -> None:
        """Let the next replay wait for reads that were launched after the last one."""
        if self._last_stream is not None:
            self._last_read.record(self._last_stream)


class EncodingGraph:
    """Captured graph of a function of static inputs, and its results.

    Attributes:
        device_results: results on the device, which the next replay of any graph overwrites.
        host_results: copies of them in pinned memory.
    """

    def __init__(self, body: Body, memory: EncodingMemory) -> None:
        """Warm up, then capture the function and copies of its results to the CPU.

        Args:
            body: the function.
            memory: memory of the model's graphs.
        """
        self._memory = memory
        with memory.warming_up():
            for _ in range(WARM_UP_RUNS):
                results = body()
        self.host_results = [
            torch.empty(result.shape, dtype=result.dtype, pin_memory=True) for result in results
        ]
        self._graph = torch.cuda.CUDAGraph()
        with memory.capturing(self._graph):
            self.device_results = list(body())
            for host, result in zip(self.host_results, self.device_results, strict=True):
                host.copy_(result, non_blocking=True)

    def launch(self) -> None:
        """Launch the graph on the current stream."""
        self._memory.replay(self._graph)

    def wait(self) -> None:
        """Wait for the results on the CPU."""
        self._memory.wait()

    def record_read(self) -> None:
        """Keep the results on the device until reads of them that were launched so far are done."""
        self._memory.record_read()
