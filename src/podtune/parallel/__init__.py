"""Devices, meshes, sharding rules and processes."""
