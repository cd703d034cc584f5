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
_ANEW = "resume=False"
MIN_ALL_FAILED = 16  # when every text of a shard of at least this size fails, the model is at fault, not the texts
_OF_CUTS = {"count": int, "max_length": int | None}


@dataclass(kw_only=True)
class Manifest:
    """The manifest of a folder of vectors: the fields of all kinds, which in the file are behind
    those of a kind.
    """

    LAYOUT: ClassVar[str]
    CONTENTS: ClassVar[str]  # is in a folder of this kind
    OTHER_KIND_REMEDY: ClassVar[str]  # what to do with a folder of another kind
    IDENTITY: ClassVar[tuple[str, ...]]  # fields that make a folder this one, beside its settings
    TOTALS: ClassVar[dict[str, str]] = {
        "n_documents": "rows",
    }  # fields that sum up those of the shards

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
        """The manifest of a folder; ``DataError`` unless it is whole, of this kind, and agrees with
        itself.
        """

        def refused(problem: str) -> DataError:
            return DataError(f"{folder / MANIFEST_NAME}: expected {problem}. {REMEDY}")

        check_folder(folder, MANIFEST_NAME, _EXPECTED)
        value = read_json_object(folder / MANIFEST_NAME, REMEDY)
        if (layout := value.get("layout", "sparse")) != cls.LAYOUT:
            got = (
                "token vectors of a multi-vector model"
                if layout == "tokens"
                else f"{layout} vectors"
            )
            raise DataError(
                f"{folder}: expected {cls.CONTENTS}, got {got}. {cls.OTHER_KIND_REMEDY}"
            )
        if (version := value.get("schema_version")) != SCHEMA_VERSION:
            raise refused(f"schema_version {SCHEMA_VERSION}, got {version!r}")
        types = {name: kind for name, kind in get_type_hints(cls).items() if name.islower()}
        try:
            manifest = cls(**{name: item for name, item in value.items() if name in types})
        except TypeError as error:
            raise refused(f"a manifest of vectors, got {[*value]!r:.80} ({error})") from error
        if wrong := manifest.wrong(types):
            raise refused(f"a manifest of vectors, got fields of other types ({', '.join(wrong)})")
        rows, failed = sum(shard["rows"] for shard in manifest.shards), len(manifest.failed)
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
        """Number types in which the model computed the shards, such as "bf16"; None if unknown."""
        entries = [*self.shards, self.partial]
        return joined_precisions(entry.get("precision") for entry in entries)

    def to_dict(self) -> Json:
        """The JSON object in the file."""
        values, shared = asdict(self), [item.name for item in fields(Manifest)]
        return {name: values[name] for name in sorted(values, key=lambda name: name in shared)}

    @property
    def identity(self) -> Json:
        """Settings that make a folder this one, by name."""
        return {name: getattr(self, name) for name in self.IDENTITY} | self.settings

    def wrong(self, types: Mapping[str, type | UnionType]) -> list[str]:
        """Fields that are not of these `types`, or whose parts are not what they must be."""
        bare = {
            name: kind if isinstance(kind, UnionType) else get_origin(kind) or kind
            for name, kind in types.items()
        }
        if wrong := [
            name for name, type_ in bare.items() if not isinstance(getattr(self, name), type_)
        ]:
            return wrong
        entry = {"file": str, "sha256": str, **dict.fromkeys(self.TOTALS.values(), int)}
        if not all(
            _has(shard, entry) and _counts_cuts(shard.get("truncated", {})) for shard in self.shards
        ):
            return ["shards"]
        return (
            []
            if all(map(_counts_cuts, (self.truncated, self.partial.get("truncated", {}))))
            else ["truncated"]
        )


M = TypeVar("M", bound=Manifest)


def layout_of(folder: Path) -> str:
    """Kind of the vectors in a folder: ``"sparse"``, ``"tokens"`` or ``"dense"``."""
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
    """A part of a shard from an earlier run: vectors, failed texts, and how many texts were cut."""

    vectors: V
    failed: Mapping[str, str]
    cut: Truncation


