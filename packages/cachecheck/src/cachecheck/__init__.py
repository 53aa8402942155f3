"""Test the prefix cache of an OpenAI-compatible server from outside: `cachecheck URL`.

A correct cache is invisible: a greedy answer depends on the weights and the prompt, not on what was computed before.
Each check sends prompts of which the cache has some part, and compares the answers with answers that were computed
without it. Depends on: httpx only. Does not depend on: which server answers.
"""
