"""A disk that is full when the files of one folder have so many bytes: SQLite writes through it."""

from pathlib import Path

import apsw


class SmallDisk(apsw.VFS):
    """SQLite's own way to the files (the default one while this is registered), with an end of space."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.room_bytes = 1 << 60
        super().__init__("small-disk", "unix", makedefault=True)

    def used_bytes(self) -> int:
        """What the folder's files take, those of no database too."""
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
        """Every file that SQLite opens."""
        return _File(self, name, flags)


class _File(apsw.VFSFile):
    def __init__(self, disk, name, flags):
        self._disk = disk
        super().__init__("unix", name, flags)

    def xWrite(self, data, offset):  # noqa: N802 - SQLite's name
        more = offset + len(data) - self.xFileSize()
        if more > 0 and self._disk.used_bytes() + more > self._disk.room_bytes:
            raise apsw.FullError
        super().xWrite(data, offset)
