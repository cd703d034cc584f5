"""Commands on a real Ray that are killed; with ``nodes FOLDER`` as arguments, one of two nodes is
lost.

The two nodes are on this machine, each with a raylet and an object store. One is lost on the way,
and a second command goes on from a folder in which shards are missing: the folder must have the
bytes that one process writes.
"""

from __future__ import annotations

import functools
import os
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
from tilefold.retrieval import encode_collection
from tilefold.retrieval.encoding.on_ray import RayCluster, encode_on_ray
from tilefold.retrieval.encoding.sparse import SparseEncoding
from tilefold.retrieval.vectors.shards import ShardWriter

COUNT, SHARD, SECONDS = 200, 8, 600
TEXTS: dict[str, Any] = {
    f"d{i}": "cats sleep and dogs run " * (i % 37) + f"text {i}" for i in range(COUNT)
}
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


def load_and_stop(folder: str) -> Any:
    """A model whose worker writes two shards and then stands still, until the command is killed."""
    if os.getpid() != int(os.environ["TILEFOLD_COMMAND"]):  # which looks at the model, too
        remaining_shards = iter(range(2))
        write = ShardWriter.write_shard_with_receipt

        def write_or_stop(writer: Any, *arguments: Any) -> None:
            if next(remaining_shards, None) is None:
                time.sleep(SECONDS)
            write(writer, *arguments)

        ShardWriter.write_shard_with_receipt = write_or_stop  # type: ignore[method-assign, assignment]
    return load(folder)


def written(output: Path) -> int:
    return len(list(output.glob("part-*.parquet")))


def run(
    make: Callable[[], Any],
    output: str | Path,
    address: str | None = None,
    workers: int | None = None,
) -> Any:
    cluster = RayCluster(address, workers=workers, worker_cpus=1)
    return encode_on_ray(
        make,
        TEXTS,
        output,
        SparseEncoding(**OPTIONS),
        cluster=cluster,
        shard_size=SHARD,
    )


def encode_alone(model: Path, output: Path) -> None:
    """What one process writes, with as many threads as a worker has: MKL adds up in another order
    with more.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        encode_collection(load(str(model)), TEXTS, output, shard_size=SHARD, **OPTIONS)
    finally:
        torch.set_num_threads(threads)


def killed(model: Path, output: Path) -> int:
    """Kill a command with one worker when it has written two shards of many; how many there are."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with programs.start(
        "-m",
        "tests.retrieval.ray_killed",
        "stop",
        model,
        output,
        1,
        env=environment,
    ) as process:
        while written(output) < 2 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    return written(output)


def same_files(one: Path, other: Path) -> bool:
    """Whether two folders have the same files with the same bytes, apart from what a killed process
    was writing.
    """
    names, others = (
        {file.name for file in folder.iterdir() if file.is_file()} for folder in (one, other)
    )
    return names == others and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


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
    model, output, nodes = small_masked_lm(home / "model"), home / "vectors", home / "nodes"
    encode_alone(model, home / "alone")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": cluster.address}
    command = [sys.executable, "-m", "tests.retrieval.ray_killed", "run", str(model), str(output)]
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        with subprocess.Popen(command, env=environment) as process:
            until = time.monotonic() + SECONDS
            while (
                written(output) < 4 or len(list(nodes.iterdir())) < 2
            ) and process.poll() is None:
                assert time.monotonic() < until, "both nodes should have begun"
                time.sleep(0.02)
            lost = written(output)
            cluster.remove_node(other, allow_graceful=False)
            assert process.wait(SECONDS) == 0
        assert len(list(nodes.iterdir())) >= 2 and same_files(output, home / "alone")
        for number in (1, 7):
            (output / f"part-{number:05d}.parquet").unlink()
        subprocess.run(command, env=environment, check=True, timeout=SECONDS)
        assert same_files(output, home / "alone")
    finally:
        cluster.shutdown()
    sys.stdout.write(
        f"the same bytes after a node was lost with {lost} of {-(-len(TEXTS) // SHARD)} shards\n",
    )


def main() -> None:
    what, place, *rest = sys.argv[1:]
    if what == "nodes":
        lose_a_node(Path(place))
        return
    output, *workers = rest
    nodes = Path(output).with_name("nodes")
    if what == "stop":
        os.environ["TILEFOLD_COMMAND"] = str(os.getpid())
        message = functools.partial(load_and_stop, place)
    elif nodes.is_dir():
        message = functools.partial(load_and_say, place, str(nodes))
    else:
        message = functools.partial(load, place)
    run(message, output, os.environ.get("RAY_ADDRESS"), *map(int, workers))


if __name__ == "__main__":
    main()
