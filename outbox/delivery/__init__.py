"""From an outbox to the relay: the pump of an agent, groups, the gate, and what an answer means."""
