"""A disk that remembers in which order it was written and flushed, and what a power cut would have left.

SQLite writes through a VFS of apsw, the store's own calls of `os` are watched. Both stand in one log, and
both really happen, but for the flushing. `Platter` plays the log up to a moment: what was flushed is there,
of everything else any part.
"""

import errno
import os
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import apsw

# SQLite and os go by texts.
# ruff: noqa: PTH100, PTH112, PTH115, PTH118, PTH120, PTH123

SECTOR_BYTES = 512
FOLDER = -1  # what a name of a folder stands for, in the place of a file's number

_CALLS = ("open", "link", "unlink", "rename", "replace", "mkdir", "rmdir", "fsync", "truncate", "pwrite")
_HAS_FOLDER_SYNC = apsw.SQLITE_OPEN_WAL | apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_SUPER_JOURNAL


@dataclass(frozen=True)
class Entry:
    """One thing that happened. `act` says what the other fields mean; `note` is for whoever plays the log."""

    act: str  # write | truncate | content | sync | failed_sync | names | sync_folder | note
    file: int = 0
    offset: int = 0
    data: bytes = b""
    names: tuple = ()  # (path, file, FOLDER or None), which change together
    note: object = None


class RecordedDisk(apsw.VFS):
    """Everything below `root` is recorded while `recording` runs, but for the index of a log."""

    def __init__(self, root):
        self.root = os.path.realpath(root)
        self.log = []
        self.fails = lambda act, path: False  # whether this write or sync goes wrong
        self.of_sqlite = set()
        self._files = {}  # path -> number
        self._numbers = count(1)
        super().__init__("recorded-disk", "unix", makedefault=True)

    def note(self, note):
        """Put something of the test's own into the order of things."""
        self.log.append(Entry("note", note=note))

    # What SQLite does --------------------------------------------------------------------------------------

    def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
        """Every file that SQLite opens."""
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        was_there = path is None or os.path.lexists(path)
        opened = _File(self, name, path, flags)
        if not was_there:
            self.made(path)
        return opened

    def xDelete(self, name, syncdir):  # noqa: N802 - SQLite's name
        """The log at the end of the last connection."""
        super().xDelete(name, syncdir)
        self._moved(name, None)
        if syncdir:
            self.folder_synced(os.path.dirname(name))

    # What happens to files ---------------------------------------------------------------------------------

    def number(self, path):
        """The file behind a path; one that nobody saw being made is taken as it stands, unflushed."""
        path = self._inside(path)
        if path is None or path.endswith("-shm"):
            return None
        if path not in self._files:
            self.made(path)
            self._seen(path)
        return self._files[path]

    def made(self, path):
        """A new file has this name."""
        path = self._inside(path)
        if path is not None and not path.endswith("-shm"):
            self._files[path] = next(self._numbers)
            self._name((path, self._files[path]))

    def _seen(self, path):
        """What a file holds now that SQLite does not write."""
        if (number := self._files[path]) not in self.of_sqlite:
            with open(path, "rb") as file:
                self.log.append(Entry("content", number, data=file.read()))

    def synced(self, file):
        """What was written to the file is on the platter."""
        self.log.append(Entry("sync", file))

    def folder_synced(self, folder):
        """The names in the folder are."""
        if (folder := self._inside(folder)) is not None:
            self.log.append(Entry("sync_folder", names=((folder, FOLDER),)))

    def damage(self, path, offset, data):
        """Bytes go bad, for good."""
        file = self.number(os.fspath(path))
        with open(path, "r+b") as opened:
            opened.seek(offset)
            opened.write(data)
        self.log += [Entry("write", file, offset, data), Entry("sync", file)]

    # The calls of os ---------------------------------------------------------------------------------------

    @contextmanager
    def recording(self, monkeypatch):
        """While this runs, the calls of `os` that change names or flush are recorded too."""
        with monkeypatch.context() as patch:
            for name in _CALLS:
                patch.setattr(os, name, self._watched(getattr(self, f"_{name}"), getattr(os, name)))
            patch.setattr(os, "remove", os.unlink)
            try:
                yield self
            finally:
                self.unregister()

    def _watched(self, recorded, real):
        def call(*args, **options):
            return recorded(real, *args, **options)

        return call

    def _open(self, real, path, flags, *args, **options):
        target = self._inside(_at(path, options.get("dir_fd")))
        is_new = target is not None and flags & os.O_CREAT and not os.path.lexists(target)
        fd = real(path, flags, *args, **options)
        if is_new:
            self.made(target)
        elif target is not None and flags & os.O_TRUNC:
            self.log.append(Entry("truncate", self.number(target), 0))
        return fd

    def _link(self, real, source, target, **options):
        file = self.number(os.fspath(source))
        real(source, target, **options)
        if (target := self._inside(target)) is not None:
            self._files[target] = file
            self._name((target, file))

    def _unlink(self, real, path, *, dir_fd=None):
        target = _at(path, dir_fd)
        real(path, dir_fd=dir_fd)
        self._moved(target, None)

    def _moved(self, source, target, *_):
        """The names of a rename, or of a removal."""
        source, target = self._inside(source), self._inside(target)
        file = self._files.pop(source, None)
        if file is None:
            return
        if target is not None:
            self._files[target] = file
            self._seen(target)
        self._name((source, None), *([(target, file)] if target else ()))

    def _replace(self, real, source, target, **options):
        self.number(os.fspath(source))
        real(source, target, **options)
        self._moved(os.fspath(source), os.fspath(target))

    _rename = _replace

    def _mkdir(self, real, path, *args, **options):
        real(path, *args, **options)
        if (path := self._inside(path)) is not None:
            self._name((path, FOLDER))

    def _rmdir(self, real, path, *, dir_fd=None):
        target = _at(path, dir_fd)
        real(path, dir_fd=dir_fd)
        if (target := self._inside(target)) is not None:
            self._name((target, None))

    def _truncate(self, real, path, size):
        real(path, size)
        if (file := self.number(os.fspath(path))) is not None:
            self.log.append(Entry("truncate", file, size))

    def _pwrite(self, real, fd, data, offset):
        path = self._inside(_at("", fd))
        if path is not None and self.fails("write", path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        written = real(fd, data, offset)
        if path is not None:
            self.log.append(Entry("write", self.number(path), offset, bytes(data[:written])))
        return written

    def _fsync(self, real, fd):
        path = self._inside(_at("", fd))
        if path is None:
            real(fd)
            return
        if os.path.isdir(path):
            self.folder_synced(path)
        elif (file := self.number(path)) is not None:
            self._seen(path)
            if self.fails("sync", path):
                self.log.append(Entry("failed_sync", file))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            self.synced(file)

    # Names -------------------------------------------------------------------------------------------------

    def _name(self, *names):
        self.log.append(Entry("names", names=names))

    def _inside(self, path):
        if path is None:
            return None
        path = os.path.abspath(os.fspath(path))
        return path if f"{path}/".startswith(f"{self.root}/") else None


class _File(apsw.VFSFile):
    """One open file of SQLite."""

    def __init__(self, disk, name, path, flags):
        self._disk, self._path, self._number = disk, path, None
        self._syncs_folder = bool(flags[0] & _HAS_FOLDER_SYNC and flags[0] & apsw.SQLITE_OPEN_CREATE)
        super().__init__("unix", name, flags)

    def _file(self):
        if self._number is None and self._path is not None:
            self._number = self._disk.number(self._path)
            self._disk.of_sqlite.add(self._number)
        return self._number

    def xWrite(self, data, offset):  # noqa: N802 - SQLite's name
        if self._file() is not None and self._disk.fails("write", self._path):
            raise _io_error(apsw.SQLITE_IOERR_WRITE)
        super().xWrite(data, offset)
        if self._file() is not None:
            self._disk.log.append(Entry("write", self._number, offset, bytes(data)))

    def xTruncate(self, size):  # noqa: N802 - SQLite's name
        super().xTruncate(size)
        if self._file() is not None:
            self._disk.log.append(Entry("truncate", self._number, size))

    def xSync(self, flags):  # noqa: N802 - SQLite's name
        if self._file() is None:  # flushing is what the log tells of: nothing is really flushed
            return
        if self._disk.fails("sync", self._path):
            self._disk.log.append(Entry("failed_sync", self._number))
            raise _io_error(apsw.SQLITE_IOERR_FSYNC)
        self._disk.synced(self._number)
        if self._syncs_folder:  # os_unix.c: the first flush of a log flushes its folder as well
            self._syncs_folder = False
            self._disk.folder_synced(os.path.dirname(self._path))


def _io_error(extended):
    error = apsw.IOError("the test's disk fails")
    error.extendedresult = extended
    return error


@contextmanager
def never_flushed(monkeypatch):
    """Those who only look at what is left need not wait for the disk."""
    vfs = _NeverFlushed()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda fd: None)
            yield
    finally:
        vfs.unregister()


