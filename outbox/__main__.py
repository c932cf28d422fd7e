"""`python -m outbox`: the command, where its script is not on the path."""

import sys

from outbox.cli import main

if __name__ == "__main__":
    sys.exit(main())
