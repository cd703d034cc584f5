"""Atomic files and folders, locks, JSON and checksums."""

from __future__ import annotations

import ctypes
import errno
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

LOCK = ".writing.lock"  # name of the lock file in a folder
# What the messages of libraries about a full disk or quota contain.
_DISK_FULL = re.compile(
    r"(?i)no space left|quota exceeded|file too large|requested and \d+ written|os error "
    r"(28|27|122)\b",
)
SCRATCH = ".tilefold.tmp"  # suffix of temporary folders, whose contents are moved when complete
_LOCK_ATTEMPTS = 8
_PAUSE_SECONDS = 0.02  # between two attempts to lock a scratch folder
# Arguments of renameat2(2).
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_UNLOCKED_SECONDS = 60.0  # a process locks its new scratch folder well within this time


class InUseError(RuntimeError):
    """Raised if another process writes to the same file or folder."""


def lock_folder(folder: Path, *, reentrant: bool = True) -> FileLock:
    """Lock a folder for writing, until it is unlocked or this process ends.

    Args:
        folder: the folder, which is created if it is missing.
        reentrant: whether this process may lock the folder again while it holds the lock. The
            folder is unlocked once each of these locks has been released.

    Raises:
        InUseError: if another process holds the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.resolve() / LOCK, timeout=0, thread_local=False, is_singleton=reentrant)
    try:
        lock.acquire()
    except Timeout:
        raise InUseError(
            f"{folder}: another process is writing there. Wait for it, or choose another folder.",
        ) from None
    return lock


def unlock_folder(lock: FileLock) -> None:
    """Release a lock of :func:`lock_folder` and remove its file."""
    Path(lock.lock_file).unlink(missing_ok=True)
    lock.release(force=True)


@contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Convert errors about a full disk to a :class:`DiskFullError` that names the path.

    Libraries report a full disk in many ways, and without the path. Other errors are raised
    unchanged.

    Args:
        path: the file or folder that is written within the context.
    """
    try:
        yield
    except DiskFullError:  # names a path already
        raise
    except Exception as error:
        # safetensors raises its own exception class
        may_be_disk_error = (
            isinstance(error, (OSError, RuntimeError)) or "safetensors" in type(error).__module__
        )
        if not may_be_disk_error or not _DISK_FULL.search(str(error)):
            raise
        cause = " ".join(str(error).split())
        raise DiskFullError(
            f"{path}: could not be written, the disk or the quota is full ({cause}). Free some "
            "space there, or choose another path; files that were complete are kept.",
        ) from error


class DiskFullError(OSError):
    """Raised if a file cannot be written because the disk or quota is full."""


@contextmanager
def lock_path(path: Path) -> Iterator[None]:
    """Keep other processes from writing a file or folder while the context is open.

    The lock is a file in a hidden folder next to the path. A process may nest such contexts.

    Args:
        path: the file or folder, which need not exist.

    Raises:
        InUseError: if another process is writing to the path.
    """
    lock_directory = lock_directory_of(path)
    lock = _lock_scratch(lock_directory, reentrant=True)
    if lock is None:
        raise InUseError(
            f"{path}: another process is writing it. Wait for it, or choose another path.",
        )
    try:
        yield
    finally:
        # The outermost of nested contexts removes the folder. It does so before it releases the
        # lock, while no other process can use the folder.
        is_outermost = lock.lock_counter == 1
        if is_outermost:
            shutil.rmtree(lock_directory, ignore_errors=True)
        lock.release()


def lock_directory_of(path: Path) -> Path:
    """Return the hidden folder that is locked while a process writes a file or folder.

    It is next to the file or folder, and the same one for all paths and symbolic links to it.

    Args:
        path: the file or folder, which need not exist.
    """
    target = path.resolve()
    return target.parent / f".{target.name}{SCRATCH}"


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Create an empty, locked folder next to a path, and remove it after the block.

    If the process is killed, the folder remains until the next scratch folder is created in the
    same parent.

    Args:
        path: a path in the parent of the folder. Its name is part of the folder's name.

    Yields:
        The folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent)
    folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=SCRATCH, dir=path.parent))
    lock = _lock_scratch(folder, reentrant=False)
    if lock is None:  # in :func:`remove_leftovers`, other processes locked it again and again
        raise InUseError(f"{folder}: another process holds this temporary folder. Try again.")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.release()


