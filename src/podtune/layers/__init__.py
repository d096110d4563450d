"""The parts networks are made of: norms, positions, attention, feed-forward."""
