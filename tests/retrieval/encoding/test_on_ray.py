"""Encoding on Ray: the bytes of one process, whatever is killed; what does not fit together is
refused.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.small import small_masked_lm
from tests.refusals import refused
from tests.retrieval import ray_killed
from tilefold.retrieval import encode_collection, read_manifest
from tilefold.retrieval.common.provenance import Provenance
from tilefold.retrieval.data.shard_texts import FileTexts, InMemoryTexts
from tilefold.retrieval.encoding.on_ray import (
    ATTEMPTS_SUFFIX,
    MAX_ATTEMPTS,
    ClusterError,
    RayCluster,
    Worker,
    WorkerConfig,
    encode_on_ray,
)
from tilefold.retrieval.encoding.sparse import Output, SparseEncoding
from tilefold.retrieval.errors import DataError, MissingPackageError

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS: dict[str, Any] = {f"d{i}": "cats sleep " * (i + 1) for i in range(8)} | {"number": 5}
ENCODING = SparseEncoding(top_k=20, batch_size=2)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_masked_lm(tmp_path_factory.mktemp("model"))


@pytest.fixture
def alone(splade: Any, tmp_path: Path) -> Path:
    """What one process writes."""
    encode_collection(splade, TEXTS, tmp_path / "alone", top_k=20, batch_size=2, shard_size=2)
    return tmp_path / "alone"


class Held:
    """A folder that a command holds, and the worker's side of it."""

    def __init__(self, model: Any, folder: Path, texts: InMemoryTexts | FileTexts) -> None:
        self.model, self.survey, self.folder = model, texts.plan_shards(2), folder
        self.writer = self.open()
        (folder / "here.shared.tmp").touch()

    def open(self) -> Any:
        output = Output(self.folder, shard_size=2)
        return ENCODING.create_job(
            self.model,
            {},
            output,
            lambda: Provenance(texts_sha256=self.survey.sha256),
        ).open_writer(writes_manifest=True)

    def worker(self, **other: Any) -> Worker:
        made: dict[str, Any] = {
            "encoding": ENCODING,
            "load": lambda: self.model,
            "output": Output(self.folder, shard_size=2),
            "identity": self.writer.manifest.identity,
            "beacon": "here.shared.tmp",
            "threads": 1,
        }
        return Worker(WorkerConfig(**made | other))

    def same(self, alone: Path) -> bool:
        (self.folder / "here.shared.tmp").unlink()
        return ray_killed.same_files(self.folder, alone)

    def ask(self, worker: Worker, *numbers: int) -> list[str]:
        """What a worker says after being given shards: their problems."""
        rows = worker({"shards": [[self.survey.ranges[number] for number in numbers]]})
        assert rows["number"] == list(numbers)
        return rows["problem"]


@pytest.fixture
def held(splade: Any, tmp_path: Path) -> Held:
    return Held(splade, tmp_path / "v", InMemoryTexts(TEXTS))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilefold.retrieval.encoding.on_ray.APPEAR_SECONDS", 0.1)


@pytest.mark.slow  # starts Ray twice; the tests below call its workers without it
@pytest.mark.filterwarnings("default")  # Ray leaves files and sockets to the collector of garbage
def test_after_kills_the_bytes_are_those_of_one_process(
    saved: Path,
    tmp_path: Path,
    monkeypatch: Any,
) -> None:
    ray, output = pytest.importorskip("ray"), tmp_path / "vectors"
    assert 0 < ray_killed.killed(saved, output) < 26, "it was killed on its way"
    ray_killed.encode_alone(saved, tmp_path / "alone")
    monkeypatch.setenv("TILEFOLD_COMMAND", str(os.getpid()))
    load = functools.partial(
        ray_killed.load_and_die_once,
        str(saved),
        str(output),
        str(tmp_path / "died"),
    )
    manifest = ray_killed.run(load, output)
    assert not ray.is_initialized(), "what was started is ended"
    assert (tmp_path / "died").exists(), "a worker has died"
    assert manifest.failed == {
        "number": "expected a string, got int",
        "nothing": "expected a string, got NoneType",
    }
    assert manifest.n_texts == 202 and manifest.n_documents == 200
    assert ray_killed.same_files(output, tmp_path / "alone")


