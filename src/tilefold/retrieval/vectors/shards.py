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
from tilefold._internal.precision import DTYPES
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
_START_AGAIN = "--fresh (resume=False in Python)"
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
        CONTENTS: description of the kind of vectors, for errors.
        OTHER_KIND_REMEDY: what to do if a folder has another kind of vectors.
        IDENTITY: fields that, with the settings, decide whether a run may be resumed.
        TOTALS: field of the manifest -> field of shards whose sum it is.
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
            FileNotFoundError: if the folder has no manifest.
            DataError: if the manifest is damaged, inconsistent or for another kind of vectors.
        """
        check_folder(folder, MANIFEST_NAME, _EXPECTED)
        values = read_json_object(folder / MANIFEST_NAME, REMEDY)
        cls._check_layout(folder, values)
        # Annotated names in capital letters are constants of the class, and no fields.
        types = {name: kind for name, kind in get_type_hints(cls).items() if name.islower()}
        try:
            manifest = cls(**{name: value for name, value in values.items() if name in types})
        except TypeError as error:
            raise _manifest_error(
                folder,
                f"a manifest of vectors, got {[*values]!r:.80} ({error})",
            ) from error
        invalid_fields = manifest.invalid_fields(types)
        if invalid_fields:
            raise _manifest_error(
                folder,
                f"a manifest of vectors, got fields of other types ({', '.join(invalid_fields)})",
            )
        manifest._check_totals(folder)
        return manifest

    @classmethod
    def _check_layout(cls, folder: Path, values: Json) -> None:
        """Raise ``DataError`` if a manifest has another kind of vectors or another version.

        Args:
            folder: folder of the manifest, for the error.
            values: field -> value in the file.
        """
        layout = values.get("layout", "sparse")
        if layout != cls.LAYOUT:
            got = f"{layout} vectors"
            if layout == "tokens":
                got = "token vectors of a multi-vector model"
            raise DataError(
                f"{folder}: expected {cls.CONTENTS}, got {got}. {cls.OTHER_KIND_REMEDY}",
            )
        version = values.get("schema_version")
        if version != SCHEMA_VERSION:
            raise _manifest_error(folder, f"schema_version {SCHEMA_VERSION}, got {version!r}")

    def _check_totals(self, folder: Path) -> None:
        """Raise ``DataError`` if the totals do not agree with the shards and the failed texts.

        Args:
            folder: folder of the manifest, for the error.
        """
        n_rows = sum(shard["rows"] for shard in self.shards)
        n_failed = len(self.failed)
        if n_rows != self.n_documents:
            raise _manifest_error(
                folder,
                f"{self.n_documents} rows, as n_documents says, got shards with {n_rows}",
            )
        if self.complete and self.n_texts not in (None, n_rows + n_failed):
            raise _manifest_error(
                folder,
                f"{self.n_texts} texts, as n_texts says, got {n_rows} rows and {n_failed} failed",
            )

    @property
    def provenance(self) -> Provenance:
        """Model, texts and precision, as far as they are known."""
        return replace(Provenance.from_dict(self.identity), precision=self.precision)

    @property
    def precision(self) -> str | None:
        """Number types in which the model computed the shards, such as "bf16"; None if unknown."""
        entries = [*self.shards, self.partial]
        return joined_precisions(entry.get("precision") for entry in entries)

    def to_dict(self) -> Json:
        """Return the manifest as the JSON object in its file."""
        values = asdict(self)
        shared = [item.name for item in fields(Manifest)]
        specific = [name for name in values if name not in shared]
        return {name: values[name] for name in (*specific, *shared)}

    @property
    def identity(self) -> Json:
        """Settings that decide whether a run may be resumed, by name."""
        return {name: getattr(self, name) for name in self.IDENTITY} | self.settings

    def invalid_fields(self, types: Mapping[str, type | UnionType]) -> list[str]:
        """Return the names of invalid fields.

        A field is invalid if it has a wrong type. If all types are right, the entries of shards and
        of truncated texts are checked, too.

        Args:
            types: name of a field -> its type.
        """
        invalid_fields = [
            name
            for name, expected in types.items()
            if not isinstance(getattr(self, name), _class_of(expected))
        ]
        if invalid_fields:
            return invalid_fields
        counts = dict.fromkeys(self.TOTALS.values(), int)
        shard_types = {"file": str, "sha256": str, **counts}
        are_valid_shards = all(
            _has_members(shard, shard_types) and _is_truncation(shard.get("truncated", {}))
            for shard in self.shards
        )
        if not are_valid_shards:
            invalid_fields.append("shards")
        partial_truncation = self.partial.get("truncated", {})
        if not (_is_truncation(self.truncated) and _is_truncation(partial_truncation)):
            invalid_fields.append("truncated")
        return invalid_fields


M = TypeVar("M", bound=Manifest)


def _manifest_error(folder: Path, problem: str) -> DataError:
    """Create the error for an invalid manifest.

    Args:
        folder: folder of the manifest.
        problem: what was expected, and what the manifest has instead.
    """
    return DataError(f"{folder / MANIFEST_NAME}: expected {problem}. {REMEDY}")


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
        failed: id -> reason for each text that could not be encoded.
        truncation: how many texts were truncated.
    """

    vectors: V
    failed: Mapping[str, str]
    truncation: Truncation


