"""Whole networks as pure functions over typed trees of weights."""