def test_shards_come_in_any_order_and_a_single_process_takes_them(
    held: Held,
    alone: Path,
    splade: Any,
) -> None:
    assert held.ask(held.worker(), 4, 1) == ["", ""]
    assert held.writer.register_received([4, 1]) == {4, 1}
    assert held.writer.manifest.shards == [], "none is listed before the first"
    encode_collection(splade, TEXTS, held.folder, top_k=20, batch_size=2, shard_size=2)
    assert held.same(alone)


def test_after_a_kill_of_the_command_what_has_a_receipt_is_not_written_again(
    held: Held,
    alone: Path,
) -> None:
    held.ask(held.worker(), 0, 1, 3)
    again = held.open()
    assert [again.reuse_shard(number) for number in range(5)] == [True, True, False, True, False]
    assert len(again.manifest.shards) == 2, "the others are listed when none is missing before them"
    times = {file: file.stat().st_mtime_ns for file in held.folder.glob("part-*.parquet")}
    held.ask(worker := held.worker(), 2, 3, 4)
    assert again.register_received([2, 3, 4]) == {2, 3, 4}
    assert {file: file.stat().st_mtime_ns for file in times} == times
    held.ask(worker, 1)  # on a machine that Ray has given up
    again.finish(len(TEXTS))
    assert held.same(alone)
    (problem,) = held.ask(worker, 1)
    assert "the command has ended" in problem and not list(held.folder.glob("*.receipt.json"))


def test_receipts_of_other_settings_or_half_written_files_count_for_nothing(
    held: Held,
    splade: Any,
) -> None:
    held.ask(held.worker(), 0, 1)
    file = held.folder / "part-00001.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    assert held.writer.register_received([0, 1]) == {0}
    held.writer.manifest.settings["shard_size"] = 3
    assert held.writer.register_received([1]) == set()
    refused(
        DataError,
        "top_k: 20 before, 5 now",
        encode_collection,
        splade,
        TEXTS,
        held.folder,
        top_k=5,
        shard_size=2,
    )
    encode_collection(splade, TEXTS, held.folder, top_k=5, shard_size=2, resume=False)
    assert not list(held.folder.glob("*.receipt.json"))


def test_a_shard_that_was_damaged_is_written_again_apart(held: Held, alone: Path) -> None:
    held.ask(held.worker(), 0, 1, 2, 3, 4)
    held.writer.register_received(range(5))
    (held.folder / "part-00002.parquet").write_bytes(b"damaged")
    again = held.open()
    assert not again.reuse_shard(2)
    held.ask(held.worker(), 2)
    again.register_received([2])
    refused(DataError, "expected 10 texts, got 8 rows and 1 errors", again.finish, 10)
    assert not read_manifest(held.folder).complete
    again.finish(len(TEXTS))
    assert held.same(alone)


def test_a_machine_that_does_not_have_what_the_command_has_is_told(held: Held) -> None:
    identity = held.writer.manifest.identity | {"model_fingerprint": "0" * 64}
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        (
            {"beacon": "elsewhere.shared.tmp"},
            f"{held.folder}: on the machine",
        ),
        ({"beacon": "elsewhere.shared.tmp"}, "that all machines share"),
        (
            {"identity": identity},
            "would encode something else (model_fingerprint: another model, or other weights)",
        ),
        (
            {"load": lambda: Path("no such model").read_bytes()},
            "FileNotFoundError: [Errno 2] No such file",
        ),
    )
    for other, message in cases:
        (problem,) = held.ask(held.worker(**other), 0)
        assert message in problem and not list(held.folder.glob("part-*"))


def test_texts_that_end_their_worker_every_time_end_the_command(held: Held) -> None:
    (held.folder / f"00002{ATTEMPTS_SUFFIX}").write_text(str(MAX_ATTEMPTS))
    problem, _ = held.ask(held.worker(), 2, 3)
    assert "shards 2 to 3 have killed 5 workers" in problem and "'d4' to 'd5'" in problem
    assert held.ask(held.worker(), 0) == [""], "others go on"
    assert not (held.folder / f"00000{ATTEMPTS_SUFFIX}").exists()


