"""benchmarks/round_trip.py: what the images of a training cost beside their sampling."""

from __future__ import annotations

import json

from benchmarks import round_trip
from studies.rendering.common import fill_blocks


def test_a_measurement_gives_seconds_and_small_distances() -> None:
    row = round_trip.measure(2, 1)
    assert row["cpu_seconds"]["sampling"] > row["cpu_seconds"]["encoding"] > 0
    median, low, high = row["distance"]
    assert 0 < low <= median <= high < 0.6  # with the decoder's scale left out it is above 0.7


def test_the_table_has_the_measured_numbers() -> None:
    row = {
        "images": 64,
        "n": 5,
        "cpu_seconds": {"sampling": 4.44, "decoding": 0.2, "encoding": 0.09},
        "distance": [0.179, 0.101, 0.461],
    }
    where = {"versions": {"torch": "2"}, "device": "cpu", "threads": 1, "cpu_count": 2}
    text = round_trip.block({"environment": where, "state": "idle", "row": row})
    assert "| 64 | 4.44 | 0.20 | 0.09 | 0.179 [0.101, 0.461] | 5 |" in text


def test_the_page_shows_what_was_measured() -> None:
    content, page = json.loads(round_trip.FILE.read_text()), round_trip.PAGE.read_text()
    assert fill_blocks(page, {"round-trip": lambda: round_trip.block(content)}) == page
    seconds = content["row"]["cpu_seconds"]
    share = 100 * (1 - seconds["sampling"] / sum(seconds.values()))
    assert f"take {share:.0f} % of the seconds of {content['row']['images']} images" in page
