"""Using a trained model: generation with a cache of keys and values."""
