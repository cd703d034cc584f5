"""Stand-in for CUDA graphs of encodings on machines without a GPU."""

from __future__ import annotations

import torch

from tilefold.integrations.sentence_transformers.graphs.encoding_graph import Body


class EagerGraph:
    """Stands for a captured graph on machines without a GPU: it runs the function at every launch.

    Attributes:
        n_captures: number of graphs that were created.
        host_results, device_results: results of the last launch.
    """

    n_captures = 0

    def __init__(self, body: Body, memory: object) -> None:
        EagerGraph.n_captures += 1
        self.body = body
        self.launch()

    def launch(self) -> None:
        with torch.inference_mode():
            self.host_results = self.device_results = list(self.body())

    def wait(self) -> None:
        """Do nothing: the launch has computed the results."""
