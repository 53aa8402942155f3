"""Selective loading: only the important tokens of a span (IMPRESS, FAST'25). Does not depend on: requests."""
