"""Whether to load tokens from a store or to compute them, by measured rates."""

from __future__ import annotations


class LoadCostModel:
    """What was measured: tokens computed a second, and bytes read, by store."""

    def __init__(self) -> None:
        self.compute_rate: float | None = None
        self.read_rates: dict[str, float] = {}

    def record_compute(self, num_tokens: int, seconds: float) -> None:
        """Half of what we believe is the newest."""
        rate = num_tokens / seconds
        self.compute_rate = rate if self.compute_rate is None else (self.compute_rate + rate) / 2

    def record_read(self, store: str, num_bytes: int, seconds: float) -> None:
        """The same for a store."""
        rate = num_bytes / seconds
        self.read_rates[store] = (self.read_rates.get(store, rate) + rate) / 2

    def should_load(self, bytes_by_store: dict[str, int], num_tokens: int) -> bool:
        """Whether to read so many bytes is sooner done than to compute so many tokens; so, where it is not known.

        A store that was refused is believed to be a little faster the next time: what was slow once may not be now.
        """
        known = {s: n / self.read_rates[s] for s, n in bytes_by_store.items() if s in self.read_rates}
        sooner = self.compute_rate is None or sum(known.values()) < num_tokens / self.compute_rate
        if not sooner:
            self.read_rates |= {s: 1.02 * self.read_rates[s] for s in known}
        return sooner