class _NeverFlushed(apsw.VFS):
    def __init__(self):
        super().__init__("never-flushed", "unix", makedefault=True)

    def xOpen(self, name, flags):  # noqa: N802 - SQLite's name
        return _NeverFlushedFile("unix", name, flags)


class _NeverFlushedFile(apsw.VFSFile):
    def xSync(self, flags):  # noqa: N802 - SQLite's name
        pass


def _at(path, dir_fd):
    """The path that a call means whose first argument is relative to a descriptor."""
    if dir_fd is None:
        return os.fspath(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fspath(path)).rstrip(os.sep)


# What is left -----------------------------------------------------------------------------------------------


class _Content:
    """A file: what is flushed, and every write since the first that is not.

    After a flush that failed Linux takes what was written before for written: no later flush writes it again.
    """

    def __init__(self):
        self._flushed = bytearray()
        self._later = []  # [entry, whether it is flushed, whether it was given up]

    def add(self, entry):
        """One more write."""
        self._later.append([entry, False, False])

    def flush(self):
        """All is on the platter but what was given up."""
        for one in self._later:
            one[1] = one[1] or not one[2]
        while self._later and self._later[0][1]:
            _apply(self._flushed, self._later.pop(0)[0])

    def give_up(self):
        """The flush failed."""
        for one in self._later:
            one[2] = not one[1]

    def left(self, chance):
        """What may be there after a power cut."""
        left = bytearray(self._flushed)
        is_torn = chance.random() < 0.3
        kept = {id(one) for one in _some([one for one in self._later if not one[1]], chance)}
        for one in self._later:
            if one[1]:
                _apply(left, one[0])
            elif id(one) in kept:
                for part in _torn(one[0], chance) if is_torn else (one[0],):
                    _apply(left, part)
        return left