@dataclass(frozen=True)
class Receipt:
    """A shard that the manifest does not list yet, left by a process that does not hold the folder."""

    key: str  # of the folder that it was written for
    size: int  # of the file in bytes
    shard: Json  # what the manifest is to say of it
    failed: dict[str, str]  # id -> reason

    @staticmethod
    def file_of(folder: Path, number: int) -> Path:
        return folder / RECEIPTS.replace("*", f"{number:05d}")

    @classmethod
    def read(cls, folder: Path, number: int, key: str) -> Receipt | None:
        """The receipt of shard `number`, None without one of this key whose file is there in its
        full size.
        """
        found = _files.read_json(cls.file_of(folder, number))
        if (
            found is None
            or found.get("key") != key
            or set(found) != {item.name for item in fields(cls)}
        ):
            return None
        receipt = cls(**found)
        file = folder / str(receipt.shard["file"])
        return receipt if file.is_file() and file.stat().st_size == receipt.size else None


def check_not_all_failed(
    number: int, rows: int, failed: Mapping[str, str], *, nothing_yet: bool
) -> None:
    """Raise ``DataError`` where all texts of a shard failed: of a large one, or of all where
    `nothing_yet` has rows.
    """
    if failed and not rows and (len(failed) >= MIN_ALL_FAILED or nothing_yet):
        name, why = next(iter(failed.items()))
        said = f"texts: all {len(failed)} of shard {number} failed, {name!r} first ({why})"
        raise DataError(f"{said}. Check the model; earlier shards are kept.")


def _check_unfinished(folder: Path, earlier: Manifest, manifest: Manifest) -> None:
    """Raise FileExistsError unless `earlier` is of an interrupted run that `manifest` repeats."""
    if not earlier.complete and earlier.identity == manifest.identity:
        return
    state = "" if earlier.complete else "an unfinished run of "
    raise FileExistsError(
        f"{folder}: expected a new or empty folder, got one with {state}{earlier.n_documents} "
        "vectors. Choose another folder, or replace them (overwrite=True); nothing was overwritten.",
    )


