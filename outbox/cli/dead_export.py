"""`outbox dead export`: chosen dead letters as JSON lines that `outbox import` takes."""

from __future__ import annotations

import argparse

from outbox.cli.dead_select import choice_of
from outbox.cli.export import tell_export, writing
from outbox.cli.where import for_each, settings_to_look, state_of, tell_troubles
from outbox.store.dead import chosen
from outbox.store.file import OutboxFile
from outbox.store.records import dead_records


def export(args: argparse.Namespace) -> int:
    """Write them; 5 when a file could not be read."""
    state = state_of(settings_to_look(args))
    agent, choice = choice_of(args)
    with writing(args.output) as file:

        def act(box: OutboxFile) -> None:
            with box.snapshot():
                seqs = frozenset(letter.seq for letter in chosen(box, choice))
                if seqs:
                    file.begin(box)
                for record in dead_records(box, seqs):
                    file.add(box.agent, record)

        troubles = for_each(state, agent, act)
    tell_export(file, args.output, as_json=args.json)
    return tell_troubles(troubles)
