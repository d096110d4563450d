"""Descriptions of weights, the kinds of leaf a weight may be, and adapters."""