def test_when_every_text_of_a_shard_fails_the_model_is_at_fault(
    splade: Any,
    tmp_path: Path,
) -> None:
    texts: dict[str, Any] = dict.fromkeys(map(str, range(40)), 5)
    held = Held(splade, tmp_path / "v", InMemoryTexts(texts))
    assert held.ask(held.worker(), 0) == [""], "two texts may be wrong"
    held.survey = InMemoryTexts(texts).plan_shards(20)
    (problem,) = held.ask(held.worker(), 1)
    assert "all 20 of shard 1 failed; the first is '20' (expected a string, got int)" in problem


@pytest.fixture
def table(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    rows = [f'{{"_id": "d{i}", "title": "t{i}", "text": "cats sleep {i}"}}\n' for i in range(7)]
    (folder / "a.jsonl").write_text("".join([*rows[:3], "\n"]), encoding="utf-8")
    (folder / "b.jsonl").write_text("".join(rows[3:]), encoding="utf-8")
    return folder


def test_rows_of_a_table_are_read_by_ranges_that_go_over_files(table: Path) -> None:
    from tilefold.retrieval import load_documents
    from tilefold.retrieval.common.provenance import texts_digest

    survey = FileTexts(table).plan_shards(2, sample=2)
    texts = {name: document.contents for name, document in load_documents(table).items()}
    assert (
        survey.count == 7 and survey.sha256 == texts_digest(texts) and 2 <= len(survey.sample) < 4
    )
    parts = [part.read() for part in survey.ranges]
    assert [len(part) for part in parts] == [2, 2, 2, 1]
    assert {name: text for part in parts for name, text in part.items()} == texts
    assert [len(part.row_ranges) for part in survey.ranges] == [1, 2, 1, 1]
    with (table / "b.jsonl").open("a", encoding="utf-8") as stream:
        stream.write('{"_id": "d1", "text": "again"}\n')
    refused(DataError, r"b.jsonl:5: '_id' 'd1' is a duplicate", FileTexts(table).plan_shards, 2)


def test_parquet_and_saved_datasets_are_read_by_ranges(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"_id": f"d{i}", "text": f"cats {i}"} for i in range(7)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet", row_group_size=2)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "rows.parquet", tmp_path / "saved"):
        read = [name for part in FileTexts(path).plan_shards(3).ranges for name in part.read()]
        assert read == [f"d{i}" for i in range(7)]


def test_a_table_that_changes_while_it_is_encoded_is_refused(
    table: Path,
    splade: Any,
    tmp_path: Path,
) -> None:
    held = Held(splade, tmp_path / "v", FileTexts(table))
    text = (table / "b.jsonl").read_text(encoding="utf-8")
    (table / "b.jsonl").write_text(text.replace("sleep 5", "wake 5"), encoding="utf-8")
    assert held.ask(held.worker(), 0, 1) == ["", ""]
    (problem,) = held.ask(held.worker(), 2)
    assert (
        "b.jsonl: from row 2 on, the 2 rows differ from those that were read at the beginning"
        in problem
    )


def refusal(tmp_path: Path, cluster: RayCluster, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        encode_on_ray(lambda: None, TEXTS, tmp_path / "v", ENCODING, cluster=cluster)
    assert not (tmp_path / "v").exists()
    return str(caught.value)


def test_a_ray_that_is_missing_and_wrong_sizes_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray.data", None)
    assert "pip install 'tilefold[ray]'" in refusal(tmp_path, RayCluster(), MissingPackageError)
    for wrong in ({"workers": 0}, {"worker_cpus": 0}, {"worker_gpus": -1}):
        refused(ValueError, "expected at least", RayCluster, **wrong)


def test_a_cluster_that_does_not_answer_is_named_with_the_time_waited(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"  # nothing listens there
        message = refusal(tmp_path, RayCluster(address, patience=0.3), ClusterError)
    seconds = re.search(rf"no answer from {address} after (\d+) s", message)
    assert seconds is not None, message
    assert int(seconds[1]) < RayCluster(address).patience
    assert "ray start --head" in message
    assert "ray job submit" in refusal(tmp_path, RayCluster("ray://here:1"), ValueError)
    assert "expected host:port" in refusal(tmp_path, RayCluster("here"), ValueError)
