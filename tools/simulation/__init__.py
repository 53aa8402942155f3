"""Simulated replicas of the engine: its own scheduler and radix tree, on a clock that was calibrated by measurement.

Does not depend on: the model's weights, the bytes of K and V, the network.
"""
