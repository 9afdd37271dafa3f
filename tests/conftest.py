"""What holds for every test."""

import signal

# A shell that runs the tests in the background lets them, and the processes that they start, ignore interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
