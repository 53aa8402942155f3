"""`retain fit`: fit a gate to what a model needs of its prompts. Does not depend on: engines, schedulers, servers."""
