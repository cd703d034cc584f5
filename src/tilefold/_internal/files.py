"""Files that other processes see whole or not at all, JSON in them, and their checksums."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

LOCK = ".writing.lock"
_FULL = re.compile(
    r"(?i)no space left|quota exceeded|file too large|requested and \d+ written|os error (28|27|122)\b",
)
SCRATCH = ".tilefold.tmp"  # ends the name of a folder in which something is written before it is put in its place
_ATTEMPTS, _PAUSE_SECONDS = 8, 0.02
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_UNLOCKED_SECONDS = 60.0  # between making a scratch folder and locking it, at the very most


class InUseError(RuntimeError):
    """Another process writes to the same folder."""


def lock_folder(folder: Path, *, again: bool = True) -> FileLock:
    """Keep other processes from writing to `folder`, made when missing, until it is released or
    this process ends.

    :class:`InUseError` says that another one holds it; `again` allows for this process to hold it
    twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.resolve() / LOCK, timeout=0, thread_local=False, is_singleton=again)
    try:
        lock.acquire()
    except Timeout:
        raise InUseError(
            f"{folder}: another process is writing there. Wait for it, or choose another folder.",
        ) from None
    return lock


def unlock_folder(lock: FileLock) -> None:
    """Let other processes write to a folder again."""
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turn errors of a full disk, which the libraries tell in many ways and without a path, into
    one that names it.
    """
    try:
        yield
    except Exception as error:
        of_a_library = (
            isinstance(error, (OSError, RuntimeError)) or "safetensors" in type(error).__module__
        )
        if isinstance(error, DiskFullError) or not of_a_library or not _FULL.search(str(error)):
            raise
        raise DiskFullError(
            f"{path}: could not be written, the disk or the quota is full ({' '.join(str(error).split())}). "
            "Free some space there, or choose another place; what was complete is kept.",
        ) from error


class DiskFullError(OSError):
    """A file could not be written for want of space."""


@contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """Keep other processes from writing the file or folder `path` while the block runs; blocks may
    be nested.
    """
    folder = path.parent.resolve() / f".{path.name}{SCRATCH}"
    if (lock := _hold_scratch(folder, again=True)) is None:
        raise InUseError(
            f"{path}: another process is writing it. Wait for it, or choose another place.",
        )
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield an empty, locked folder beside `path`, removed after the block, or by the next one if
    the process dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=SCRATCH, dir=path.parent))
    lock = _hold_scratch(folder, again=False)
    try:
        if lock is None:
            raise InUseError(f"{folder}: another process holds this temporary folder. Try again.")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if lock is not None:
            lock.release()


def _hold_scratch(folder: Path, *, again: bool) -> FileLock | None:
    """The lock of a scratch folder, None where another process holds it for longer than it takes to
    remove it.
    """
    for attempt in range(_ATTEMPTS):
        time.sleep(_PAUSE_SECONDS * min(attempt, 1))
        with suppress(InUseError, FileNotFoundError):
            lock = lock_folder(folder, again=again)
            if Path(lock.lock_file).exists():
                return lock
            lock.release(force=True)
    return None


def remove_leftovers(parent: Path) -> None:
    """Remove the scratch folders in `parent` whose processes have died."""
    for left in parent.glob(f".*{SCRATCH}"):
        with suppress(OSError, InUseError):  # of somebody else, gone by now, or alive
            if not left.is_symlink() and (left / LOCK).is_file():
                lock = lock_folder(left, again=False)
                shutil.rmtree(left)
                lock.release()
            elif time.time() - left.lstat().st_mtime > _UNLOCKED_SECONDS:
                left.rmdir()  # killed before it was locked: nothing is in it, else this fails


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Yield the path of an empty file that replaces `path` only when the block ends well.

    What killed processes left in the same folder is removed. A `durable` file survives a loss of
    power.
    """
    with scratch_folder(path) as folder:
        temporary = folder / path.name
        temporary.touch()  # with the permissions of a new file, which writers may change
        mode = temporary.stat().st_mode
        with naming_full_disk(path):
            yield temporary
            if durable:
                sync(temporary)
        temporary.chmod(mode)
        temporary.replace(path)
        if durable:
            sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if path.is_dir() and os.name == "nt":
        return  # which syncs no folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_directory(
    path: Path,
    *,
    own_names: Collection[str],
    overwrite: bool,
) -> Iterator[Path]:
    """Yield a temporary directory beside `path`, which becomes `path` if the block ends without an
    error.

    Args:
        path: the directory to write.
        own_names: names of all files and folders that such a directory holds.
        overwrite: replace an earlier directory of these names.

    Raises:
        FileExistsError: before the block, if `path` is a file, a directory with other names, or
            without `overwrite` a directory that is not empty.
    """
    check_replaceable(path, own_names, overwrite=overwrite)
    with lock_path(path), scratch_folder(path) as temporary:
        check_replaceable(path, own_names, overwrite=overwrite)  # another process may be done
        made = temporary / "made"
        made.mkdir()
        with naming_full_disk(path):
            yield made
        swap_directory(made, path)


def check_replaceable(path: Path, own_names: Collection[str], *, overwrite: bool) -> None:
    """Check that a directory can be written to `path` without a loss.

    Args:
        path: the directory to write.
        own_names: names of all files and folders that such a directory holds.
        overwrite: replace an earlier directory of these names.

    Raises:
        FileExistsError: if `path` is a file, a directory with other names, or without `overwrite`
            a directory that is not empty.
    """
    if not path.exists():
        return
    expected = f"{path}: expected a new directory or one that tilefold wrote, got"
    if not path.is_dir():
        raise FileExistsError(f"{expected} a file. Choose another path.")
    remove_leftovers(path)  # of files in it that somebody was writing when killed
    if strange := sorted(entry.name for entry in path.iterdir() if entry.name not in own_names):
        raise FileExistsError(
            f"{expected} one with other files ({', '.join(strange[:3])}). Choose another path; nothing was overwritten.",
        )
    if not overwrite and any(path.iterdir()):
        raise FileExistsError(
            f"{path}: expected a new or empty directory, got one that was written before. Choose "
            "another path, or replace it (overwrite=True); nothing was overwritten.",
        )


def swap_directory(new: Path, path: Path) -> None:
    """Put the directory `new` in the place of `path`, which is removed if it was there; `new` is
    gone afterwards.
    """
    if not path.exists():
        new.replace(path)
        return
    if exchange(new, path):
        shutil.rmtree(new, ignore_errors=True)  # what was at `path`
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.replace(old)
    try:
        new.replace(path)
    except OSError:
        old.replace(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths change places at once, where system and file system can: a kill leaves each
    whole.
    """
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    return (
        swap is not None
        and swap(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0
    )


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write JSON so that a reader sees the old file or the whole new one; `durable` as in
    :func:`atomic_file`.
    """
    with atomic_file(path, durable=durable) as temporary:
        temporary.write_text(
            json.dumps(value, ensure_ascii=False, indent=1) + "\n",
            encoding="utf-8",
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or ``None`` when it is missing or is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def sha256_file(path: Path) -> str:
    """SHA-256 of the bytes of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
