"""What every test of chaos begins with: how many rounds it plays, and the seed of its chances, printed.

`--rounds 200` plays each of them 200 times (`make chaos`), `--chaos-seed N` plays one again.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "store"))  # what its tests share serves here too


def pytest_addoption(parser):
    """The options, known where `tests/chaos` stands on the command line."""
    parser.addoption("--rounds", type=int, help="rounds of each test of chaos; without it, a short number")
    parser.addoption("--chaos-seed", type=int, help="the seed that a test printed when it failed")


@pytest.fixture
def rounds(request):
    """How many rounds to play: `rounds(3)` is 3 where `--rounds` says nothing else."""
    asked = request.config.getoption("--rounds", default=None)
    return lambda short: short if asked is None else asked


@pytest.fixture
def seed(request):
    """The seed of this test's chances; a failure shows it among what was printed."""
    given = request.config.getoption("--chaos-seed", default=None)
    chosen = int.from_bytes(os.urandom(4), "big") if given is None else given
    print(f"to play this again: --chaos-seed {chosen}")
    return chosen
