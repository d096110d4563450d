"""Packing: rows are filled best fit decreasing, and say of their examples what training isolates them by."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podtune.data.loader import assemble_batch
from podtune.data.packing import (
    assemble_row,
    one_example_a_row,
    pack_examples,
    packing_efficiency,
    positions_of,
)

LENGTHS = st.lists(st.integers(1, 24), max_size=60)


def pack_slowly(lengths: list[int], row_tokens: int) -> list[list[int]]:
    """Best fit decreasing as the book says it: every row is looked at for every example."""
    rows: list[list[int]] = []
    free: list[int] = []
    for example in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fitting = [(space, row) for row, space in enumerate(free) if space >= lengths[example]]
        row = min(fitting)[1] if fitting else len(rows)
        if not fitting:
            rows.append([])
            free.append(row_tokens)
        rows[row].append(example)
        free[row] -= lengths[example]
    return rows


@given(lengths=LENGTHS)
@settings(max_examples=200, deadline=None)
def test_packing_fills_rows_exactly_as_best_fit_decreasing_does(lengths: list[int]) -> None:
    def filled(rows: list[list[int]]) -> list[int]:  # which of two equally full rows is taken may differ
        return sorted(sum(lengths[example] for example in row) for row in rows)

    assert filled(list(pack_examples(lengths, 24))) == filled(pack_slowly(lengths, 24))


@given(lengths=LENGTHS)
@settings(max_examples=100, deadline=None)
def test_every_example_is_in_exactly_one_row_and_no_row_overflows(lengths: list[int]) -> None:
    packing = pack_examples(lengths, 24)
    assert sorted(example for row in packing for example in row) == list(range(len(lengths)))
    assert all(row and sum(lengths[example] for example in row) <= 24 for row in packing)


def test_packing_is_the_same_each_time_and_keeps_the_order_of_equal_lengths() -> None:
    lengths = np.random.default_rng(0).integers(1, 50, 2000)
    first, second = pack_examples(lengths, 64), pack_examples(lengths, 64)
    assert np.array_equal(first.order, second.order)
    assert np.array_equal(first.starts, second.starts)
    assert list(pack_examples([8, 8, 8, 8], 16)) == [[0, 1], [2, 3]]


def test_a_million_examples_of_mixed_lengths_pack_densely_in_seconds() -> None:
    lengths = np.minimum(np.random.default_rng(0).lognormal(5, 1, 1_000_000).astype(np.int64) + 1, 2048)
    packing = pack_examples(lengths, 2048)
    assert packing_efficiency(int(lengths.sum()), len(packing), 2048) > 0.99


@pytest.mark.parametrize("lengths", [[0], [25], [3, -1]])
def test_a_length_that_no_row_holds_is_an_error_not_a_silent_loss(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="rows hold 1 to 24 tokens"):
        pack_examples(lengths, 24)


def test_without_packing_every_example_has_a_row_of_its_own() -> None:
    assert list(one_example_a_row(3)) == [[0], [1], [2]]


def test_segments_number_the_examples_of_a_row_and_positions_restart() -> None:
    """The bookkeeping that keeps packed examples from seeing one another (pitfall 11)."""
    row = assemble_row([(np.arange(n, dtype=np.int32), np.ones(n, np.bool_)) for n in (3, 1, 2)])
    assert row.segments.tolist() == [1, 1, 1, 2, 3, 3]
    batch = assemble_batch([row], 8)
    assert batch.segments[0].tolist() == [1, 1, 1, 2, 3, 3, 0, 0]
    assert batch.positions[0].tolist() == [0, 1, 2, 0, 0, 1, 0, 1]


def test_no_target_reaches_over_the_border_of_a_segment() -> None:
    tokens = [np.array([10, 11, 12], np.int32), np.array([20, 21], np.int32)]
    row = assemble_row([(part, np.ones(len(part), np.bool_)) for part in tokens])
    batch = assemble_batch([row], 7)
    assert batch.targets[0].tolist() == [11, 12, 0, 21, 0, 0, 0]
    assert batch.weights[0].tolist() == [1, 1, 0, 1, 0, 0, 0]


def test_token_id_zero_is_a_token_and_padding_is_known_by_position() -> None:
    row = assemble_row([(np.zeros(3, np.int32), np.array([False, True, True]))])
    batch = assemble_batch([row, None], 5)
    assert batch.segments.tolist() == [[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]]
    assert batch.weights.tolist() == [[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]


@given(segments=st.lists(st.integers(0, 3), min_size=1, max_size=20).map(sorted))
def test_positions_count_from_the_start_of_each_segment(segments: list[int]) -> None:
    found = positions_of(np.array([segments], np.int32))[0].tolist()
    expected = [index - segments.index(segment) for index, segment in enumerate(segments)]
    assert found == expected
