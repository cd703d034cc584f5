"""What a process that does not hold a folder says of a shard that it wrote there."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tilefold._files import read_json, write_json

RECEIPTS = "part-*.receipt.json"


@dataclass(frozen=True)
class Receipt:
    """A shard that the manifest does not list yet.

    Attributes:
        key: of the folder that it was written for, :attr:`ShardWriter.key`.
        size: bytes of the file.
        shard: what the manifest is to say of it.
        failed: id -> reason.
    """

    key: str
    size: int
    shard: dict[str, Any]
    failed: dict[str, str]

    @staticmethod
    def file_of(folder: Path, number: int) -> Path:
        """Where the receipt of shard `number` is."""
        return folder / RECEIPTS.replace("*", f"{number:05d}")

    @staticmethod
    def number_of(file: Path) -> int:
        """The shard of a receipt."""
        return int(file.name.split("-")[1].split(".")[0])

    @classmethod
    def read(cls, folder: Path, number: int, key: str) -> Receipt | None:
        """The receipt of shard `number`, None without one of this key whose file is there in its full size."""
        found = read_json(cls.file_of(folder, number))
        if found is None or found.get("key") != key or set(found) != {item.name for item in fields(cls)}:
            return None
        receipt = cls(**found)
        file = folder / str(receipt.shard["file"])
        return receipt if file.is_file() and file.stat().st_size == receipt.size else None

    def write(self, folder: Path, number: int) -> None:
        """Put it beside the shard."""
        write_json(self.file_of(folder, number), asdict(self))