def _lock_scratch(folder: Path, *, reentrant: bool) -> FileLock | None:
    """Lock a temporary (scratch) folder, retrying while another process holds or removes it.

    Args:
        folder: the folder, which is created if it is missing.
        reentrant: whether this process may lock the folder again while it holds the lock.

    Returns:
        The lock, or None if another process still holds it after the last attempt.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        if attempt > 0:
            time.sleep(_PAUSE_SECONDS)
        with suppress(InUseError, FileNotFoundError):
            lock = lock_folder(folder, reentrant=reentrant)
            # The lock protects nothing if its file was removed before it was acquired.
            if Path(lock.lock_file).exists():
                return lock
            lock.release(force=True)
    return None


def remove_leftovers(parent: Path) -> None:
    """Remove the temporary (scratch) folders in `parent` whose processes have died.

    A process holds the lock of such a folder while it lives.
    """
    for folder in parent.glob(f".*{SCRATCH}"):
        # Folders are skipped that another user owns, that were removed meanwhile, or whose process
        # is alive.
        with suppress(OSError, InUseError):
            if not folder.is_symlink() and (folder / LOCK).is_file():
                lock = lock_folder(folder, reentrant=False)
                shutil.rmtree(folder)
                lock.release()
            elif time.time() - folder.lstat().st_mtime > _UNLOCKED_SECONDS:
                folder.rmdir()  # the process was killed before it locked the folder, which is empty


@contextmanager
def atomic_file(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """Write a file atomically: yield an empty file that replaces `path` after the block.

    Readers find either the old or the new content. If the block fails, `path` is not changed.

    Args:
        path: the file to write.
        durable: whether the file must survive a loss of power.

    Yields:
        The path of the empty file.
    """
    with scratch_folder(path) as folder:
        temporary = folder / path.name
        temporary.touch()
        with naming_full_disk(path):
            yield temporary
            give_default_permissions(temporary)
            if durable:
                sync(temporary)
        temporary.replace(path)
        if durable:
            sync(path.parent)


def give_default_permissions(*files: Path) -> None:
    """Give files the permissions of new files of this process.

    A library may have written them for the owner only, as safetensors 0.8 does. A server that runs
    as another user could not read them.

    Args:
        *files: existing files.
    """
    for file in files:
        # The process has no other way to learn its umask without changing that of all threads.
        with tempfile.TemporaryDirectory(prefix=".", suffix=SCRATCH, dir=file.parent) as folder:
            new_file = Path(folder) / file.name
            new_file.touch()
            file.chmod(new_file.stat().st_mode)


@contextmanager
def exported_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Write a new file atomically: yield an empty file that becomes `path` after the block.

    If the block fails, `path` is not changed.

    Args:
        path: the file to write.
        overwrite: whether to replace an existing file.

    Yields:
        The path of the empty file.

    Raises:
        FileExistsError: before the block, if `path` is a folder, or exists and `overwrite` is
            False.
    """
    if path.is_dir():
        raise FileExistsError(f"{path}: expected a file, got a folder. Choose another path.")
    if path.exists() and not overwrite:
        raise FileExistsError(
            f"{path}: expected a new file, got one that was written before. Choose another path, "
            "or replace it (overwrite=True or --overwrite); nothing was overwritten.",
        )
    with atomic_file(path) as temporary:
        yield temporary


