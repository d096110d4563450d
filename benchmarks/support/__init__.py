"""What the benchmarks share: the measured programs, taking turns, and what they start from."""
