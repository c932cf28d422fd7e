"""A host for tests whose PID 1 is the real systemd, in namespaces of its own: this machine is not touched.

It needs root, and unshare and nsenter of util-linux. Its network is the test's, so that a relay on loopback
is reached. The package lies in /opt there, readable for a service that sees no home.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from processes import ROOT, wait_for

LOG = "/run/outbox.log"
_CGROUPS = Path("/sys/fs/cgroup")

_TARGETS = ("sysinit", "basic", "sockets", "shutdown", "network-online", "nss-lookup", "multi-user")

# An engine that hangs as soon as /run/hang is there: its lock is taken and never let go.
HANGING = """
import os, sys, threading, time
from outbox.delivery.engine import Engine
start = Engine.start
def started(self, workers):
    start(self, workers)
    def hang():
        while not os.path.exists(sys.argv[0]):
            time.sleep(0.05)
        self._cond.acquire()
        threading.Event().wait()
    threading.Thread(target=hang, daemon=True).start()
Engine.start = started
sys.argv[0:2] = sys.argv[1:2]
from outbox.cli import main
sys.exit(main(sys.argv[1:]))
"""

_INSIDE = """
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys
mount -t tmpfs tmpfs /run
mkdir /run/etc /run/lock
cp -a /etc/. /run/etc && rm -rf /run/etc/systemd /run/etc/relay-outbox && mkdir -p /run/etc/systemd/system
mount --bind /run/etc /etc
mount -t tmpfs -o mode=755 tmpfs /var/lib
mount -t tmpfs -o mode=755 tmpfs /var/log
mount --bind "$1/units" /usr/lib/systemd/system
mount -t tmpfs tmpfs /usr/lib/systemd/system-generators
mount -t tmpfs -o mode=755 tmpfs /opt
mkdir -p /opt/python /opt/packages /opt/source /opt/relay-outbox/bin
mount --bind "$2" /opt/python
mount --bind "$3" /opt/packages
mount --bind "$4" /opt/source
cp "$1"/bin/* /opt/relay-outbox/bin/
if [ -d /sys/fs/cgroup/systemd ]; then
  umount -R /sys/fs/cgroup
  mount -t tmpfs tmpfs /sys/fs/cgroup
  mkdir /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
  mount -t cgroup -o none,name=systemd cgroup /sys/fs/cgroup/systemd
  mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified
else
  umount -R /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
fi
mount --make-rshared /
exec env -i PATH="$PATH" container=test \\
  /lib/systemd/systemd --system --unit=multi-user.target --show-status=no --log-target=console
"""


class SystemdHost:
    """`with SystemdHost() as host:` boots it; everything in it ends with the block."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="systemd-host-"))
        self._name = f"outbox-test-{os.getpid()}-{self.folder.name[-8:]}"
        self._unshare = None
        self._init = 0

    def __enter__(self):
        assert os.geteuid() == 0, (
            "these tests boot a systemd in namespaces of their own, and need root for it"
        )
        self.folder.chmod(0o755)
        self._make_files()
        try:
            self._boot()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_):
        self._end()

    def _make_files(self):
        units, programs = self.folder / "units", self.folder / "bin"
        units.mkdir()
        programs.mkdir()
        for name in _TARGETS:
            (units / f"{name}.target").write_text("[Unit]\nDefaultDependencies=no\n", "utf-8")
        found = (
            "LD_LIBRARY_PATH=/opt/python/lib PYTHONPATH=/opt/source:/opt/packages PYTHONDONTWRITEBYTECODE=1"
        )
        start = f"#!/bin/sh\n{found} exec /opt/python/bin/python3"
        for name, words in {"outbox": "-m outbox", "hanging": f"-c '{HANGING}' /run/hang"}.items():
            (programs / name).write_text(f'{start} {words} "$@"\n', "utf-8")
            (programs / name).chmod(0o755)

    def _boot(self):
        folders = [sys.base_prefix, sysconfig.get_path("purelib"), str(ROOT)]
        namespaces = ["--fork", "--pid", "--mount", "--uts", "--ipc", "--cgroup", "--kill-child"]
        join = "".join(f"echo $$ > {folder}/cgroup.procs && " for folder in self._cgroups(make=True))
        inside = ["bash", "-c", _INSIDE, "bash", str(self.folder), *folders]
        with (self.folder / "boot.log").open("wb") as log:
            self._unshare = subprocess.Popen(
                ["bash", "-c", f'{join} exec unshare "$@"', "bash", *namespaces, *inside],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        children = Path(f"/proc/{self._unshare.pid}/task/{self._unshare.pid}/children")
        self._init = int(wait_for(lambda: self._is_up() and children.read_text().split()[:1])[0])
        wait_for(lambda: self.systemctl("is-system-running", check=False) == "running", 60)

    def _is_up(self):
        assert self._unshare.poll() is None, (self.folder / "boot.log").read_text("utf-8")
        return True

    def _cgroups(self, *, make=False):
        """A folder of our own in each hierarchy, so that what systemd makes there is below it."""
        found = []
        for hierarchy in [_CGROUPS, *_CGROUPS.iterdir()]:
            if (hierarchy / "cgroup.procs").exists() and hierarchy.is_mount() and hierarchy.name != "cpuset":
                own = hierarchy / self._name
                if make:
                    own.mkdir()
                found.append(own)
        return found

    def _end(self):
        if self._unshare is not None:
            self._unshare.kill()  # --kill-child: PID 1 goes too, and with it whatever runs there
            self._unshare.wait(30)
        for folder in self._cgroups():
            if folder.exists():
                wait_for(lambda folder=folder: _removed(folder))
        shutil.rmtree(self.folder)

    # What tests do in it -----------------------------------------------------------------------------------

    def run(self, *words, check=True, stdin=None, user=None):
        """A command there, as root or as `(user, group)`: what it prints."""
        drop = (
            [] if user is None else ["setpriv", f"--reuid={user[0]}", f"--regid={user[1]}", "--clear-groups"]
        )
        done = subprocess.run(
            ["nsenter", "-t", str(self._init), "-m", "-p", "-C", "--", *drop, *words],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd="/",
        )
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr, self.log()[-2_000:])
        return done.stdout.strip()

    def systemctl(self, *words, check=True):
        """`systemctl` there."""
        return self.run("systemctl", *words, check=check)

    def show(self, unit, name):
        """One property of a unit."""
        return self.systemctl("show", "--value", "-p", name, unit)

    def write(self, path, text, mode="644"):
        """A file there."""
        self.run("install", "-D", "-m", mode, "/dev/stdin", path, stdin=text)

    def drop_in(self, unit, text):
        """A drop-in for a unit."""
        self.write(f"/etc/systemd/system/{unit}.d/{time.monotonic_ns()}.conf", text)
        self.systemctl("daemon-reload")

    def log(self):
        """What the daemon said so far."""
        return self.run("sh", "-c", f"cat {LOG} 2>/dev/null || true", check=False)


def _removed(folder):
    """Whether a control group and all below it are gone; they can be, once nobody is in them."""
    try:
        for path, _, _ in os.walk(folder, topdown=False):
            Path(path).rmdir()
    except OSError:
        return False
    return True
