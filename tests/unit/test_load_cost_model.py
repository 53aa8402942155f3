"""Whether to load or to compute, by measured rates."""

from __future__ import annotations

import logging

import pytest

from retain.kv.stores.cost_model import LoadCostModel


def test_unknown_rates_are_tried() -> None:
    rates = LoadCostModel()
    assert rates.should_load({"disk": 10**12}, 1)
    rates.record_compute(1000, 1.0)
    assert rates.should_load({"disk": 10**12}, 1)


def test_the_sooner_way_is_chosen_and_a_slow_store_is_tried_again() -> None:
    rates = LoadCostModel()
    rates.record_compute(1000, 1.0)
    rates.record_read("disk", 10**6, 1.0)
    assert rates.should_load({"disk": 999_000}, 1000) and not rates.should_load({"disk": 1_010_000}, 1000)
    assert rates.should_load({"disk": 500_000, "ram": 10**9}, 1000)  # an unknown store costs nothing yet
    assert not rates.should_load({"disk": 1_500_000}, 1000)
    assert any(rates.should_load({"disk": 1_500_000}, 1000) for _ in range(30))


def test_the_newest_rate_weighs_half() -> None:
    rates = LoadCostModel()
    for rate in (100, 300, 500):
        rates.record_compute(rate, 1.0)
        rates.record_read("ram", rate, 1.0)
    assert rates.compute_rate == 350 and rates.read_rates == {"ram": 350}


def test_a_slow_store_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rates = LoadCostModel()
    rates.record_compute(1000, 1.0)
    rates.record_read("disk", 10**6, 1.0)
    for _ in range(3):
        assert not rates.should_load({"disk": 9_000_000}, 1000)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "tier disk is slow: it reads 1.0 MB/s" in record.getMessage()
