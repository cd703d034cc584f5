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


class TensorLayout(NamedTuple):
    """Shape and dtype of an input tensor of a graph."""

    shape: torch.Size
    dtype: torch.dtype


def input_layouts(features: Features, size: GraphSize) -> dict[str, TensorLayout]:
    """Return shape and dtype of each input tensor of a graph, by the name of the feature.

    Args:
        features: features of a batch. If they are padded, the tensors have their shapes.
        size: size of the graph. If the features are packed, the tensors have room for this many
            tokens and texts.
    """
    is_padded = OFFSETS not in features
    if is_padded:
        return {
            name: TensorLayout(value.shape, value.dtype)
            for name, value in features.items()
            if isinstance(value, Tensor)
        }
    n_sequences = size.texts + 1  # the last one holds the unused tokens
    per_token = TensorLayout(torch.Size([1, size.tokens]), torch.int64)
    return {
        "input_ids": per_token,
        "position_ids": per_token,
        OFFSETS: TensorLayout(torch.Size([n_sequences + 1]), torch.int32),
    }


def split_buffer(buffer: Tensor, layouts: dict[str, TensorLayout]) -> dict[str, Tensor]:
    """Divide a one-dimensional buffer into tensors of the given shapes, by name."""
    shapes = [layout.shape for layout in layouts.values()]
    parts = torch.split(buffer, [shape.numel() for shape in shapes])
    return {
        name: part.view(shape) for name, part, shape in zip(layouts, parts, shapes, strict=True)
    }


class InputBuffers:
    """Input tensors of a graph, which one copy from the CPU fills.

    All tensors are parts of one buffer of int64. Packed texts are followed by one more text with
    the unused tokens, whose results are discarded.

    Attributes:
        size: size of the graph.
    """

    def __init__(self, features: Features, size: GraphSize, device: torch.device) -> None:
        """Allocate a buffer on the CPU and one on the device, with a view for each tensor.

        Args:
            features: features of a batch on the CPU, which show the names and shapes of tensors.
            size: size of the graph.
            device: device of the model.
        """
        self.size = size
        self._packed = OFFSETS in features
        # Features that are the same for every batch of the graph.
        self._constants: Features = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        if self._packed:
            # The upper bound of every batch, since a graph cannot follow the longest text.
            for name in LONGEST_NAMES:
                self._constants[name] = size.tokens
        layouts = input_layouts(features, size)
        n_values = sum(layout.shape.numel() for layout in layouts.values())
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(n_values, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(n_values, dtype=torch.int64, device=device)
        self._dtypes = {name: layout.dtype for name, layout in layouts.items()}
        self._device_tensors = split_buffer(self._device, layouts)
        self._host_arrays: dict[str, npt.NDArray[Any]] = {
            name: tensor.numpy() for name, tensor in split_buffer(self._host, layouts).items()
        }

    def fill(self, features: Features) -> None:
        """Write the features of a batch to the buffer on the CPU.

        Unused tokens keep the values of earlier batches. They belong to the last text, whose
        results are discarded.

        Args:
            features: features of the batch on the CPU.
        """
        for name, array in self._host_arrays.items():
            values = features[name].numpy()
            if not self._packed:
                array[:] = values
            elif values.ndim == 2:  # a value per token
                array[:, : values.shape[1]] = values
            else:  # offsets: missing texts are empty, and the last text has the unused tokens
                array[: values.size] = values
                array[values.size : -1] = values[-1]
                array[-1] = self.size.tokens

    def features(self) -> Features:
        """Copy the buffer to the device and return the model's features.

        A graph captures this copy, so that every replay reads the current buffer.
        """
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
        """Replay a graph on the current CUDA stream, after all earlier work on it.

        On another stream than the last replay, it first waits until the results of that replay have
        been read.

        Args:
            graph: the graph.
        """
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
            body: the function that is captured. It reads static inputs and returns the results.
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
