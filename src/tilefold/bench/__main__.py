"""``python -m tilefold.bench``: the same as ``tilefold bench``."""

import typer

from tilefold.cli.bench import bench

if __name__ == "__main__":
    typer.run(bench)
