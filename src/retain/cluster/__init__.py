"""Replicas of the server on Ray Serve (the extra `retain[ray]`), by Ray's public API only."""
