"""`retain tune`: the KV policy with the least memory that holds a bound on quality, on a user's own prompts."""
