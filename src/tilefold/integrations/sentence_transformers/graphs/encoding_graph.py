"""One CUDA graph of an encoding, its input buffers, and the memory that graphs of a model share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from tilefold._internal.cuda_graphs import WARM_UP_RUNS, GraphMemory
from tilefold.integrations.transformers.packed import LONGEST_NAMES, OFFSET_NAMES, OFFSETS
from tilefold.modules.fused_pooling import Features

# Computes a graph's results from its static inputs.
Body = Callable[[], Sequence[Tensor]]


class GraphSize(NamedTuple):
    """Size of a graph.

    Attributes:
        texts: the largest number of texts of a batch, without the filler text.
        tokens: the number of tokens of all texts, with those of the filler text.
    """

    texts: int
    tokens: int


class TensorLayout(NamedTuple):
    """Shape and dtype of an input tensor of a graph."""

    shape: torch.Size
    dtype: torch.dtype


def input_layouts(features: Features, size: GraphSize) -> dict[str, TensorLayout]:
    """Return the shape and dtype of each input tensor of a graph, by the name of the feature.

    Padded features keep their shapes. Packed features consist of token ids, positions and offsets,
    and their tensors have the size of the graph.

    Args:
        features: the features of a batch.
        size: the size of the graph.
    """
    is_padded = OFFSETS not in features
    if is_padded:
        return {
            name: TensorLayout(value.shape, value.dtype)
            for name, value in features.items()
            if isinstance(value, Tensor)
        }
    n_sequences = size.texts + 1  # with the filler text
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
    """Input tensors of a graph on the device, and the buffer on the CPU that they are copied from.

    All tensors are views of one int64 buffer, so that one transfer copies them. A packed batch is
    followed by a filler text with the unused tokens, whose results are discarded.

    Attributes:
        size: the size of the graph.
    """

    def __init__(self, features: Features, size: GraphSize, device: torch.device) -> None:
        """Allocate the buffer on the CPU and on the device.

        Args:
            features: the features of a batch on the CPU, whose tensors give names and shapes.
            size: the size of the graph.
            device: the device of the model.
        """
        self.size = size
        self._is_packed = OFFSETS in features
        # Features that are the same for every batch of the graph.
        self._constants: Features = {
            name: value for name, value in features.items() if not isinstance(value, Tensor)
        }
        if self._is_packed:
            # A graph repeats the value at its capture. So the length of the longest text is an
            # upper bound for all batches.
            for name in LONGEST_NAMES:
                self._constants[name] = size.tokens
        layouts = input_layouts(features, size)
        n_values = sum(layout.shape.numel() for layout in layouts.values())
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(n_values, dtype=torch.int64, pin_memory=on_gpu)
        self._device = torch.zeros(n_values, dtype=torch.int64, device=device)
        self._dtypes = {name: layout.dtype for name, layout in layouts.items()}
        self._device_views = split_buffer(self._device, layouts)
        self._host_views: dict[str, npt.NDArray[Any]] = {
            name: tensor.numpy() for name, tensor in split_buffer(self._host, layouts).items()
        }

    def fill(self, features: Features) -> None:
        """Write the features of a batch to the buffer on the CPU.

        Args:
            features: the features of the batch on the CPU.
        """
        for name, view in self._host_views.items():
            values = features[name].numpy()
            if not self._is_packed:
                view[:] = values
            elif name == OFFSETS:
                view[: values.size] = values
                # Missing texts get the offset of the end, so they are empty. The last text is a
                # filler with all unused tokens.
                view[values.size : -1] = values[-1]
                view[-1] = self.size.tokens
            else:
                # Unused tokens keep the values of earlier batches.
                view[:, : values.shape[1]] = values

    def copy_to_device(self) -> Features:
        """Copy the buffer to the device and return the features of the model.

        A graph captures this copy, so that every replay reads the current buffer.
        """
        self._device.copy_(self._host, non_blocking=True)
        features: Features = {
            name: view.to(self._dtypes[name]) for name, view in self._device_views.items()
        }
        if self._is_packed:
            for name in OFFSET_NAMES:
                features[name] = features[OFFSETS]
        return {**features, **self._constants}


class EncodingMemory(GraphMemory):
    """Memory of a model's graphs, which threads replay on their current CUDA streams.

    A replay overwrites the results of the one before, so it must wait until they have been copied.
    """

    def __init__(self) -> None:
        super().__init__()
        # The stream of the last replay, and the event after which its results may be overwritten.
        self._last_stream: torch.cuda.Stream | None = None
        self._results_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Replay a graph on the current CUDA stream.

        If the last replay ran on another stream, wait until its results have been copied.

        Args:
            graph: the graph, which copies its results to the CPU itself.
        """
        stream = torch.cuda.current_stream(self.stream.device)
        if self._last_stream is not None and self._last_stream != stream:
            stream.wait_event(self._results_copied)
        graph.replay()
        self._last_stream = stream
        self._results_copied.record(stream)

    def wait(self) -> None:
        """Wait until the GPU has finished the last replay."""
        self._results_copied.synchronize()

    def record_read(self) -> None:
        """Let the next replay also wait for copies that were launched after the last replay."""
        if self._last_stream is not None:
            self._results_copied.record(self._last_stream)


class EncodingGraph:
    """CUDA graph of a function of static inputs, and its results.

    Attributes:
        device_results: the results on the device, which the next replay of any graph overwrites.
        host_results: copies of them in pinned memory.
    """

    def __init__(self, body: Body, memory: EncodingMemory) -> None:
        """Capture a function in a CUDA graph that also copies its results to pinned memory.

        Args:
            body: reads static inputs and returns the results. It runs a few times to warm up.
            memory: the memory pool and the CUDA stream that the model's graphs share.
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
        """Wait until the results are on the CPU."""
        self._memory.wait()

    def record_read(self) -> None:
        """Let the next replay wait for the copies of device results that were launched so far."""
        self._memory.record_read()
