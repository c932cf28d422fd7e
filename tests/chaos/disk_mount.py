"""A small file system of a test's own: it is mounted in a mount namespace, which ends with the test.

A thread has the namespace, and every process that it starts: the machine sees nothing of it. It needs root;
without, the test fails.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor

_CLONE_NEWNS = 0x0002_0000
_MS_RDONLY, _MS_REMOUNT, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 1, 32, 16384, 1 << 18, 2
_libc = ctypes.CDLL(None, use_errno=True)


def on_small_disk(folder, options, test):
    """Call `test(folder)` while a tmpfs with these options ("size=4m") is mounted there."""

    def run():
        _call("unshare", _CLONE_NEWNS)
        _call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
        _call("mount", b"none", os.fsencode(folder), b"tmpfs", 0, options.encode())
        try:
            test(folder)
        finally:
            _call("umount2", os.fsencode(folder), _MNT_DETACH)

    folder.mkdir()
    with ThreadPoolExecutor(1) as alone:
        alone.submit(run).result()


def remount_read_only(folder):
    """From here on nobody writes there; within `test`."""
    _call("mount", b"none", os.fsencode(folder), None, _MS_REMOUNT | _MS_RDONLY, None)


def _call(name, *args):
    if getattr(_libc, name)(*args):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
