"""`outbox run`: the room of the sidecar, which lives and dies with one command. It knows no engine."""
