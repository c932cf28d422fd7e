"""The files: the only place with SQL, and with the locks between processes."""
