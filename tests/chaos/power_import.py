"""Another host's outboxes, on a disk of their own: they grow, and a run takes them in now and then."""

import contextlib
import io
from pathlib import Path

from boxes import NOW, deliver, kill, make_box, put, state_in
from command_line import in_process

from outbox.cli import import_intake, main
from outbox.cli.export import writing
from outbox.store.dropping import expire
from outbox.store.records import everything

_RECORDS_A_COMMIT = 4


class Elsewhere:
    """The other host. `noted` is called with what each commit of an import took in, once that is done."""

    def __init__(self, folder, home, chance, monkeypatch, noted):
        """The commands of this process take in what is below `folder` into the state directory of `home`."""
        self._state, self._chance = state_in(folder / "state"), chance
        self._export = folder / "export.jsonl"
        in_process(monkeypatch, Path(home))
        monkeypatch.setattr(import_intake, "_BATCH_RECORDS", _RECORDS_A_COMMIT)
        monkeypatch.setattr(import_intake, "now_ms", lambda: NOW)
        monkeypatch.setattr(import_intake, "take_in", self._noting(import_intake.take_in, noted))

    def _noting(self, real, noted):
        def take_in(box, found, **options):
            results = real(box, found, **options)
            noted(box, results)
            return results

        return take_in

    def take_in(self, agent, events):
        """These events happen there, to some of them something, and all that is known there is imported."""
        box = make_box(self._state, agent, max_events=300, max_dead=100)
        put(box, *events)
        act = self._chance.choice((deliver, kill, self._expire, None))
        if act is not None:
            act(box)
        if as_lines := self._chance.random() < 0.5:
            self._write(box)
        path = box.path
        box.close()
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = main(["import", "--agent", agent, str(self._export if as_lines else path)])
        assert status == 0 or (status == 4 and "is full" in said.getvalue()), said.getvalue()

    def _expire(self, box):
        expire(box, NOW + 1, now_ms=NOW, most=1)

    def _write(self, box):
        self._export.unlink(missing_ok=True)
        with writing(self._export) as export, box.snapshot():
            export.begin(box)
            for record in everything(box):
                export.add(box.agent, record)
