"""Processes that are killed at random moments leave the old or the new index, and lose nothing.

``TILEFOLD_KILLS`` sets the number of kills, for example ``TILEFOLD_KILLS=100``.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import programs
from tests.cli.program import run_steps
from tests.processes import environment
from tests.recipes.small import small_masked_lm
from tests.serve.running import Client, served
from tests.waiting import WAIT_SECONDS, wait_until
from tilefold.retrieval.index.checking import check_index
from tilefold.retrieval.index.generations import part_folders
from tilefold.retrieval.index.opening import open_index
from tilefold.retrieval.index.protocol import read_description

N_KILLS = int(os.environ.get("TILEFOLD_KILLS", "14"))
ADMIN_KEY = "open sesame"
# When a command is killed, as parts of the time that it takes. It changes the index at its end.
KILL_MOMENTS = (0.3, 1.2)
# Time during which a server takes documents before it is killed.
SERVED_SECONDS = 3.0
Files = dict[str, bytes]


def files_of(index: Path) -> Files:
    """Return path in the index -> content, of all files that its current generation has."""
    names = ["index.json"]
    if (index / "segments" / "current.json").exists():
        names.append("segments/current.json")
    for folder in part_folders(index):
        part = folder.relative_to(index)
        names.append(str(part / "index.json"))
        names += [str(part / name) for name in read_description(folder)["files"]]
    return {name: (index / name).read_bytes() for name in names}


@dataclass(frozen=True)
class Change:
    """A command that changes an index by one commit.

    Attributes:
        name: name of the change.
        folder: folder that has the index ``live`` before the change, with what belongs to it.
        arguments: words of the command after ``tilefold``.
        next_arguments: words of a command that must work after it.
        old: the files of the index before the change.
        new: the files of the index after it.
        seconds: time that the command takes without a kill.
    """

    name: str
    folder: Path
    arguments: tuple[str, ...]
    next_arguments: tuple[str, ...]
    old: Files
    new: Files
    seconds: float

    @classmethod
    def measure(
        cls,
        name: str,
        folder: Path,
        *arguments: str | Path,
        next_arguments: tuple[str, ...] = (),
    ) -> Change:
        """Let a command change a copy of a folder.

        Args:
            name: name of the change.
            folder: folder with the index. The copy, with the changed index, is ``after-NAME``.
            arguments: words of the command after ``tilefold``. They name the index as ``live``.
            next_arguments: words of a command that must work after it; by default the same command.
        """
        words = tuple(map(str, arguments))
        after = folder.with_name(f"after-{name}")
        shutil.copytree(folder, after)
        started = time.monotonic()
        run_command(words, after)
        seconds = time.monotonic() - started
        return cls(
            name,
            folder,
            words,
            next_arguments or words,
            files_of(folder / "live"),
            files_of(after / "live"),
            seconds,
        )

    def kill(self, folder: Path, generator: random.Random) -> str:
        """Kill the command at a random moment, and check what it leaves.

        Args:
            folder: a folder for a copy of the index.
            generator: chooses the moment.

        Returns:
            Which index it has left: ``"old"`` or ``"new"``.
        """
        shutil.copytree(self.folder, folder)
        command = ("-m", "tilefold.cli", *self.arguments)
        with programs.start(*command, env=environment(), cwd=folder) as process:
            with suppress(subprocess.TimeoutExpired):
                process.wait(generator.uniform(*KILL_MOMENTS) * self.seconds)
            process.kill()
        left_files = files_of(folder / "live")
        assert left_files in (self.old, self.new), self.name
        left = "new" if left_files == self.new else "old"
        if left == "old":
            run_command(self.arguments, folder)
            assert files_of(folder / "live") == self.new, self.name
        else:
            run_command(self.next_arguments, folder)
        check = check_index(folder / "live")
        assert check.is_intact, (self.name, check.damage)
        shutil.rmtree(folder)
        return left


def run_command(arguments: tuple[str, ...], folder: Path) -> None:
    """Run a command of tilefold in a folder, which must succeed."""
    outcome = programs.run("-m", "tilefold.cli", *arguments, env=environment(), cwd=folder)
    assert outcome.returncode == 0, outcome.stderr


@pytest.fixture(scope="module")
def changes(
    shared: Path,
    masked_lm: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Change]:
    """An update, a deletion, a merge, a migration, its cut-over, and its rollback."""
    folder = tmp_path_factory.mktemp("changes")
    data = shared / "data"
    # The first process takes longer, because it imports the libraries of all others.
    run_command(("info",), folder)
    new_model = small_masked_lm(tmp_path_factory.mktemp("new-model"), seed=1)
    new_documents = folder / "new.jsonl"
    lines = [json.dumps({"_id": f"n{i}", "title": "", "text": f"kettle {i}"}) for i in range(8)]
    lines.append(json.dumps({"_id": "d3", "title": "", "text": "another text"}))
    new_documents.write_text("\n".join(lines), encoding="utf-8")
    deleted = folder / "deleted.txt"
    deleted.write_text("d1\nd2\n", encoding="utf-8")
    vectors = folder / "new-vectors"
    encode = ("encode", "--model", masked_lm, "--data", new_documents, "--output", vectors)
    run_steps((*encode, "--top-k", "64"))
    before = folder / "before"
    shutil.copytree(shared / "index", before / "live")
    to_live = ("--output", "live")
    update = Change.measure("update", before, "index", "--update", "--vectors", vectors, *to_live)
    updated = folder / "after-update"
    migrate = ("migrate", "--index", "live", "--share", "1")
    start = (*migrate, "--model", new_model, "--data", data, "--top-k", "64")
    migration = Change.measure("migration", before, *start)
    assert migration.new == migration.old  # the index that is searched stays
    cut_over = Change.measure("cut-over", folder / "after-migration", *start, "--cut-over")
    exchanged = folder / "after-cut-over"
    rollback = Change.measure(
        "rollback",
        exchanged,
        *("migrate", "--index", "live", "--rollback"),
        next_arguments=("migrate", "--index", "live", "--discard"),
    )
    return [
        update,
        Change.measure("deletion", updated, "index", "--delete", deleted, *to_live),
        Change.measure("merge", updated, "index", "--merge", *to_live),
        migration,
        cut_over,
        rollback,
    ]


class KilledServer:
    """A server that takes documents over HTTP and is killed again and again.

    Attributes:
        index: the folder of its index.
        acknowledged: ids of the documents that the server has accepted.
    """

    def __init__(self, index: Path, model: str) -> None:
        self.index = index
        self.acknowledged: set[str] = set()
        key = index.with_name("key.txt")
        key.write_text(ADMIN_KEY, encoding="utf-8")
        self._options = ("--model", model, "--index", index, "--admin-key-file", key)
        self._n_sent = 0

    def kill(self, generator: random.Random) -> None:
        """Put documents, kill the server at a random moment, and check the index.

        Args:
            generator: chooses the moment.
        """
        with served(*self._options) as (process, client, _):
            self._check_acknowledged(client)
            ends = time.monotonic() + generator.uniform(0.0, SERVED_SECONDS)
            while time.monotonic() < ends:
                self._put(client)
                time.sleep(generator.uniform(0.0, 0.1))
            process.kill()
            process.wait(WAIT_SECONDS)
        check = check_index(self.index)
        assert check.is_intact, check.damage

    def check(self) -> None:
        """Check that another server has written all acknowledged documents."""
        with served(*self._options) as (_, client, _):
            self._check_acknowledged(client)

    def _put(self, client: Client) -> None:
        """Put a document, and note its id if the server accepts it."""
        document_id = f"put{self._n_sent}"
        self._n_sent += 1
        reply = client.request(
            "PUT",
            "/documents",
            json.dumps({"documents": [{"id": document_id, "text": "a parcel"}]}).encode(),
            content_type="application/json",
            authorization=f"Bearer {ADMIN_KEY}",
        )
        if reply.status in (200, 202):  # 409 while a process of the killed server changes the index
            self.acknowledged.add(document_id)

    def _check_acknowledged(self, client: Client) -> None:
        """Wait until all accepted documents are written, and compare them with the index."""

        def is_written() -> bool:
            reply = client.request("GET", "/documents", authorization=f"Bearer {ADMIN_KEY}")
            return bool(reply.json["pending"] == 0)

        wait_until(is_written)
        index = open_index(self.index)
        ids = set(index.ids)
        assert self.acknowledged <= ids
        # What the server had not acknowledged is there completely or not at all.
        sent = {f"put{number}" for number in range(self._n_sent)}
        assert ids - sent == {f"d{number}" for number in range(16)}


@pytest.mark.slow
def test_random_kills_leave_the_old_or_the_new_index_and_every_acknowledged_document(
    changes: list[Change],
    shared: Path,
    masked_lm: str,
    tmp_path: Path,
) -> None:
    generator = random.Random(0)  # noqa: S311 - not for cryptography
    index = Path(shutil.copytree(shared / "index", tmp_path / "served"))
    server = KilledServer(index, masked_lm)
    outcomes: Counter[str] = Counter()

    def kill_server() -> str:
        server.kill(generator)
        return "intact"

    kills: dict[str, Callable[[], str]] = {"server": kill_server}
    for change in changes:
        kills[change.name] = lambda change=change: change.kill(tmp_path / "copy", generator)
    for number in range(N_KILLS):
        name = list(kills)[number % len(kills)]
        outcomes[f"{name}: {kills[name]()}"] += 1
    server.check()
    summary = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
    # Shown by `pytest -s`.
    print(f"{N_KILLS} kills; {summary}; {len(server.acknowledged)} acknowledged documents")  # noqa: T201
