"""kill -9 of daemon, relay, programs, commands and hooks at moments of chance; then what was told is true."""

import random

from kill_fleet import Fleet


def test_what_was_acknowledged_survives_any_kills(tmp_path, rounds, seed):
    """Nothing acknowledged is missing, nothing is there twice, and each agent's events are in their order."""
    fleet = Fleet(tmp_path, random.Random(seed))
    with fleet.running():
        for number in range(rounds(4)):
            fleet.round(number)
        fleet.calm()
        fleet.check()
    print(fleet.told())
