"""``python -m tests.retrieval.ray_two_nodes FOLDER``: two nodes of Ray on this machine, one of which is lost.

Each node is a raylet with an object store of its own, as on a machine of its own, but shares disk and clock with the
other one. A command encodes on both, one of them is killed on the way, and the folder must have the bytes of one
process; then a second command goes on from a folder in which shards are missing, and must give them again.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.recipes.small import small_masked_lm
from tests.retrieval.ray_killed import SHARD, TEXTS, encode_alone, load, run, same_files, say, written
from tilefold.retrieval import read_manifest

SECONDS = 600


def load_and_say(folder: str, nodes: str) -> Any:
    """A model whose worker leaves the name of its node."""
    import ray

    if ray.is_initialized():
        (Path(nodes) / str(ray.get_runtime_context().get_node_id())).touch()
    return load(folder)


def command(address: str, model: Path, home: Path) -> list[str]:
    """A process that encodes on the cluster."""
    return [sys.executable, "-m", "tests.retrieval.ray_two_nodes", "run", address, str(model), str(home)]


def main() -> None:
    if sys.argv[1] == "run":
        address, folder, place = sys.argv[2:]
        run(functools.partial(load_and_say, folder, str(Path(place) / "nodes")), Path(place) / "vectors", address)
        return
    from ray.cluster_utils import Cluster

    home = Path(sys.argv[1])
    for name in ("model", "nodes"):
        (home / name).mkdir(parents=True)
    model, output = small_masked_lm(home / "model"), home / "vectors"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    encode_alone(model, home / "alone")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with subprocess.Popen(command(cluster.address, model, home), env=environment) as process:
            until = time.monotonic() + SECONDS
            while (written(output) < 4 or len(list((home / "nodes").iterdir())) < 2) and process.poll() is None:
                assert time.monotonic() < until, "both nodes should have begun"
                time.sleep(0.02)
            say(f"a node is lost with {written(output)} of {-(-len(TEXTS) // SHARD)} shards")
            cluster.remove_node(other, allow_graceful=False)
            assert process.wait(SECONDS) == 0
        nodes = {file.name for file in (home / "nodes").iterdir()}
        assert len(nodes) >= 2 and same_files(output, home / "alone")
        manifest = read_manifest(output)
        say(f"{manifest.n_texts} = {manifest.n_documents} + {len(manifest.failed)}, the same bytes, {len(nodes)} nodes")
        for number in (1, 7):
            (output / f"part-{number:05d}.parquet").unlink()
        subprocess.run(command(cluster.address, model, home), env=environment, check=True, timeout=SECONDS)
        assert same_files(output, home / "alone")
        say("the same bytes after two shards were taken away")
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
