"""Whether reading is worth it, by what was measured."""

from __future__ import annotations

from retain.kv.sleep import Rates


def test_what_is_not_known_is_tried() -> None:
    rates = Rates()
    assert rates.worth_it({"disk": 10**12}, 1)
    rates.computed(1000, 1.0)
    assert rates.worth_it({"disk": 10**12}, 1)


def test_the_sooner_is_chosen_and_a_slow_store_is_tried_again() -> None:
    rates = Rates()
    rates.computed(1000, 1.0)
    rates.came("disk", 10**6, 1.0)
    assert rates.worth_it({"disk": 999_000}, 1000) and not rates.worth_it({"disk": 1_010_000}, 1000)
    assert rates.worth_it({"disk": 500_000, "ram": 10**9}, 1000)  # who is not known costs nothing yet
    assert not rates.worth_it({"disk": 1_500_000}, 1000)
    assert any(rates.worth_it({"disk": 1_500_000}, 1000) for _ in range(30))


def test_the_newest_counts_most() -> None:
    rates = Rates()
    for rate in (100, 300, 500):
        rates.computed(rate, 1.0)
        rates.came("ram", rate, 1.0)
    assert rates.compute == 350 and rates.read == {"ram": 350}
