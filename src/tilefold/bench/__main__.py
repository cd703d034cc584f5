"""``python -m tilefold.bench``: the same as ``tilefold bench``."""

import os

from tilefold.cli.bench import bench_app

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the program does, before torch starts its threads
    bench_app()(prog_name="tilefold bench")
