"""``python -m tests.retrieval.ray_killed FOLDER SEED [KILLS]``: commands on a real Ray, killed at random moments.

Each command is a process of its own with workers on this machine. After the kills one more goes to the end, with a
worker that dies once, and the folder must have the bytes that one process writes. With ``nodes FOLDER``, two nodes on
this machine, each with a raylet and an object store, encode; one is lost on the way, and a second command goes on from
a folder in which shards are missing.
"""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests import programs
from tests.recipes.small import small_masked_lm
from tilefold.retrieval import encode_collection, read_manifest
from tilefold.retrieval.encoding import SparseEncoding
from tilefold.retrieval.on_ray import RayCluster, encode_on_ray

COUNT, SHARD, SECONDS = 200, 8, 600
TEXTS: dict[str, Any] = {f"d{i}": "cats sleep and dogs run " * (i % 37) + f"text {i}" for i in range(COUNT)}
TEXTS |= {"number": 5, "nothing": None}
OPTIONS: dict[str, Any] = {"top_k": 20}


def load(folder: str) -> Any:
    from sentence_transformers import SparseEncoder

    from tilefold.integrations.sentence_transformers import accelerate

    model = SparseEncoder(folder, device="cpu", local_files_only=True)
    accelerate(model, check=False)
    return model


def load_and_die_once(folder: str, output: str, flag: str) -> Any:
    """A model whose first process ends when a shard has been written since."""
    model = load(folder)
    if os.getpid() == int(os.environ["TILEFOLD_COMMAND"]):  # which looks at the model, too
        return model
    try:
        Path(flag).touch(exist_ok=False)
    except FileExistsError:
        return model
    before = written(Path(output))

    def die() -> None:
        while written(Path(output)) <= before:
            time.sleep(0.005)
        os._exit(9)

    threading.Thread(target=die, daemon=True).start()
    return model


def written(output: Path) -> int:
    return len(list(output.glob("part-*.parquet")))


def run(make: Callable[[], Any], output: str | Path, address: str | None = None, workers: int | None = None) -> Any:
    cluster = RayCluster(address, workers=workers, worker_cpus=1)
    return encode_on_ray(make, TEXTS, output, SparseEncoding(**OPTIONS), cluster=cluster, shard_size=SHARD)


def encode_alone(model: Path, output: Path) -> None:
    """What one process writes, with as many threads as a worker has: MKL adds up in another order with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encode_collection(load(str(model)), TEXTS, output, shard_size=SHARD, **OPTIONS)
    finally:
        torch.set_num_threads(threads)


def killed(
    model: Path, output: Path, shards: int, pause: float, environment: dict[str, str], workers: int | None = None
) -> int:
    """Kill a command `pause` seconds after that many shards have appeared; how many there are then."""
    before, most = written(output), [] if workers is None else [workers]
    command = ("-m", "tests.retrieval.ray_killed", "run", model, output, *most)
    with programs.start(*command, env=environment) as process:
        while written(output) < before + shards and process.poll() is None:
            time.sleep(0.01)
        time.sleep(pause)
        process.send_signal(signal.SIGKILL)
    return written(output)


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have the same files with the same bytes, apart from what a killed process was writing."""
    names, others = ({file.name for file in folder.iterdir() if file.is_file()} for folder in (one, other))
    return names == others and all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def load_and_say(folder: str, nodes: str) -> Any:
    """A model whose worker leaves the name of its node."""
    import ray

    if ray.is_initialized():
        (Path(nodes) / str(ray.get_runtime_context().get_node_id())).touch()
    return load(folder)


def lose_a_node(home: Path) -> None:
    """Encode on two nodes, of which one is lost."""
    from ray.cluster_utils import Cluster

    for name in ("model", "nodes"):
        (home / name).mkdir(parents=True)
    model, output = small_masked_lm(home / "model"), home / "vectors"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    encode_alone(model, home / "alone")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    command = [sys.executable, "-m", "tests.retrieval.ray_killed", "node", cluster.address, str(model), str(home)]
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with subprocess.Popen(command, env=environment) as process:
            until = time.monotonic() + SECONDS
            while (written(output) < 4 or len(list((home / "nodes").iterdir())) < 2) and process.poll() is None:
                assert time.monotonic() < until, "both nodes should have begun"
                time.sleep(0.02)
            say(f"a node is lost with {written(output)} of {-(-len(TEXTS) // SHARD)} shards")
            cluster.remove_node(other, allow_graceful=False)
            assert process.wait(SECONDS) == 0
        nodes, manifest = len(list((home / "nodes").iterdir())), read_manifest(output)
        assert nodes >= 2 and same_files(output, home / "alone")
        say(f"{manifest.n_texts} = {manifest.n_documents} + {len(manifest.failed)}, the same bytes, {nodes} nodes")
        for number in (1, 7):
            (output / f"part-{number:05d}.parquet").unlink()
        subprocess.run(command, env=environment, check=True, timeout=SECONDS)
        assert same_files(output, home / "alone")
        say("the same bytes after two shards were taken away")
    finally:
        cluster.shutdown()


def main() -> None:
    if sys.argv[1] == "nodes":
        lose_a_node(Path(sys.argv[2]))
        return
    if sys.argv[1] == "node":
        address, folder, place = sys.argv[2:]
        run(functools.partial(load_and_say, folder, str(Path(place) / "nodes")), Path(place) / "vectors", address)
        return
    if sys.argv[1] == "run":
        workers = int(sys.argv[4]) if len(sys.argv) > 4 else None
        run(functools.partial(load, sys.argv[2]), sys.argv[3], os.environ.get("RAY_ADDRESS"), workers)
        return
    home, moments = Path(sys.argv[1]), random.Random(int(sys.argv[2]))  # noqa: S311
    (home / "model").mkdir(parents=True)
    model, output = small_masked_lm(home / "model"), home / "vectors"
    for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 3):
        shards = moments.choice([0, 1, 3, 5])
        pause = moments.uniform(0.0, 0.3) if shards else moments.uniform(2.0, 15.0)
        say(f"killed with {killed(model, output, shards, pause, dict(os.environ))} shards")
    encode_alone(model, home / "alone")
    os.environ["TILEFOLD_COMMAND"] = str(os.getpid())
    manifest = run(functools.partial(load_and_die_once, str(model), str(output), str(home / "died")), output)
    say(f"{manifest.n_texts} = {manifest.n_documents} + {len(manifest.failed)}")
    assert (home / "died").exists(), "no worker has died"
    assert same_files(output, home / "alone")
    say("the same bytes")


if __name__ == "__main__":
    main()
