"""Offloading: spans of pages in tiers below the pool. Does not depend on: prefixes, policies, requests."""
