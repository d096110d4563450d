"""Fetching models and streaming their tensors and tokenizers. numpy only."""
