"""Model families: how each one names and shapes its tensors, and their loading and saving."""
