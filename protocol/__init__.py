"""What Farflung nodes agree on: pure functions and values, no I/O, no clock, no global randomness."""
