"""Whether reading is worth it, by what was measured."""

from __future__ import annotations

from retain.kv.offload.cost_model import LoadCostModel


def test_what_is_not_known_is_tried() -> None:
    rates = LoadCostModel()
    assert rates.should_load({"disk": 10**12}, 1)
    rates.record_compute(1000, 1.0)
    assert rates.should_load({"disk": 10**12}, 1)


def test_the_sooner_is_chosen_and_a_slow_store_is_tried_again() -> None:
    rates = LoadCostModel()
    rates.record_compute(1000, 1.0)
    rates.record_read("disk", 10**6, 1.0)
    assert rates.should_load({"disk": 999_000}, 1000) and not rates.should_load({"disk": 1_010_000}, 1000)
    assert rates.should_load({"disk": 500_000, "ram": 10**9}, 1000)  # who is not known costs nothing yet
    assert not rates.should_load({"disk": 1_500_000}, 1000)
    assert any(rates.should_load({"disk": 1_500_000}, 1000) for _ in range(30))


def test_the_newest_counts_most() -> None:
    rates = LoadCostModel()
    for rate in (100, 300, 500):
        rates.record_compute(rate, 1.0)
        rates.record_read("ram", rate, 1.0)
    assert rates.compute_rate == 350 and rates.read_rates == {"ram": 350}
