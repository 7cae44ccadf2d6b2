"""What counts as growth: what is higher at the end than after settling, by more than is allowed."""

from collections.abc import Sequence

import pytest
import torch

from bcg_harness.errors import HarnessError
from bcg_harness.soak.quantity import QUANTITIES, Quantity
from bcg_harness.soak.samples import Growth, Samples, number_of_samples

CPU = torch.device("cpu")


def readings(values: Sequence[int], *, planned: int = 20, allowed: int = 0) -> Samples:
    """Return samples of a quantity that had these values, one after the other."""
    following = iter(values)
    quantity = Quantity(
        name="made",
        in_bytes=False,
        allowed=allowed,
        why="",
        read=lambda device: next(following),
        missing=lambda device: None,
    )
    samples = Samples([quantity], planned)
    for number in range(len(values)):
        samples.take(CPU, replays=10 * number, seconds=float(number))
    return samples


def growth(values: Sequence[int], **arguments: int) -> Growth:
    (found,) = readings(values, **arguments).growths()
    return found


FLAT = [5] * 20
RISES: dict[str, list[int]] = {
    "steadily": list(range(20)),
    "once-in-the-middle": [5] * 12 + [6] * 8,
    "at-the-end": [5] * 19 + [6],
    "between-dips": [5, 3] * 8 + [6, 3] * 2,
}
HARMLESS: dict[str, list[int]] = {
    "flat": FLAT,
    "while-settling": [0, 1, 2, 3] + [5] * 16,
    "falls": list(range(20, 0, -1)),
    "up-and-down": [5, 9, 5, 1] * 5,
}


@pytest.mark.parametrize("values", RISES.values(), ids=RISES)
def test_what_rises_after_settling_is_growth(values: list[int]) -> None:
    assert not growth(values).within


@pytest.mark.parametrize("values", HARMLESS.values(), ids=HARMLESS)
def test_what_does_not_stay_higher_is_none(values: list[int]) -> None:
    assert growth(values).within


def test_growth_is_allowed_up_to_a_bound() -> None:
    found = growth([0] * 12 + [3] * 8, allowed=3)
    assert (found.growth, found.within) == (3, True)
    assert not growth([0] * 12 + [3] * 8, allowed=2).within


@pytest.mark.parametrize(("taken", "judged"), [(0, False), (7, False), (8, True), (13, True)])
def test_a_run_that_was_cut_short_is_judged_by_what_it_has(taken: int, judged: bool) -> None:
    assert bool(readings(FLAT[:taken]).growths()) is judged


def test_json_has_every_reading_beside_its_place_in_the_run() -> None:
    raw = readings([4, 5, 6]).to_json()
    assert raw == {"replays": [0, 10, 20], "seconds": [0.0, 1.0, 2.0], "made": [4, 5, 6]}


@pytest.mark.parametrize("quantity", QUANTITIES, ids=lambda each: each.name)
def test_every_tolerance_is_justified(quantity: Quantity) -> None:
    assert quantity.why


HOST = [quantity for quantity in QUANTITIES if quantity.missing(CPU) is None]


@pytest.mark.parametrize("quantity", HOST, ids=lambda each: each.name)
def test_a_process_has_some_of_everything(quantity: Quantity) -> None:
    tensor = torch.zeros(1)
    assert quantity.read(CPU) > 0
    del tensor


@pytest.mark.parametrize(("replays", "number"), [(100, 100), (20_000, 200)], ids=["short", "long"])
def test_a_run_has_as_many_readings_as_there_may_be(replays: int, number: int) -> None:
    assert number_of_samples(None, replays) == number


def test_a_run_with_too_few_replays_for_readings_is_refused() -> None:
    with pytest.raises(HarnessError, match="so ask for 10 replays or more"):
        number_of_samples(None, 9)