@dataclass(frozen=True)
class Receipt:
    """Proof that a shard was written completely, before the manifest lists the shard.

    A receipt is a file. A process that may not write the manifest writes it, after the shard.

    Attributes:
        key: :attr:`ShardWriter.key` of the folder that the shard belongs to.
        size: number of bytes of the shard's file.
        shard: entry of the shard for the manifest.
        failed: id -> reason for each text that could not be encoded.
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
            The receipt. None if there is no receipt with this key, or the shard's file is missing
            or has another size.
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

    @property
    def n_encoded(self) -> int:
        """Number of texts of the shard that were encoded."""
        return int(self.shard["rows"])

    @property
    def model_failed(self) -> bool:
        """Whether all texts failed, and are too many to have failed by chance."""
        return self.n_encoded == 0 and len(self.failed) >= MIN_ALL_FAILED


def check_not_all_failed(
    number: int,
    n_encoded: int,
    failed: Mapping[str, str],
    *,
    leaves_no_vectors: bool,
) -> None:
    """Raise ``DataError`` if all texts of a shard failed, because then the model is at fault.

    In a shard of fewer than ``MIN_ALL_FAILED`` texts, all may fail by chance. This is no error, and
    the manifest lists them.

    Args:
        number: number of the shard.
        n_encoded: number of texts of the shard that were encoded.
        failed: id -> reason for each text that could not be encoded.
        leaves_no_vectors: whether the folder has no vectors without this shard, and no shard
            follows. The error is then raised for a shard of any size.
    """
    if n_encoded or not failed:
        return
    if len(failed) >= MIN_ALL_FAILED or leaves_no_vectors:
        name, reason = next(iter(failed.items()))
        raise DataError(
            f"texts: all {len(failed)} of shard {number} failed; the first is {name!r} ({reason}). "
            "Check the texts and the model; earlier shards are kept.",
        )


def _check_replaceable(folder: Path, earlier: Manifest, manifest: Manifest) -> None:
    """Raise ``FileExistsError`` if the vectors in a folder may not be replaced without asking.

    Only vectors of an interrupted run with the same settings may be replaced.

    Args:
        folder: the folder.
        earlier: manifest of the vectors in the folder.
        manifest: manifest of this run.
    """
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
    """Base class of writers of a folder of vectors.

    One process at a time writes the manifest, and holds the lock of the folder. It writes shards by
    :meth:`write_shard`. Writers in other processes, with ``writes_manifest=False``, write shards by
    :meth:`write_shard_with_receipt`. They do not check or change the folder before. The process
    that holds the lock adds these shards to the manifest by :meth:`register_received`.
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
        writes_manifest: bool = True,
        overwrite: bool = False,
        precision: str | None = None,
        precision_is_requested: bool = False,
    ) -> None:
        """Open the folder, and lock it if this writer writes the manifest.

        Args:
            path: the folder.
            manifest: manifest of a new folder, without shards.
            resume: keep the shards of an earlier run with the same settings.
            writes_manifest: whether this writer locks the folder and writes the manifest.
            overwrite: without `resume`, replace any vectors in the folder. By default only the
                shards of an interrupted run with the same settings are removed.
            precision: number type in which the model computes what is written, such as ``"bf16"``;
                None if unknown.
            precision_is_requested: whether the user requests this precision. Otherwise a complete
                folder of another precision, such as of another machine, is kept.

        Raises:
            DataError: if `resume` is True, and the folder holds vectors with other settings, or
                unfinished vectors in another precision.
            FileExistsError: if the folder holds other files; or, without `resume` and `overwrite`,
                if it holds finished vectors or vectors with other settings.
        """
        require(*self.package)
        self.precision = precision
        self.precision_is_requested = precision_is_requested
        if not isinstance(manifest, self.manifest_type):
            raise TypeError(
                f"manifest: expected a {self.manifest_type.__name__}, got "
                f"{type(manifest).__name__}. Create one for these vectors.",
            )
        self.path = path_of("path", path)
        self.manifest = manifest
        self._manifest_type = type(manifest)
        # Shards of other processes, which wait until the manifest lists all earlier shards.
        self._received: dict[int, Receipt] = {}
        if writes_manifest:
            self._lock_and_open(resume=resume, overwrite=overwrite)

    def _lock_and_open(self, *, resume: bool, overwrite: bool) -> None:
        """Lock the folder, and resume or replace its vectors.

        Args:
            resume: keep the shards of an earlier run with the same settings.
            overwrite: without `resume`, replace any vectors in the folder.
        """
        if self.manifest.shards or self.manifest.partial or self.manifest.complete:
            raise ArgumentError(
                "manifest",
                "expected the manifest of a new folder, got one that lists "
                f"{len(self.manifest.shards)} shard(s). Create a new one with its settings.",
            )
        # Refuse a folder with other files before a lock is created in it.
        self._read_earlier(may_replace=overwrite and not resume)
        self._lock = lock_folder(self.path)
        try:
            self._open(resume=resume, overwrite=overwrite)
        except BaseException:
            if self._lock.lock_counter == 1:
                unlock_folder(self._lock)
            else:  # another writer of this process still needs the lock
                self._lock.release()
            raise

    def _open(self, *, resume: bool, overwrite: bool) -> None:
        """Resume the vectors in the folder, or replace them if that is allowed.

        Args:
            resume: keep the shards of an earlier run with the same settings.
            overwrite: without `resume`, replace any vectors in the folder.
        """
        earlier = self._read_earlier(may_replace=overwrite and not resume)
        if earlier is None or not self._has_work(earlier):
            self._start_new()  # nothing is lost, even if the settings differ
        elif resume:
            self._resume(earlier)
        else:
            if not overwrite:
                _check_replaceable(self.path, earlier, self.manifest)
            self._start_new()

    def _has_work(self, earlier: M) -> bool:
        """Whether an earlier run has left shards, a part of a shard, or receipts of shards."""
        has_receipts = any(self.path.glob(RECEIPTS))
        return bool(earlier.shards or earlier.partial) or has_receipts

    def _resume(self, earlier: M) -> None:
        """Continue an earlier run, whose manifest replaces the new one.

        Raises:
            DataError: if the settings or the precision differ.
        """
        self._check_same_settings(earlier, self.manifest)
        self._check_precision(earlier)
        self.manifest = earlier
        remove_leftovers(self.path)
        self.register_received()

    def _start_new(self) -> None:
        """Write the new manifest, and remove earlier shards and receipts."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._save()
        for pattern in (f"part-*.{self.suffix}", RECEIPTS):
            for file in self.path.glob(pattern):
                file.unlink(missing_ok=True)
        remove_leftovers(self.path)

    def _check_same_settings(self, earlier: M, manifest: M) -> None:
        """Raise ``DataError`` if an earlier run had other settings.

        Args:
            earlier: manifest of the earlier run.
            manifest: manifest of this run.
        """
        changed = differences(earlier.identity, manifest.identity, "before", "now")
        if not changed:
            return
        remedy = (
            f"Use the earlier settings, choose another folder, or start again with {_START_AGAIN}."
        )
        # Other texts may mean that documents were added.
        if earlier.identity.get("texts_sha256") != manifest.identity.get("texts_sha256"):
            remedy += (
                " To add documents, encode only the new ones into another folder, and put "
                "them into the index (tilefold index --update)."
            )
        raise DataError(f"{self.path}: holds vectors with other settings ({changed}). {remedy}")

    def _check_precision(self, earlier: M) -> None:
        """Raise ``DataError`` if the folder was computed in another precision.

        Shards that have a receipt, but are not yet in the manifest, are compared, too. A finished
        folder is only checked if the user requests a precision.

        Args:
            earlier: manifest of the earlier run, which has the same settings.
        """
        if earlier.complete and not self.precision_is_requested:
            return
        precisions = [earlier.precision]
        for number in self._numbers_of_receipts():
            receipt = Receipt.read(self.path, number, _key_of(earlier))
            if receipt is not None:
                precisions.append(receipt.shard.get("precision"))
        stored_precision = joined_precisions(precisions)  # None if any of them is unknown
        if stored_precision is None or self.precision is None:
            return
        if stored_precision != self.precision:
            same_dtype = "on a machine like the earlier one"
            if stored_precision in DTYPES:
                same_dtype = f"with --dtype {stored_precision} (dtype={stored_precision!r})"
            elif stored_precision == "fp8":
                same_dtype = "with --fp8 (accelerate(model, fp8=True))"
            raise DataError(
                f"{self.path}: holds vectors that were computed in {stored_precision}, but here "
                f"the model computes in {self.precision}, which gives other scores. Continue "
                f"{same_dtype}, choose another folder, or start again with {_START_AGAIN}.",
            )

    def read_manifest(self) -> M:
        """Read the manifest on disk, which another process may have written."""
        return self._manifest_type.read(self.path)

    @abstractmethod
    def _check(self, vectors: V) -> None:
        """Raise an error if vectors do not belong in this folder."""

    @abstractmethod
    def _counts(self, vectors: V) -> dict[str, int]:
        """Return the counts in the manifest entry of a shard, such as the number of rows."""

    @abstractmethod
    def _store(self, vectors: V, path: Path) -> None:
        """Write the file of a shard."""

    @abstractmethod
    def _read(self, path: Path) -> V:
        """Read the file of a shard."""

    def _read_earlier(self, *, may_replace: bool) -> M | None:
        """Read the manifest of an earlier run in the folder.

        Args:
            may_replace: whether vectors in the folder may be replaced. If so, a damaged manifest is
                ignored, since it cannot be resumed.

        Returns:
            The manifest, or None if the folder is new or has at most temporary files and locks.

        Raises:
            DataError: if the folder has vectors of another kind or, without `may_replace`, a
                damaged manifest.
            FileExistsError: if the path is a file, or a folder with other files.
        """
        if self.path.is_file():
            raise FileExistsError(f"{self.path}: expected a folder for vectors, got a file.")
        if (self.path / MANIFEST_NAME).exists():
            try:
                return self.read_manifest()
            except DataError:
                if may_replace and self._may_hold_this_kind():
                    return None
                raise
        has_other_files = self.path.exists() and any(
            not entry.name.endswith((".tmp", LOCK)) for entry in self.path.iterdir()
        )
        if has_other_files:
            raise FileExistsError(
                f"{self.path}: expected a new folder or one with vectors, got one with other "
                "files. Choose another path; nothing was overwritten.",
            )
        return None

    def _may_hold_this_kind(self) -> bool:
        """Whether a folder with a damaged manifest may hold vectors of this writer's kind.

        If the manifest cannot be read at all, the suffixes of the shard files decide.
        """
        try:
            return layout_of(self.path) == self._manifest_type.LAYOUT
        except DataError:
            shards = [path for path in self.path.glob("part-*") if path.suffix != ".json"]
            return all(path.suffix == f".{self.suffix}" for path in shards)

    def reuse_shard(self, number: int) -> bool:
        """Check whether a shard of an earlier run or of another process can be used as it is.

        If the file of a received shard has changed, its receipt is dropped, so that the shard can
        be written again.

        Args:
            number: number of the shard.

        Returns:
            Whether the shard is in the manifest or was received, and its file is unchanged.
        """
        if number < len(self.manifest.shards):
            entry = self.manifest.shards[number]
        elif number in self._received:
            entry = self._received[number].shard
        else:
            return False
        file = self.path / str(entry["file"])
        if file.is_file() and sha256_file(file) == entry["sha256"]:
            return True
        self._received.pop(number, None)
        return False

    @property
    def key(self) -> str:
        """SHA-256 of the settings of the folder, which identifies its receipts."""
        return _key_of(self.manifest)

    def _numbers_of_receipts(self) -> list[int]:
        """Return the numbers of the shards that have a receipt in the folder."""
        return [int(file.name.split("-")[1].split(".")[0]) for file in self.path.glob(RECEIPTS)]

    def register_received(self, numbers: Iterable[int] | None = None) -> set[int]:
        """Add shards that other processes have written to the manifest, up to the first gap.

        Other processes write a shard with a receipt (:meth:`write_shard_with_receipt`). The
        manifest lists shards in order, so a shard waits in memory until all earlier ones are
        listed.

        Args:
            numbers: shards whose receipts are read; all receipts in the folder by default.

        Returns:
            Numbers of the shards that have a receipt, without those whose texts all failed because
            of the model.
        """
        if numbers is None:
            numbers = self._numbers_of_receipts()
        receipts: dict[int, Receipt] = {}
        for number in numbers:
            receipt = Receipt.read(self.path, number, self.key)
            if receipt is not None and not receipt.model_failed:
                receipts[number] = receipt
        self._received.update(receipts)
        for number in sorted(receipts):
            if number < len(self.manifest.shards):  # a shard of the manifest was written again
                self.register_shard(number, receipts[number].shard, receipts[number].failed)
        self._register_waiting()
        return set(receipts)

    def _register_waiting(self) -> None:
        """Add received shards to the manifest, until the next shard was not received yet."""
        number = len(self.manifest.shards)
        while number in self._received:
            receipt = self._received[number]
            self._record_shard(number, receipt.shard, receipt.failed)
            number += 1

    def read_partial(self, number: int) -> PartialShard[V] | None:
        """Read the finished part of a shard that :meth:`write_partial` stored.

        Args:
            number: number of the shard.

        Returns:
            The part, or None if no part of this shard is stored or its file has changed.
        """
        partial = self.manifest.partial
        file = self.path / str(partial.get("file"))
        if partial.get("shard") != number or not file.is_file():
            return None
        try:
            if sha256_file(file) != partial["sha256"]:
                return None
            return PartialShard(
                vectors=self._read(file),
                failed=dict(partial["failed"]),
                truncation=_sum_truncation([partial]) or Truncation(),  # no counts if unknown
            )
        except FileNotFoundError:
            return None  # another process has added a shard to the manifest and removed the part

    def write_partial(self, number: int, part: PartialShard[V]) -> None:
        """Store the finished part of a shard, so that a killed run loses less work.

        The part replaces an earlier one. It is removed when a shard is added to the manifest.

        Args:
            number: number of the shard.
            part: vectors and failed texts so far.
        """
        self._check(part.vectors)
        # Two file names take turns, so that the manifest lists the earlier part until the new one
        # is complete. A kill at any time leaves one of the two.
        earlier_file = self.manifest.partial.get("file")
        file = self.path / f"part-{number:05d}.partial.{self.suffix}"
        if file.name == earlier_file:
            file = self.path / f"part-{number:05d}.partial-2.{self.suffix}"
        sha256 = self._write_file(part.vectors, file)
        self.manifest.partial = {
            "shard": number,
            "file": file.name,
            "sha256": sha256,
            "failed": dict(part.failed),
            "truncated": _truncation_counts(part.truncation),
        }
        if self.precision is not None:
            self.manifest.partial["precision"] = self.precision
        self._save()
        if earlier_file is not None:
            (self.path / str(earlier_file)).unlink(missing_ok=True)

    def _write_file(self, vectors: V, file: Path) -> str:
        """Write the file of a shard atomically, and return its SHA-256."""
        with atomic_file(file) as temporary:
            self._store(vectors, temporary)
            return sha256_file(temporary)

    def write_shard(
        self,
        number: int,
        vectors: V,
        failed: Mapping[str, str] | None = None,
        truncation: Truncation | None = None,
    ) -> None:
        """Write a shard and add it to the manifest.

        Args:
            number: number of a new shard, which must be the next one, or of a shard to replace.
            vectors: rows of the shard.
            failed: id -> reason for each text that could not be encoded.
            truncation: how many texts were truncated; None if unknown.
        """
        self._check_next(number)
        # Texts of a replaced shard may have failed before.
        for name in self.manifest.failed.keys() & set(vectors.ids):
            del self.manifest.failed[name]
        entry = self.store_shard(number, vectors, truncation)
        self.register_shard(number, entry, failed)

    def store_shard(
        self,
        number: int,
        vectors: V,
        truncation: Truncation | None = None,
    ) -> Json:
        """Write the file of a shard, and return its entry for the manifest.

        Args:
            number: number of the shard.
            vectors: rows of the shard.
            truncation: how many texts were truncated; None if unknown.

        Returns:
            File name, counts, checksum, truncated texts and precision of the shard.
        """
        self._check(vectors)
        file = self.path / f"part-{number:05d}.{self.suffix}"
        sha256 = self._write_file(vectors, file)
        entry: Json = {"file": file.name, **self._counts(vectors), "sha256": sha256}
        if truncation is not None:
            entry["truncated"] = _truncation_counts(truncation)
        if self.precision is not None:
            entry["precision"] = self.precision
        return entry

    def write_shard_with_receipt(
        self,
        number: int,
        vectors: V,
        failed: Mapping[str, str],
        truncation: Truncation | None,
    ) -> None:
        """Write a shard and a receipt.

        The process that holds the lock of the folder adds the shard to the manifest by
        :meth:`register_received`.

        Args:
            number: number of the shard.
            vectors: rows of the shard.
            failed: id -> reason for each text that could not be encoded.
            truncation: how many texts were truncated; None if unknown.
        """
        entry = self.store_shard(number, vectors, truncation)
        size = (self.path / entry["file"]).stat().st_size
        receipt = Receipt(key=self.key, size=size, shard=entry, failed=dict(failed))
        _files.write_json(Receipt.file_of(self.path, number), asdict(receipt))

    def register_shard(
        self,
        number: int,
        entry: Json,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """Add a shard to the manifest, and then the received shards that follow it.

        Args:
            number: number of a new shard, which must be the next one, or of a shard to replace.
            entry: entry of the shard, which :meth:`store_shard` returned.
            failed: id -> reason for each text that could not be encoded.
        """
        self._record_shard(number, entry, failed)
        self._register_waiting()

    def _record_shard(
        self,
        number: int,
        entry: Json,
        failed: Mapping[str, str] | None,
    ) -> None:
        """Write a shard into the manifest, and remove files that are no longer needed.

        Args:
            number: number of a new shard, which must be the next one, or of a shard to replace.
            entry: entry of the shard for the manifest.
            failed: id -> reason for each text that could not be encoded.
        """
        self._check_next(number)
        self.manifest.shards[number : number + 1] = [dict(entry)]
        self.manifest.failed.update(failed or {})
        self.manifest.partial = {}
        self.manifest.complete = False  # also if a shard of a complete folder is replaced
        self._update_totals()
        self._save()
        for partial_file in self.path.glob(f"part-*.partial*.{self.suffix}"):
            partial_file.unlink()
        self._received.pop(number, None)
        Receipt.file_of(self.path, number).unlink(missing_ok=True)

    def _update_totals(self) -> None:
        """Compute the sums over all shards in the manifest."""
        for total, count in self._manifest_type.TOTALS.items():
            setattr(self.manifest, total, sum(int(shard[count]) for shard in self.manifest.shards))
        truncation = _sum_truncation(self.manifest.shards)
        self.manifest.truncated = {} if truncation is None else _truncation_counts(truncation)

    def _check_next(self, number: int) -> None:
        """Raise ``ArgumentError`` if a shard is neither in the manifest nor the next one."""
        if not 0 <= number <= len(self.manifest.shards):
            raise ArgumentError(
                "number",
                f"expected at most {len(self.manifest.shards)}, the next shard, got {number}. "
                "Shards are written in order.",
            )

    def finish(self, n_texts: int | None = None) -> M:
        """Mark the folder as complete, and unlock it.

        Args:
            n_texts: number of texts that were to be encoded; None if unknown.

        Raises:
            DataError: if a text has neither a row nor a reason why it failed.
        """
        # A worker that was believed to be lost may have replaced the file of a shard. Its receipt
        # has the checksum of the new file.
        self.register_received()
        n_rows = self.manifest.n_documents
        n_failed = len(self.manifest.failed)
        if n_texts is not None and n_rows + n_failed != n_texts:
            raise DataError(
                f"{self.path}: expected {n_texts} texts, got {n_rows} rows and {n_failed} errors. "
                f"Write the vectors again with {_START_AGAIN}.",
            )
        self.manifest.n_texts = n_texts
        self.manifest.complete = True
        self._save()
        unlock_folder(self._lock)
        return self.manifest

    def _save(self) -> None:
        write_json_object(self.path / MANIFEST_NAME, self.manifest.to_dict())


def _truncation_counts(truncation: Truncation) -> dict[str, int | None]:
    """Return the counts of truncated texts as a manifest has them."""
    return {"count": truncation.count, "max_length": truncation.max_length}


def _sum_truncation(entries: Iterable[Json]) -> Truncation | None:
    """Add up how many texts of shards were truncated.

    Args:
        entries: manifest entries of the shards.

    Returns:
        The sum, or None if the truncated texts of a shard were not counted.
    """
    total = Truncation()
    for entry in entries:
        counts = entry.get("truncated")
        if counts is None:
            return None
        # A manifest does not have the number of tokenised texts, and the sum does not need it.
        total.add(n_texts=0, count=int(counts["count"]), max_length=counts["max_length"])
    return total


def differences(left: Json, right: Json, left_name: str, right_name: str) -> str:
    """Describe the settings in which two folders differ, for an error.

    An example is ``vocab_size: 100 before, 200 now``.

    Args:
        left: settings of one folder.
        right: settings of the other folder.
        left_name: word after a value of the first folder, such as ``"before"``.
        right_name: word after a value of the second folder, such as ``"now"``.

    Returns:
        The description, which is empty if there are no differences.
    """
    # Digests mean nothing to a reader, so their fields are described in words.
    digest_descriptions = {
        "texts_sha256": "other texts",
        "model_fingerprint": "another model, or other weights",
    }
    described = []
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            values = f"{left.get(name)!r} {left_name}, {right.get(name)!r} {right_name}"
            described.append(f"{name}: {digest_descriptions.get(name, values)}")
    return "; ".join(described)


def _class_of(annotation: type | UnionType) -> type | UnionType:
    """Return a type annotation as ``isinstance`` accepts it, such as ``list`` for ``list[str]``."""
    if isinstance(annotation, UnionType):
        return annotation
    return get_origin(annotation) or annotation


def _has_members(value: object, types: Mapping[str, type | UnionType]) -> bool:
    """Whether a value is a JSON object whose members have these types."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), expected) for name, expected in types.items()
    )


def _is_truncation(value: Json) -> bool:
    """Whether a value is a count of truncated texts, or empty because they were not counted."""
    return value == {} or (
        _has_members(value, _TRUNCATION_TYPES) and value.keys() == _TRUNCATION_TYPES.keys()
    )


def check_complete(folder: Path, manifest: Manifest) -> None:
    """Raise ``DataError`` if the writer of a folder has not finished."""
    if not manifest.complete:
        raise DataError(
            f"{folder}: expected complete vectors, got {len(manifest.shards)} shard(s) of an "
            "unfinished run. Run the same `tilefold encode` again to resume it.",
        )


def shard_file(folder: Path, shard: Json, *, verify: bool = True) -> Path:
    """Return the file of a shard in the manifest.

    Args:
        folder: the folder of vectors.
        shard: entry of the shard in the manifest.
        verify: whether to compare the checksum, for which the file is read.

    Raises:
        FileNotFoundError: if the file is missing.
        DataError: if its checksum differs.
    """
    return listed_file(
        folder,
        name=str(shard["file"]),
        digest=shard["sha256"] if verify else None,
        listed_in="the manifest",
        remedy=REMEDY,
    )