class Platter:
    """The disk beneath: plays a log entry by entry, and lays out what a power cut now would leave."""

    def __init__(self, root):
        self._root = os.path.realpath(root)
        self._files = {}
        self._names = {self._root: FOLDER}
        self._unflushed = []  # changes of names

    def play(self, entry):
        """The next entry of the log."""
        if entry.act == "names":
            self._unflushed.append(entry.names)
        elif entry.act == "sync_folder":
            self._flush_folder(entry.names[0][0])
        elif entry.act == "sync":
            self._content(entry.file).flush()
        elif entry.act == "failed_sync":
            self._content(entry.file).give_up()
        elif entry.act != "note":
            self._content(entry.file).add(entry)

    def lay_out(self, folder, chance):
        """Write what is left below `folder`; `chance` decides what of the unflushed was."""
        names = dict(self._names)
        for change in _some(self._unflushed, chance):
            parents = {os.path.dirname(path) for path, file in change if file is not None}
            if all(names.get(parent) == FOLDER for parent in parents):
                _rename(names, change)
        for path, file in sorted(names.items()):
            if path != self._root and self._is_reachable(names, path):
                target = Path(folder) / os.path.relpath(path, self._root)
                if file == FOLDER:
                    target.mkdir(mode=0o700, parents=True, exist_ok=True)
                else:
                    target.write_bytes(self._content(file).left(chance))

    def _content(self, file):
        return self._files.setdefault(file, _Content())

    def _flush_folder(self, folder):
        waiting = []
        for change in self._unflushed:
            if any(os.path.dirname(path) == folder for path, _ in change):
                _rename(self._names, change)
            else:
                waiting.append(change)
        self._unflushed = waiting

    def _is_reachable(self, names, path):
        while path != self._root:
            path = os.path.dirname(path)
            if names.get(path) != FOLDER:
                return False
        return True


def _rename(names, change):
    for path, file in change:
        if file is None:
            names.pop(path, None)
        else:
            names[path] = file


def _some(entries, chance):
    """What of the unflushed has reached the disk: nothing, all, the first ones, or any."""
    match chance.choice(("nothing", "all", "first", "any", "any", "few")):
        case "nothing":
            return []
        case "all":
            return entries
        case "first":
            return entries[: chance.randint(0, len(entries))]
        case "any":
            return [entry for entry in entries if chance.random() < 0.5]
    return [entry for entry in entries if chance.random() < 0.9]


def _torn(entry, chance):
    """Any sectors of a write."""
    if entry.act != "write":
        yield entry
        return
    start, end = entry.offset, entry.offset + len(entry.data)
    while start < end:
        stop = min(end, (start // SECTOR_BYTES + 1) * SECTOR_BYTES)
        if chance.random() < 0.7:
            yield Entry("write", entry.file, start, entry.data[start - entry.offset : stop - entry.offset])
        start = stop


def _apply(content, entry):
    if entry.act == "content":
        content[:] = entry.data
    elif entry.act == "truncate":
        size = entry.offset
        del content[size:]
        content.extend(bytes(size - len(content)))
    else:
        end = entry.offset + len(entry.data)
        content.extend(bytes(max(0, end - len(content))))
        content[entry.offset : end] = entry.data


class Least:
    """The chance of a disk that keeps nothing but what was flushed."""

    def choice(self, _):
        """Of the ways in which unflushed writes may be left."""
        return "nothing"

    def random(self):
        """No write is torn."""
        return 1.0


class Most(Least):
    """That of one that keeps everything, as when only the process is killed."""

    def choice(self, _):
        """All of them."""
        return "all"
