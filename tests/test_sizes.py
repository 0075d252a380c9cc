"""Sizes as people read them."""

import pytest

from mlxft.sizes import written


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (16_489_000_000, "16.5 GB"),
        (2_436_000_000, "2.44 GB"),
        (538_060_032, "0.54 GB"),
        (99_000_000, "99.0 MB"),
        (2_800_000, "2.80 MB"),
        (52_100, "52.1 kB"),
        (0, "0.00 kB"),
    ],
)
def test_a_size_is_written_in_the_unit_that_suits_it(num_bytes, text):
    assert written(num_bytes) == text
