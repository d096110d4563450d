"""The training loop, its step, optimizers, checkpoints, recovery and metrics."""
