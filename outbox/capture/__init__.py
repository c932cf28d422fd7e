"""What comes in from agent runners: their hooks as events, and the proxy between an agent and the relay's tools."""
