"""The daemon: one process that delivers for all agents of a host, and the flush that needs none."""
