"""One query of 12 tokens on the CPU: a stock SparseEncoder, the accelerated one, its ONNX graphs,
and other engines.

Calls of all take turns, so that a machine that others use slows all alike; CPU time is of the whole
process, and says more there than the clock. Engines that are not installed have no row (openvino),
or are named beside their version::

    OMP_NUM_THREADS=2 python -m benchmarks.query_on_cpu --model splade-model --graph onnx --graph int8 --seconds 60

Engines other than tilefold's run from token ids to scores, without the tokenizer and without sparse
rows.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SparseEncoder

from tilefold.bench.results import RESULTS, collect, results_file, write_csv
from tilefold.integrations.sentence_transformers import accelerate
from tilefold.modules import load_encoder
from tilefold.modules.fused_pooling import Wanted

TEXT = "how do i read a csv file line by line"  # 12 tokens with the special ones, of MiniLM's tokenizer
Calls = dict[str, Callable[[], object]]


def main() -> None:
    """Parse arguments, time, print and keep."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", required=True)
    parser.add_argument(
        "--graph",
        action="append",
        default=[],
        help="folder of an ONNX graph of the model",
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--name", help="of the model, in the rows")
    parser.add_argument(
        "--output",
        type=Path,
        help="where rows are kept; by default the repository's results",
    )
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows = timed(prepare(options.model, options.graph), options.seconds)
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))
    print(
        f"load {os.getloadavg()[0]:.1f}, torch {torch.__version__}, {torch.get_num_threads()} threads",
    )
    provenance = collect(torch.device("cpu"))
    shared = {
        "model": options.name or Path(options.model).name,
        "load": f"{os.getloadavg()[0]:.1f}",
    }
    shared |= {"isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "native")}
    path = results_file(options.output or RESULTS, "query_on_cpu", provenance)
    write_csv(path, [shared | row for row in rows], provenance, ("model", "isa", "what"))


def prepare(model: str, graphs: list[str]) -> Calls:
    """What to call, by name."""
    stock, fused, quantized = (SparseEncoder(model, device="cpu").eval() for _ in range(3))
    accelerate(fused)
    calls: Calls = {
        "stock encode_query": lambda: stock.encode_query([TEXT]),
        "accelerate, encode_query": lambda: fused.encode_query([TEXT]),
    }
    features: Any = stock.preprocess([TEXT])
    tensors = {name: features[name] for name in ("input_ids", "attention_mask")}
    calls["stock network alone"] = without_gradients(lambda: stock[0].model(**tensors))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is to leave torch
        quantize: Any = torch.ao.quantization.quantize_dynamic
        made = quantize(quantized[0].model, {torch.nn.Linear}, torch.qint8)
    calls["torch.ao int8 network alone"] = without_gradients(lambda: made(**tensors))
    for graph in graphs:
        loaded = load_encoder(graph, device="cpu")
        calls[f"{Path(graph).name} encode_query"] = encoding(loaded)
        accelerate(loaded)
        calls[f"{Path(graph).name} encode_sparse_batch"] = sparse_batch(loaded)
        calls[f"{Path(graph).name} onnxruntime alone"] = alone(loaded[0], tensors)
        if importlib.util.find_spec("openvino"):
            calls[f"{Path(graph).name} openvino alone"] = by_openvino(
                f"{graph}/model.onnx",
                tensors,
            )
    return calls


def encoding(model: SparseEncoder) -> Callable[[], object]:
    stock = type(model).encode_query
    return lambda: stock(model, [TEXT])


def sparse_batch(model: Any) -> Callable[[], object]:
    """What `tilefold serve` calls."""
    return lambda: model.encode_sparse_batch([TEXT], task="query")


def alone(graph: Any, tensors: dict[str, Any]) -> Callable[[], object]:
    return lambda: graph.fused_scores(tensors, None, Wanted())


def without_gradients(call: Callable[[], object]) -> Callable[[], object]:
    def run() -> object:
        with torch.inference_mode():
            return call()

    return run


def by_openvino(path: str, tensors: dict[str, Any]) -> Callable[[], object]:
    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    core: Any = importlib.import_module("openvino").Core()
    compiled = core.compile_model(path, "CPU", settings | {"INFERENCE_PRECISION_HINT": "f32"})
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    return lambda: compiled(arrays)


def timed(calls: Calls, seconds: float) -> list[dict[str, object]]:
    """Milliseconds of each, wall and CPU, beside the first of all in the same turn."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(), call()
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(next(iter(wall.values()))) < 3:
        for name, call in calls.items():
            begin, began = time.perf_counter(), time.process_time()
            call()
            cpu[name].append(1e3 * (time.process_time() - began))
            wall[name].append(1e3 * (time.perf_counter() - begin))
    first = next(iter(calls))
    return [
        {
            "what": name,
            "threads": torch.get_num_threads(),
            "turns": len(wall[name]),
            "p50_ms": round(statistics.median(wall[name]), 2),
            "least_ms": round(min(wall[name]), 2),
            "cpu_p50_ms": round(statistics.median(cpu[name]), 2),
            "times_as_fast": round(
                statistics.median(a / b for a, b in zip(wall[first], wall[name], strict=True)),
                2,
            ),
            "times_as_fast_cpu": round(
                statistics.median(cpu[first]) / statistics.median(cpu[name]),
                2,
            ),
        }
        for name in calls
    ]


if __name__ == "__main__":
    main()
