"""``python -m tilefold.bench``: the same as ``tilefold bench``."""

import os

import typer

from tilefold.cli.bench import bench

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the program does, before torch starts its threads
    typer.run(bench)
