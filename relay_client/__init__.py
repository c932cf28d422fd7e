"""One relay over HTTP. Knows no queue."""
