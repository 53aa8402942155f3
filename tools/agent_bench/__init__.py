"""How many sessions of a coding agent a cache holds at once, and what that costs.

python -m tools.agent_bench --model smollm2

Results are in docs/benchmarks/agents.md.
"""