def sync(path: Path) -> None:
    """Wait until the content of a file, or the list of entries of a folder, is on the disk."""
    is_windows = os.name == "nt"
    is_folder = path.is_dir()
    if is_folder and is_windows:
        return  # Windows cannot sync a folder
    # Windows syncs only files that are open for writing.
    descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if not is_folder or error.errno not in (errno.EBADF, errno.EINVAL):
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Wait until a folder, with all files and folders in it, is on the disk.

    Args:
        folder: the folder.

    Raises:
        DiskFullError: if the disk or the quota is full.
    """
    with naming_full_disk(folder):
        for path in folder.rglob("*"):
            if path.is_file() or path.is_dir():
                sync(path)
        sync(folder)


@contextmanager
def atomic_directory(
    path: Path,
    *,
    own_names: Collection[str],
    overwrite: bool,
) -> Iterator[Path]:
    """Write a directory atomically: yield a temporary directory that becomes `path` afterwards.

    If the block fails, `path` is not changed.

    Args:
        path: the directory to write.
        own_names: all names of files and folders that tilefold writes into such a directory.
        overwrite: whether to replace a directory in which only these names occur.

    Yields:
        The temporary directory.

    Raises:
        FileExistsError: before the block, if `path` is a file, a directory with other names, or a
            non-empty directory while `overwrite` is False.
    """
    check_replaceable(path, own_names, overwrite=overwrite)
    with lock_path(path), scratch_folder(path) as temporary:
        # Another process may have written to the path before this one had the lock.
        check_replaceable(path, own_names, overwrite=overwrite)
        new_directory = temporary / "made"
        new_directory.mkdir()
        with naming_full_disk(path):
            yield new_directory
        swap_directory(new_directory, path)


def check_replaceable(path: Path, own_names: Collection[str], *, overwrite: bool) -> None:
    """Check that replacing a directory would not destroy files that tilefold did not write.

    Temporary folders that a killed process has left in the directory are removed first.

    Args:
        path: the directory to write.
        own_names: all names of files and folders that tilefold writes into such a directory.
        overwrite: whether to replace a directory in which only these names occur.

    Raises:
        FileExistsError: if `path` is a file, a directory with other names, or a non-empty directory
            while `overwrite` is False.
    """
    if not path.exists():
        return
    expected = f"{path}: expected a new directory or one that tilefold wrote, got"
    if not path.is_dir():
        raise FileExistsError(f"{expected} a file. Choose another path.")
    remove_leftovers(path)
    other_files = sorted(entry.name for entry in path.iterdir() if entry.name not in own_names)
    if other_files:
        raise FileExistsError(
            f"{expected} one with other files ({', '.join(other_files[:3])}). Choose another path, "
            "or move the other files away; nothing was overwritten.",
        )
    if not overwrite and any(path.iterdir()):
        raise FileExistsError(
            f"{path}: expected a new or empty directory, got one that was written before. Choose "
            "another path, or replace it (overwrite=True or --overwrite); nothing was overwritten.",
        )


def swap_directory(new: Path, path: Path) -> None:
    """Move a directory to `path`, and remove the directory that was at `path`.

    The two are exchanged in one step if the system supports it. Otherwise `path` does not exist for
    a moment, and the old directory is moved back if the new one cannot be moved.

    The old directory is removed once the new one is on the disk, so that after a loss of power one
    of the two is complete. If there is no old directory, nothing waits for the disk.

    Args:
        new: the new directory, on the same disk.
        path: the new path of the directory; another directory may be there.
    """
    if not path.exists():
        new.replace(path)
        return
    sync_tree(new)
    if exchange(new, path):
        sync(path.parent)
        shutil.rmtree(new, ignore_errors=True)  # the old directory, which was at `path`
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".old", dir=path.parent))
    path.replace(old)
    try:
        new.replace(path)
    except OSError:
        old.replace(path)
        raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def exchange(left: Path, right: Path) -> bool:
    """Exchange two paths in one atomic step, with Linux's ``renameat2``.

    Args:
        left: a file or folder.
        right: a file or folder on the same disk.

    Returns:
        Whether the paths were exchanged. It is False on other systems, on file systems without this
        operation, and after a failure.
    """
    if sys.platform != "linux":
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    status = renameat2(
        _AT_FDCWD,
        os.fsencode(left),
        _AT_FDCWD,
        os.fsencode(right),
        _RENAME_EXCHANGE,
    )
    return bool(status == 0)


def write_json(path: Path, value: Any, *, durable: bool = False) -> None:
    """Write a value to a JSON file, atomically.

    Args:
        path: the file to write.
        value: the value.
        durable: whether the file must survive a loss of power.
    """
    with atomic_file(path, durable=durable) as temporary:
        temporary.write_text(
            json.dumps(value, ensure_ascii=False, indent=1) + "\n",
            encoding="utf-8",
        )


def read_json(path: Path) -> dict[str, Any] | None:
    """Read the JSON object in a file; return None if there is no such file or object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of the bytes of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
