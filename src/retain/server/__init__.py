"""`retain serve`: an OpenAI-compatible HTTP server. Does not depend on: how the engine batches or stores K and V."""
