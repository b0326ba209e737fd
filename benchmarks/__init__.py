"""Time and memory, by hand: see README.md."""