class ShardWriter(ABC, Generic[M, V]):
    """Writer of a folder as :class:`tilefold.retrieval.SparseVectorWriter`, for one process at a
    time.

    Others (`lists` is False) may leave shards (:meth:`leave_shard`) for the one that lists them
    (:meth:`receive`): they neither check nor change anything until a shard is stored.

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
        require(*self.package)
        self.precision = precision
        if not isinstance(manifest, self.manifest_type):
            got = type(manifest).__name__
            raise TypeError(
                f"manifest: expected a {self.manifest_type.__name__}, got {got}. Make one for these vectors.",
            )
        self.path, self._kind = Path(path), type(manifest)
        self._received: dict[int, Receipt] = {}
        if not lists:
            self.manifest = manifest
            return
        if manifest.shards or manifest.partial or manifest.complete:
            got = f"one that lists {len(manifest.shards)} shard(s)"
            raise ValueError(
                f"manifest: expected that of a new folder, got {got}. Make a new one with its settings.",
            )
        self._earlier()  # refuses a foreign folder before anything is written there
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
        """Go on with what the folder holds, or remove it, as far as that is allowed."""
        earlier = self._earlier()
        receipts = list(self.path.glob(RECEIPTS))
        begun = earlier is not None and (earlier.shards or earlier.partial or receipts)
        if not begun:
            resume = False  # any settings do
        if earlier is not None and resume:
            if changed := differences(earlier.identity, manifest.identity, "before", "now"):
                remedy = f"Go on with the former ones, choose another folder, or take {_ANEW}."
                if earlier.identity.get("texts_sha256") != manifest.identity.get("texts_sha256"):
                    remedy += (
                        " To add documents, encode the new ones alone into another folder, and put "
                        "them into the index (tilefold index --update)."
                    )
                raise DataError(
                    f"{self.path}: holds vectors with other settings ({changed}). {remedy}",
                )
            self._check_precision(earlier)
            manifest = earlier
        if earlier is not None and begun and not (resume or overwrite):
            _check_unfinished(self.path, earlier, manifest)
        self.manifest = manifest
        if not resume:
            self.path.mkdir(parents=True, exist_ok=True)
            self._save()
            for stale in (*self.path.glob(f"part-*.{self.suffix}"), *receipts):
                stale.unlink(missing_ok=True)
        remove_leftovers(self.path)
        if resume:
            self.receive()

    def _check_precision(self, earlier: M) -> None:
        """Raise ``DataError`` where an unfinished folder was computed in another precision."""
        known = None not in (earlier.precision, self.precision)
        if known and earlier.precision != self.precision and not earlier.complete:
            raise DataError(
                f"{self.path}: holds vectors that were computed in {earlier.precision}, and here the "
                f"model computes in {self.precision}, which gives other scores. Go on on a machine "
                f"like the former one, choose another folder, or take {_ANEW}.",
            )

    def listed(self) -> M:
        """The manifest on disk, which another process may have written."""
        return self._kind.read(self.path)

    @abstractmethod
    def _check(
        self,
        vectors: V,
    ) -> None: ...  # an error for vectors that do not belong into this folder
    @abstractmethod
    def _counts(self, vectors: V) -> dict[str, int]: ...
    @abstractmethod
    def _store(self, vectors: V, path: Path) -> None: ...
    @abstractmethod
    def _read(self, path: Path) -> V: ...

    def _earlier(self) -> M | None:
        if self.path.is_file():
            raise FileExistsError(f"{self.path}: expected a folder for vectors, got a file.")
        if (self.path / MANIFEST_NAME).exists():
            return self.listed()
        if self.path.exists() and any(
            not entry.name.endswith((".tmp", LOCK)) for entry in self.path.iterdir()
        ):
            expected = "expected a new folder or one with vectors, got one with other files"
            raise FileExistsError(
                f"{self.path}: {expected}. Choose another path; nothing was overwritten.",
            )
        return None

    def has_shard(self, number: int) -> bool:
        """Whether shard `number` is complete: listed in the manifest or received, with an unchanged
        file.
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
        """SHA-256 of what makes the folder this one."""
        return hashlib.sha256(
            json.dumps(self.manifest.identity, sort_keys=True).encode(),
        ).hexdigest()

    def receive(self, numbers: Iterable[int] | None = None) -> set[int]:
        """Take and list shards whose receipts are there, as far as none is missing before; those
        that were found.
        """
        if numbers is None:
            numbers = [
                int(file.name.split("-")[1].split(".")[0]) for file in self.path.glob(RECEIPTS)
            ]
        found = ((number, Receipt.read(self.path, number, self.key)) for number in numbers)
        taken = {
            n: each
            for n, each in found
            if each and (each.shard["rows"] or len(each.failed) < MIN_ALL_FAILED)
        }
        self._received |= taken
        for number in sorted(taken):
            if number < len(self.manifest.shards):  # written again
                self.list_shard(number, taken[number].shard, taken[number].failed)
        self._list_received()
        return set(taken)

    def _list_received(self) -> None:
        while (number := len(self.manifest.shards)) in self._received:
            self.list_shard(number, self._received[number].shard, self._received[number].failed)

    def read_partial(self, number: int) -> PartialShard[V] | None:
        """The part of shard `number` that :meth:`write_partial` kept, if any."""
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
        except (
            FileNotFoundError
        ):  # another rank's shard was listed meanwhile, which forgets what was kept
            return None

    def write_partial(self, number: int, part: PartialShard[V]) -> None:
        """Keep what is done of shard `number`, until it is written whole or this is called again."""
        self._check(part.vectors)
        file = self.path / f"part-{number:05d}.partial.{self.suffix}"
        kept = {"shard": number, "file": file.name, "sha256": self._save_shard(part.vectors, file)}
        self.manifest.partial = kept | {"failed": dict(part.failed)} | _cut(part.cut)
        if self.precision is not None:
            self.manifest.partial["precision"] = self.precision
        self._save()

    def _save_shard(self, vectors: V, file: Path) -> str:
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
        """Write shard `number` (the next one, or one to replace) and list it in the manifest."""
        self._check_next(number)
        for name in self.manifest.failed.keys() & set(
            vectors.ids,
        ):  # of a shard that is written again
            del self.manifest.failed[name]
        self.list_shard(number, self.store_shard(number, vectors, cut), failed)

    def store_shard(self, number: int, vectors: V, cut: Truncation | None = None) -> Json:
        """Write the file of shard `number`, of which `cut` says how many texts were cut; its entry
        for the manifest.
        """
        self._check(vectors)
        file = self.path / f"part-{number:05d}.{self.suffix}"
        entry = {
            "file": file.name,
            **self._counts(vectors),
            "sha256": self._save_shard(vectors, file),
        } | _cut(cut)
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
        """Write shard `number` with a receipt, for :meth:`receive` of the writer that holds the
        folder.
        """
        stored = self.store_shard(number, vectors, cut)
        size = (self.path / stored["file"]).stat().st_size
        _files.write_json(
            Receipt.file_of(self.path, number),
            asdict(Receipt(self.key, size, stored, dict(failed))),
        )

    def list_shard(
        self,
        number: int,
        stored: Json,
        failed: Mapping[str, str] | None = None,
    ) -> None:
        """List shard `number` (the next one, or one to replace), which :meth:`store_shard` wrote,
        in the manifest.
        """
        self._check_next(number)
        self.manifest.shards[number : number + 1] = [dict(stored)]
        for total, count in self._kind.TOTALS.items():
            setattr(self.manifest, total, sum(int(part[count]) for part in self.manifest.shards))
        self.manifest.truncated = _cut(_truncation(*self.manifest.shards)).get("truncated", {})
        self.manifest.failed.update(failed or {})
        self.manifest.complete = False
        self.manifest.partial = {}
        self._save()
        for left in self.path.glob(f"part-*.partial.{self.suffix}"):
            left.unlink()
        self._received.pop(number, None)
        Receipt.file_of(self.path, number).unlink(missing_ok=True)
        self._list_received()

    def _check_next(self, number: int) -> None:
        if not 0 <= number <= len(self.manifest.shards):
            following = f"at most {len(self.manifest.shards)}, the next shard"
            raise ValueError(
                f"number: expected {following}, got {number}. Shards are written in order.",
            )

    def finish(self, n_texts: int | None = None) -> M:
        """Mark the folder as complete; ``DataError`` unless each of `n_texts` has a row or a reason
        why not.
        """
        self.receive()  # what a lost worker wrote once more
        rows, errors = self.manifest.n_documents, len(self.manifest.failed)
        if n_texts is not None and rows + errors != n_texts:
            got = f"{rows} rows and {errors} errors. Write the vectors again with {_ANEW}"
            raise DataError(f"{self.path}: expected {n_texts} texts, got {got}.")
        self.manifest.n_texts = n_texts
        self.manifest.complete = True
        self._save()
        unlock_folder(self._lock)
        return self.manifest

    def _save(self) -> None:
        write_json_object(self.path / MANIFEST_NAME, self.manifest.to_dict())


