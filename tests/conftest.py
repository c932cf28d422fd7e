"""What holds for every test: the signals that a process begins with."""

import signal

# A job in the background of a shell begins with Ctrl-C ignored, and so would what a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
