"""Folders of shards with a manifest: written atomically, resumable, checked when read."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import ClassVar, Generic, Protocol, TypeVar, get_origin, get_type_hints

from tilefold._internal import files as _files
from tilefold._internal.arguments import ArgumentError, path_of
from tilefold._internal.files import (
    LOCK,
    atomic_file,
    lock_folder,
    remove_leftovers,
    sha256_file,
    unlock_folder,
)
from tilefold.pipeline.truncation import Truncation
from tilefold.retrieval.common.files import (
    Json,
    check_folder,
    listed_file,
    read_json_object,
    require,
    write_json_object,
)
from tilefold.retrieval.common.provenance import Provenance, joined_precisions
from tilefold.retrieval.errors import DataError

MANIFEST_NAME = "manifest.json"
_EXPECTED = "a folder of vectors, as tilefold encode writes it"
REMEDY = "Write the vectors again (tilefold encode)."
SCHEMA_VERSION = 1
RECEIPTS = "part-*.receipt.json"
_START_AGAIN = "resume=False (--fresh)"
# If every text of a shard of at least this size fails, the model is at fault, not the texts.
MIN_ALL_FAILED = 16
_TRUNCATION_TYPES = {"count": int, "max_length": int | None}


@dataclass(kw_only=True)
class Manifest:
    """The manifest of a folder of vectors, with the fields that all kinds of vectors share.

    The subclasses :class:`tilefold.retrieval.VectorManifest` and ``TokenManifest`` describe the
    fields. In the file, the fields of a subclass come first.

    Attributes:
        LAYOUT: name of the kind of vectors.
        CONTENTS: the kind of vectors in words, for errors.
        OTHER_KIND_REMEDY: what to do with a folder of another kind.
        IDENTITY: fields that, with the settings, decide whether a run may be resumed.
        TOTALS: field -> the field of shards of which it is the sum.
    """

    LAYOUT: ClassVar[str]
    CONTENTS: ClassVar[str]
    OTHER_KIND_REMEDY: ClassVar[str]
    IDENTITY: ClassVar[tuple[str, ...]]
    TOTALS: ClassVar[dict[str, str]] = {"n_documents": "rows"}

    n_documents: int = 0
    shards: list[Json] = field(default_factory=list)
    settings: Json = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    partial: Json = field(default_factory=dict)
    truncated: dict[str, int | None] = field(default_factory=dict)
    complete: bool = False
    n_texts: int | None = None
    layout: str = ""
    schema_version: int = SCHEMA_VERSION

    @classmethod
    def read(cls: type[M], folder: Path) -> M:
        """Read the manifest of a folder.

        Raises:
            FileNotFoundError: if there is none.
            DataError: if it is damaged, of another kind of vectors, or inconsistent.
        """

        def refused(problem: str) -> DataError:
            return DataError(f"{folder / MANIFEST_NAME}: expected {problem}. {REMEDY}")

        check_folder(folder, MANIFEST_NAME, _EXPECTED)
        value = read_json_object(folder / MANIFEST_NAME, REMEDY)
        layout = value.get("layout", "sparse")
        if layout != cls.LAYOUT:
            got = f"{layout} vectors"
            if layout == "tokens":
                got = "token vectors of a multi-vector model"
            raise DataError(
                f"{folder}: expected {cls.CONTENTS}, got {got}. {cls.OTHER_KIND_REMEDY}",
            )
        version = value.get("schema_version")
        if version != SCHEMA_VERSION:
            raise refused(f"schema_version {SCHEMA_VERSION}, got {version!r}")
        types = {name: kind for name, kind in get_type_hints(cls).items() if name.islower()}
        try:
            manifest = cls(**{name: item for name, item in value.items() if name in types})
        except TypeError as error:
            raise refused(f"a manifest of vectors, got {[*value]!r:.80} ({error})") from error
        wrong = manifest.wrong(types)
        if wrong:
            raise refused(f"a manifest of vectors, got fields of other types ({', '.join(wrong)})")
        rows = sum(shard["rows"] for shard in manifest.shards)
        failed = len(manifest.failed)
        if rows != manifest.n_documents:
            raise refused(
                f"{manifest.n_documents} rows, as n_documents says, got shards with {rows}",
            )
        if manifest.complete and manifest.n_texts not in (None, rows + failed):
            raise refused(
                f"{manifest.n_texts} texts, as n_texts says, got {rows} rows and {failed} failed",
            )
        return manifest

    @property
    def provenance(self) -> Provenance:
        """Model, texts and precision, as far as they are known."""
        return replace(Provenance.from_dict(self.identity), precision=self.precision)

    @property
    def precision(self) -> str | None:
        """Number types in which the model computed the shards, such as "bf16".

        It is None if they are unknown.
        """
        entries = [*self.shards, self.partial]
        return joined_precisions(entry.get("precision") for entry in entries)

    def to_dict(self) -> Json:
        """The JSON object in the file."""
        values = asdict(self)
        shared = [item.name for item in fields(Manifest)]
        specific = [name for name in values if name not in shared]
        return {name: values[name] for name in (*specific, *shared)}

    @property
    def identity(self) -> Json:
        """Settings that decide whether a run may be resumed, by name."""
        return {name: getattr(self, name) for name in self.IDENTITY} | self.settings

    def wrong(self, types: Mapping[str, type | UnionType]) -> list[str]:
        """Return the names of fields that have a wrong type, or entries of wrong types.

        Args:
            types: name of a field -> its type.

        Returns:
            The names; empty for a valid manifest.
        """
        wrong = [
            name
            for name, expected in types.items()
            if not isinstance(getattr(self, name), _class_of(expected))
        ]
        if wrong:
            return wrong
        shard_types = {"file": str, "sha256": str, **dict.fromkeys(self.TOTALS.values(), int)}
        for shard in self.shards:
            if not (_has(shard, shard_types) and _is_truncation(shard.get("truncated", {}))):
                return ["shards"]
        for truncated in (self.truncated, self.partial.get("truncated", {})):
            if not _is_truncation(truncated):
                return ["truncated"]
        return []


M = TypeVar("M", bound=Manifest)


def layout_of(folder: Path) -> str:
    """Return the kind of the vectors in a folder: ``"sparse"``, ``"tokens"`` or ``"dense"``."""
    check_folder(folder, MANIFEST_NAME, _EXPECTED)
    return str(read_json_object(folder / MANIFEST_NAME, REMEDY).get("layout", "sparse"))


class Vectors(Protocol):
    """Vectors with ids, of any kind, that can be stored in shards."""

    ids: list[str]

    def __len__(self) -> int: ...
    def take(self: V, rows: Sequence[int]) -> V: ...
    @classmethod
    def concatenate(cls: type[V], parts: Sequence[V]) -> V: ...


V = TypeVar("V", bound=Vectors)


@dataclass(frozen=True)
class PartialShard(Generic[V]):
    """The finished part of an unfinished shard.

    Attributes:
        vectors: rows of the texts that were encoded.
        failed: id -> reason, of texts that could not be encoded.
        cut: how many texts were truncated.
    """

    vectors: V
    failed: Mapping[str, str]
    cut: Truncation


@dataclass(frozen=True)
class Receipt:
    """A file about a shard that is written, but not yet listed in the manifest.

    It is written by a process that does not hold the lock of the folder.

    Attributes:
        key: :attr:`ShardWriter.key` of the folder that the shard belongs to.
        size: bytes of the shard's file.
        shard: the entry of the shard for the manifest.
        failed: id -> reason, of texts that could not be encoded.
    """

    key: str
    size: int
    shard: Json
    failed: dict[str, str]

    @staticmethod
    def file_of(folder: Path, number: int) -> Path:
        """Return the path of the receipt of shard `number`."""
        return folder / RECEIPTS.replace("*", f"{number:05d}")

    @classmethod
    def read(cls, folder: Path, number: int, key: str) -> Receipt | None:
        """Read the receipt of a shard.

        Args:
            folder: folder of the vectors.
            number: number of the shard.
            key: key of the folder, which the receipt must have (:attr:`ShardWriter.key`).

        Returns:
            The receipt, or None if there is none with this key, or the shard's file is missing or
            of another size.
        """
        values = _files.read_json(cls.file_of(folder, number))
        names = {item.name for item in fields(cls)}
        if values is None or values.get("key") != key or set(values) != names:
            return None
        receipt = cls(**values)
        file = folder / str(receipt.shard["file"])
        if not file.is_file() or file.stat().st_size != receipt.size:
            return None
        return receipt


def check_not_all_failed(
    number: int, rows: int, failed: Mapping[str, str], *, nothing_yet: bool
) -> None:
    """Raise ``DataError`` if all texts of a shard failed, because then the model is at fault.

    A few failed texts are not an error. They are listed in the manifest.

    Args:
        number: number of the shard.
        rows: number of texts of the shard that were encoded.
        failed: id -> reason, of texts that could not be encoded.
        nothing_yet: whether no earlier shard has rows. Then shards of less than 16 texts raise the
            error too.
    """
    if failed and not rows and (len(failed) >= MIN_ALL_FAILED or nothing_yet):
        name, reason = next(iter(failed.items()))
        raise DataError(
            f"texts: all {len(failed)} of shard {number} failed, {name!r} first ({reason}). "
            "Check the model; earlier shards are kept.",
        )


def _check_unfinished(folder: Path, earlier: Manifest, manifest: Manifest) -> None:
    """Raise ``FileExistsError`` unless an interrupted run with the same settings left `earlier`."""
    if not earlier.complete and earlier.identity == manifest.identity:
        return
    state = "" if earlier.complete else "an unfinished run of "
    raise FileExistsError(
        f"{folder}: expected a new or empty folder, got one with {state}{earlier.n_documents} "
        "vectors. Choose another folder, or replace them (overwrite=True or --overwrite); "
        "nothing was overwritten.",
    )


def _key_of(manifest: Manifest) -> str:
    """Return the SHA-256 of the settings in a manifest."""
    return hashlib.sha256(json.dumps(manifest.identity, sort_keys=True).encode()).hexdigest()


class ShardWriter(ABC, Generic[M, V]):
    """Base class of writers of a folder of vectors, which one process at a time may use.

    Writers in other processes, with ``lists=False``, may leave shards by :meth:`leave_shard`. The
    writer that holds the folder lists them by :meth:`receive`. The others neither check nor change
    anything until a shard is stored.

    Args:
        path: the folder.
        manifest: that of a new folder, without shards.
        resume: keep the shards of an earlier run with the same settings.
        lists: whether this writer lists the shards in the manifest.
        precision: number type in which the model computes what is written, such as ``"bf16"``;
            None if unknown.
        overwrite: without `resume`, replace any vectors in the folder. By default only the shards
            of an interrupted run with the same settings are removed.

    Raises:
        DataError: with `resume`, if the folder holds vectors with other settings.
        FileExistsError: if the folder holds other files, or without `resume` and `overwrite` other
            or finished vectors.
    """

    suffix: ClassVar[str]
    package: ClassVar[tuple[str, str, str]]  # arguments of :func:`require`
    manifest_type: ClassVar[type[Manifest]]

    def __init__(
        self,
        path: str | Path,
        manifest: M,
        *,
        resume: bool = False,
        lists: bool = True,
        overwrite: bool = False,
        precision: str | None = None,
    ) -> None:
        """Open the folder, and lock it if this writer lists shards. See the class."""
        require(*self.package)
        self.precision = precision
        if not isinstance(manifest, self.manifest_type):
            got = type(manifest).__name__
            raise TypeError(
                f"manifest: expected a {self.manifest_type.__name__}, got {got}. Make one for "
                "these vectors.",
            )
        self.path = path_of("path", path)
        self._manifest_type = type(manifest)
        self._received: dict[int, Receipt] = {}
        if not lists:
            self.manifest = manifest
            return
        if manifest.shards or manifest.partial or manifest.complete:
            got = f"one that lists {len(manifest.shards)} shard(s)"
            raise ArgumentError(
                "manifest",
                f"expected that of a new folder, got {got}. Make a new one with its settings.",
            )
        replace = overwrite and not resume
        self._earlier(replace=replace)  # refuses a foreign folder before anything is written there
        self._lock = lock_folder(self.path)
        try:
            self._open(manifest, resume=resume, overwrite=overwrite)
        except BaseException:
            if self._lock.lock_counter == 1:
                unlock_folder(self._lock)
            else:  # another writer of this process goes on
                self._lock.release()
            raise

    def _open(self, manifest: M, *, resume: bool, overwrite: bool) -> None:
        """Resume the vectors that the folder has, or remove them if that is allowed.

        Args:
            manifest: manifest of the new run.
            resume: keep the shards of an earlier run with the same settings.
            overwrite: without `resume`, remove any earlier vectors. By default only those of an
                interrupted run with the same settings are removed.
        """
        earlier = self._earlier(replace=overwrite and not resume)
        receipt_files = list(self.path.glob(RECEIPTS))
        if earlier is not None and not (earlier.shards or earlier.partial or receipt_files):
            earlier = None  # nothing to resume or to lose, whatever the settings
        resume = resume and earlier is not None
        if earlier is not None and resume:
            self._check_same_settings(earlier, manifest)
            self._check_precision(earlier)
            manifest = earlier
        elif earlier is not None and not overwrite:
            _check_unfinished(self.path, earlier, manifest)
        self.manifest = manifest
        if not resume:
            self.path.mkdir(parents=True, exist_ok=True)
            self._save()
            for stale in (*self.path.glob(f"part-*.{self.suffix}"), *receipt_files):
                stale.unlink(missing_ok=True)
        remove_leftovers(self.path)
        if resume:
            self.receive()

    def _check_same_settings(self, earlier: M, manifest: M) -> None:
        """Raise ``DataError`` unless an earlier run had the settings of this one.

        Args:
            earlier: manifest of the earlier run.
            manifest: manifest of this run.
        """
        changed = differences(earlier.identity, manifest.identity, "before", "now")
        if not changed:
            return
        remedy = f"Go on with the former ones, choose another folder, or take {_START_AGAIN}."
        if earlier.identity.get("texts_sha256") != manifest.identity.get("texts_sha256"):
            remedy += (
                " To add documents, encode the new ones alone into another folder, and put "
                "them into the index (tilefold index --update)."
            )
        raise DataError(f"{self.path}: holds vectors with other settings ({changed}). {remedy}")

    def _check_precision(self, earlier: M) -> None:
        """Raise ``DataError`` if an unfinished folder was computed in another precision.

        Shards that have a receipt and are not listed yet count, too.

        Args:
            earlier: manifest of the earlier run, with the settings of this one.
        """
        precisions = [earlier.precision]
        for number in self._numbers_of_receipts():
            receipt = Receipt.read(self.path, number, _key_of(earlier))
            if receipt is not None:
                precisions.append(receipt.shard.get("precision"))
        stored_precision = joined_precisions(precisions)
        are_known = None not in (stored_precision, self.precision)
        if are_known and stored_precision != self.precision and not earlier.complete:
            raise DataError(
                f"{self.path}: holds vectors that were computed in {stored_precision}, and here "
                f"the model computes in {self.precision}, which gives other scores. Go on on a "
                f"machine like the former one, choose another folder, or take {_START_AGAIN}.",
            )

    def listed(self) -> M:
        """Read the manifest on disk, which another process may have written."""
        return self._manifest_type.read(self.path)

    @abstractmethod
    def _check(self, vectors: V) -> None:
        """Raise an error for vectors that do not belong into this folder."""

    @abstractmethod
    def _counts(self, vectors: V) -> dict[str, int]:
        """Return the numbers that the manifest lists of a shard, such as its rows."""

    @abstractmethod
    def _store(self, vectors: V, path: Path) -> None:
        """Write the file of a shard."""

    @abstractmethod
    def _read(self, path: Path) -> V:
        """Read the file of a shard."""

    def _earlier(self, *, replace: bool) -> M | None:
        """Read the manifest of an earlier run in the folder.

        Args:
            replace: whether vectors in the folder may be replaced. Then a damaged manifest counts
                as none, because it could not be resumed.

        Returns:
            The manifest, or None if the folder is new or has at most temporary files and locks.

        Raises:
            DataError: for vectors of another kind and, without `replace`, a damaged manifest.
            FileExistsError: for a file, or a folder with other files.
        """
        if self.path.is_file():
            raise FileExistsError(f"{self.path}: expected a folder for vectors, got a file.")
        if (self.path / MANIFEST_NAME).exists():
            try:
                return self.listed()
            except DataError:
                if replace and self._may_hold_this_kind():
                    return None
                raise
        if self.path.exists() and any(
            not entry.name.endswith((".tmp", LOCK)) for entry in self.path.iterdir()
        ):
            expected = "expected a new folder or one with vectors, got one with other files"
            raise FileExistsError(
                f"{self.path}: {expected}. Choose another path; nothing was overwritten.",
            )
        return None

    def _may_hold_this_kind(self) -> bool:
        """Whether a folder with a damaged manifest holds vectors of this writer's kind.

        If the manifest cannot be read at all, the files of its shards decide.
        """
        try:
            return layout_of(self.path) == self._manifest_type.LAYOUT
        except DataError:
            shards = [path for path in self.path.glob("part-*") if path.suffix != ".json"]
            return all(path.suffix == f".{self.suffix}" for path in shards)

    def has_shard(self, number: int) -> bool:
        """Whether shard `number` is listed or received, and its file is unchanged.

        A received shard whose file has changed is forgotten, so that it is written again.
        """
        if number < len(self.manifest.shards):
            shard = self.manifest.shards[number]
        elif number in self._received:
            shard = self._received[number].shard
        else:
            return False
        file = self.path / str(shard["file"])
        if file.is_file() and sha256_file(file) == shard["sha256"]:
            return True
        self._received.pop(number, None)
        return False

    @property
    def key(self) -> str:
        """SHA-256 of the settings of the folder, by which receipts are recognised."""
        return _key_of(self.manifest)

    def _numbers_of_receipts(self) -> list[int]:
        """Return the numbers of the shards that have a receipt in the folder."""
        return [int(file.name.split("-")[1].split(".")[0]) for file in self.path.glob(RECEIPTS)]

    def receive(self, numbers: Iterable[int] | None = None) -> set[int]:
        """Read receipts of shards, and list these shards as far as no earlier one is missing.

        Other processes write a shard with a receipt (:meth:`leave_shard`). The manifest lists
        shards in order, so a shard waits in memory until all earlier ones are listed.

        Args:
            numbers: shards whose receipts are read; all receipts in the folder by default.

        Returns:
            Numbers of the shards that have a receipt, and whose texts did not all fail.
        """
        if numbers is None:
            numbers = self._numbers_of_receipts()
        receipts: dict[int, Receipt] = {}
        for number in numbers:
            receipt = Receipt.read(self.path, number, self.key)
            if receipt and (receipt.shard["rows"] or len(receipt.failed) < MIN_ALL_FAILED):
                receipts[number] = receipt
        self._received.update(receipts)
        for number in sorted(receipts):
            if number < len(self.manifest.shards):  # written again
                self.list_shard(number, receipts[number].shard, receipts[number].failed)
        self._list_received()
        return set(receipts)

    def _list_received(self) -> None:
        """List received shards, as long as the next one is there."""
        number = len(self.manifest.shards)
        while number in self._received:
            receipt = self._received[number]
            self._list_one(number, receipt.shard, receipt.failed)
            number += 1

    def read_partial(self, number: int) -> PartialShard[V] | None:
        """Read the finished part of a shard that :meth:`write_partial` stored.

        Args:
            number: number of the shard.

        Returns:
            The part, or None if there is none of this shard or its file has changed.
        """
        partial = self.manifest.partial
        file = self.path / str(partial.get("file"))
        if partial.get("shard") != number or not file.is_file():
            return None
        try:
            if sha256_file(file) != partial["sha256"]:
                return None
            return PartialShard(
                self._read(file),
                dict(partial["failed"]),
                _truncation(partial) or Truncation(),
            )
        except FileNotFoundError:
            return None  # another rank's shard was listed meanwhile, which removes the part

    def write_partial(self, number: int, part: PartialShard[V]) -> None:
        """Store the finished part of a shard, so that a killed run loses less work.

        The part replaces an earlier one, and is removed when a shard is listed. The earlier part
        has another file name, which the manifest lists until the new part is complete: a kill at
        any time leaves one of the two.

        Args:
            number: number of the shard.
            part: vectors and failed texts so far.
        """
        self._check(part.vectors)
        earlier_file = self.manifest.partial.get("file")
        file = self.path / f"part-{number:05d}.partial.{self.suffix}"
        if file.name == earlier_file:
            file = self.path / f"part-{number:05d}.partial-2.{self.suffix}"
        self.manifest.partial = {
            "shard": number,
            "file": file.name,
            "sha256": self._save_shard(part.vectors, file),
            "failed": dict(part.failed),
            **_truncation_entry(part.cut),
        }
        if self.precision is not None:
            self.manifest.partial["precision"] = self.precision
        self._save()
        if earlier_file is not None:
            (self.path / str(earlier_file)).unlink(missing_ok=True)

    def _save_shard(self, vectors: V, file: Path) -> str:
        """Write the file of a shard atomically, and return its SHA-256."""
        with atomic_file(file) as temporary:
            self._store(vectors, temporary)
            return sha256_file(temporary)

    def write_shard(
        self,
        number: int,
        vectors: V,
        failed: Mapping[str, str] | None = None,
        cut: Truncation | None = None,
    ) -> None:
        """Write a shard and list it in the manifest.

        Args:
            number: the next shard, or one to replace.
            vectors: rows of the shard.
            failed: id -> reason, of texts that could not be encoded.
            cut: how many texts were truncated; None if unknown.
        """
        self._check_next(number)
        # texts of a replaced shard may have failed before
        for name in self.manifest.failed.keys() & set(vectors.ids):
            del self.manifest.failed[name]
        self.list_shard(number, self.store_shard(number, vectors, cut), failed)

    def store_shard(self, number: int, vectors: V, cut: Truncation | None = None) -> Json:
        """Write the file of a shard, and return its entry for the manifest.

        Args:
            number: number of the shard.
            vectors: rows of the shard.
            cut: how many texts were truncated; None if unknown.

        Returns:
            File name, counts, checksum, truncated texts and precision of the shard.
        """
        self._check(vectors)
        file = self.path / f"part-{number:05d}.{self.suffix}"
        entry = {
            "file": file.name,
            **self._counts(vectors),
            "sha256": self._save_shard(vectors, file),
            **_truncation_entry(cut),
        }
        if self.precision is not None:
            entry["precision"] = self.precision
        return entry

    def leave_shard(
        self,
        number: int,
        vectors: V,
        failed: Mapping[str, str],
        cut: Truncation | None,
    ) -> None:
        """Write a shard with a receipt, for :meth:`receive` of the writer that holds the folder.

        Args:
            number: number of the shard.
            vectors: rows of the shard.
            failed: id -> reason, of texts that could not be encoded.
            cut: how many texts were truncated; None if unknown.
        """
        entry = self.store_shard(number, vectors, cut)
        size = (self.path / entry["file"]).stat().st_size
        receipt = Receipt(self.key, size, entry, dict(failed))
        _files.write_json(Receipt.file_of(self.path, number), asdict(receipt))

    def list_shard(
        self,
        number: int,
        stored: Json,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """List a shard in the manifest, and received shards that follow it.

        Args:
            number: the next shard, or one to replace.
            stored: its entry, which :meth:`store_shard` returned.
            failed: id -> reason, of texts that could not be encoded.
        """
        self._list_one(number, stored, failed)
        self._list_received()

    def _list_one(
        self,
        number: int,
        stored: Json,
        failed: Mapping[str, str] | None,
    ) -> None:
        """List one shard in the manifest, and update the manifest's sums over all shards.

        Files of a partial shard and the receipt of this one are no longer needed, and are removed.

        Args:
            number: the next shard, or one to replace.
            stored: entry of the shard for the manifest.
            failed: id -> reason, of texts that could not be encoded.
        """
        self._check_next(number)
        self.manifest.shards[number : number + 1] = [dict(stored)]
        for total, count in self._manifest_type.TOTALS.items():
            setattr(self.manifest, total, sum(int(shard[count]) for shard in self.manifest.shards))
        truncation = _truncation(*self.manifest.shards)
        self.manifest.truncated = _truncation_entry(truncation).get("truncated", {})
        self.manifest.failed.update(failed or {})
        self.manifest.complete = False
        self.manifest.partial = {}
        self._save()
        for partial_file in self.path.glob(f"part-*.partial*.{self.suffix}"):
            partial_file.unlink()
        self._received.pop(number, None)
        Receipt.file_of(self.path, number).unlink(missing_ok=True)

    def _check_next(self, number: int) -> None:
        """Raise ``ValueError`` unless a shard is the next one or a listed one."""
        if not 0 <= number <= len(self.manifest.shards):
            following = f"at most {len(self.manifest.shards)}, the next shard"
            raise ArgumentError(
                "number",
                f"expected {following}, got {number}. Shards are written in order.",
            )

    def finish(self, n_texts: int | None = None) -> M:
        """Mark the folder as complete, and release it.

        Args:
            n_texts: number of texts that were to be encoded; None if unknown.

        Raises:
            DataError: unless each of the texts has a row or a reason why it failed.
        """
        # A worker that was given up as lost may have written a shard a second time since.
        self.receive()
        rows = self.manifest.n_documents
        n_failed = len(self.manifest.failed)
        if n_texts is not None and rows + n_failed != n_texts:
            got = f"{rows} rows and {n_failed} errors. Write the vectors again with {_START_AGAIN}"
            raise DataError(f"{self.path}: expected {n_texts} texts, got {got}.")
        self.manifest.n_texts = n_texts
        self.manifest.complete = True
        self._save()
        unlock_folder(self._lock)
        return self.manifest

    def _save(self) -> None:
        write_json_object(self.path / MANIFEST_NAME, self.manifest.to_dict())


def _truncation_entry(truncation: Truncation | None) -> Json:
    """Return the manifest entry of truncated texts, empty where they were not counted."""
    if truncation is None:
        return {}
    return {"truncated": {"count": truncation.count, "max_length": truncation.max_length}}


def _truncation(*entries: Json) -> Truncation | None:
    """Add up how many texts of shards were truncated.

    Args:
        entries: manifest entries of the shards.

    Returns:
        The sum, or None if the truncated texts of any shard were not counted.
    """
    total = Truncation()
    for entry in entries:
        if "truncated" not in entry:
            return None
        total.add(0, int(entry["truncated"]["count"]), entry["truncated"]["max_length"])
    return total


def differences(left: Json, right: Json, left_name: str, right_name: str) -> str:
    """Describe the settings in which two folders differ, for an error.

    An example is ``"vocab_size: 100 before, 200 now"``.

    Args:
        left: settings of one folder.
        right: settings of the other folder.
        left_name: words after a value of the first folder, such as ``"before"``.
        right_name: words after a value of the second folder, such as ``"now"``.

    Returns:
        The description, which is empty if there are no differences.
    """
    # Digests tell a reader nothing, so these words stand for their values.
    digests = {
        "texts_sha256": "other texts",
        "model_fingerprint": "another model, or other weights",
    }
    described = []
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            values = f"{left.get(name)!r} {left_name}, {right.get(name)!r} {right_name}"
            described.append(f"{name}: {digests.get(name, values)}")
    return "; ".join(described)


def _class_of(annotation: type | UnionType) -> type | UnionType:
    """Return the class of a type annotation, ``list`` for ``list[str]``, for ``isinstance``."""
    if isinstance(annotation, UnionType):
        return annotation
    return get_origin(annotation) or annotation


def _has(value: object, types: Mapping[str, type | UnionType]) -> bool:
    """Whether a value is a JSON object whose members have these types."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), expected) for name, expected in types.items()
    )


def _is_truncation(value: Json) -> bool:
    """Whether an entry counts truncated texts, or is empty because they were not counted."""
    return value == {} or (
        _has(value, _TRUNCATION_TYPES) and value.keys() == _TRUNCATION_TYPES.keys()
    )


def check_complete(folder: Path, manifest: Manifest) -> None:
    """Raise ``DataError`` unless the writer of a folder has finished."""
    if not manifest.complete:
        raise DataError(
            f"{folder}: expected complete vectors, got {len(manifest.shards)} shard(s) of an "
            "unfinished run. Run the same `tilefold encode` again to resume it.",
        )


def shard_file(folder: Path, shard: Json, *, verify: bool = True) -> Path:
    """Return the file of a listed shard.

    Args:
        folder: the folder of vectors.
        shard: the entry of the shard in the manifest.
        verify: whether to compare the checksum, which reads the file.

    Raises:
        FileNotFoundError: if the file is missing.
        DataError: if its checksum differs.
    """
    return listed_file(
        folder,
        str(shard["file"]),
        shard["sha256"] if verify else None,
        "the manifest",
        REMEDY,
    )