def _cut(found: Truncation | None) -> Json:
    """Manifest entry of texts that were cut; nothing where they were not counted."""
    return (
        {}
        if found is None
        else {"truncated": {"count": found.count, "max_length": found.max_length}}
    )


def _truncation(*entries: Json) -> Truncation | None:
    """Number of texts that were cut, by manifest entries of shards; None where one was written
    without counting.
    """
    found = Truncation()
    for entry in entries:
        if "truncated" not in entry:
            return None
        found.add(0, int(entry["truncated"]["count"]), entry["truncated"]["max_length"])
    return found


def differences(one: Json, other: Json, first: str, second: str) -> str:
    """Settings in which two folders differ, in words; empty where in none."""
    digests = {
        "texts_sha256": "other texts",
        "model_fingerprint": "another model, or other weights",
    }
    return "; ".join(
        f"{name}: {digests.get(name) or f'{one.get(name)!r} {first}, {other.get(name)!r} {second}'}"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    )


def _has(value: object, types: Mapping[str, type | UnionType]) -> bool:
    return isinstance(value, dict) and all(
        isinstance(value.get(name), type_) for name, type_ in types.items()
    )


def _counts_cuts(value: Json) -> bool:
    """Whether it says how many texts were cut, or, empty, that they were not counted."""
    return value == {} or (_has(value, _OF_CUTS) and len(value) == len(_OF_CUTS))


def check_complete(folder: Path, manifest: Manifest) -> None:
    """Raise ``DataError`` unless the writer of `folder` has finished."""
    if not manifest.complete:
        got = f"{len(manifest.shards)} shard(s) of an unfinished run. Run the same `tilefold encode` again to resume it"
        raise DataError(f"{folder}: expected complete vectors, got {got}.")


def shard_file(folder: Path, shard: Json, *, verify: bool = True) -> Path:
    """The file of a listed shard, checked against its checksum."""
    return listed_file(
        folder,
        str(shard["file"]),
        shard["sha256"] if verify else None,
        "the manifest",
        REMEDY,
    )
