"""What is minimised: pure functions from weights and a batch to a loss."""
