"""What comes in from agent runners: their hooks as events, and the proxy to the relay's tools."""
