"""The loader: batch s is a pure function of (seed, fingerprint, s), whoever asks and in whatever company."""

import subprocess
import sys
from collections import Counter
from dataclasses import fields
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podtune.data.loader import Batch, Loader, shuffled
from podtune.data.packing import assemble_row
from podtune.data.prepared import PreparedSplit, encode_row, shard_name
from podtune.data.records import write_tfrecord

ROW_TOKENS = 6


def batches_equal(one: Batch, other: Batch) -> bool:
    """Whether two batches agree in every array."""
    return all(np.array_equal(getattr(one, part.name), getattr(other, part.name)) for part in fields(Batch))


def make_split(folder: Path, rows: int, files: int = 1, fingerprint: str = "f") -> PreparedSplit:
    """Rows whose first token is their number, over this many files; the row lengths are skewed."""
    each = -(-rows // files)
    sizes = tuple(min(each, rows - start) for start in range(0, rows, each))
    for shard, size in enumerate(sizes):
        records = []
        for number in range(shard * each, shard * each + size):
            length = ROW_TOKENS if number % 5 == 0 else 2
            tokens = np.full(length, number, np.int32)
            records.append(encode_row(assemble_row([(tokens, np.arange(length) > 0)])))
        write_tfrecord(folder / shard_name("train", shard, len(sizes)), records)
    return PreparedSplit(folder, "train", fingerprint, rows, ROW_TOKENS, rows, 0, 0, sizes)


def numbers(batch: Batch) -> list[int]:
    return batch.tokens[:, 0].tolist()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> PreparedSplit:
    return make_split(tmp_path_factory.mktemp("split"), rows=23, files=3)


@given(step=st.integers(0, 10**6), seed=st.integers(0, 2**32 - 1), batch_rows=st.integers(1, 40))
@settings(max_examples=50, deadline=None)
def test_a_batch_depends_on_seed_fingerprint_and_step_alone(split, step: int, seed: int, batch_rows: int) -> None:
    first = Loader(split, seed=seed, batch_rows=batch_rows)
    first.batch_at((step * 7) % 100)  # what was asked before does not matter
    again = Loader(split, seed=seed, batch_rows=batch_rows)
    assert batches_equal(first.batch_at(step), again.batch_at(step))


def test_seed_fingerprint_and_epoch_each_change_the_order(tmp_path: Path, split: PreparedSplit) -> None:
    other_data = make_split(tmp_path, rows=23, fingerprint="g")
    orders = [
        numbers(Loader(split, seed=0, batch_rows=23).batch_at(0)),
        numbers(Loader(split, seed=0, batch_rows=23).batch_at(1)),
        numbers(Loader(split, seed=1, batch_rows=23).batch_at(0)),
        numbers(Loader(other_data, seed=0, batch_rows=23).batch_at(0)),
    ]
    assert all(sorted(order) == list(range(23)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@pytest.mark.parametrize("batch_rows", [1, 4, 8, 30])
def test_no_row_is_dropped_or_repeated_within_an_epoch_though_batches_straddle_epochs(split, batch_rows: int) -> None:
    loader = Loader(split, seed=3, batch_rows=batch_rows)
    seen: list[int] = []
    for step in range(-(-4 * 23 // batch_rows)):
        seen += numbers(loader.batch_at(step))
    for epoch in range(4):
        assert sorted(seen[epoch * 23 : (epoch + 1) * 23]) == list(range(23))


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_sets_of_1_2_3_and_7_rows_fill_batches_of_8(tmp_path: Path, rows: int) -> None:
    """Pitfalls 13 and 36: a set smaller than a batch neither trains nothing nor divides by nothing."""
    loader = Loader(make_split(tmp_path, rows), seed=0, batch_rows=8)
    assert loader.steps_per_epoch == 1
    counts = Counter(numbers(loader.batch_at(0)) + numbers(loader.batch_at(1)))
    assert sum(counts.values()) == 16
    assert max(counts.values()) - min(counts.values()) <= 1


def test_the_stream_from_any_step_equals_the_batches_asked_for_one_by_one(split: PreparedSplit) -> None:
    """Pitfall 16, the data side: resuming at any step, over the borders of epochs, gives what would have come."""
    loader = Loader(split, seed=5, batch_rows=4)
    expected = [loader.batch_at(step) for step in range(20)]
    for start in (0, 1, 5, 6, 13):
        stream = loader.iterate(start)
        assert all(map(batches_equal, islice(stream, 20 - start), expected[start:]))
        stream.close()


def test_any_number_of_hosts_and_of_files_gives_the_same_global_batches(tmp_path: Path) -> None:
    """Pitfall 40: neither has to divide the other."""
    rows = 19
    splits = []
    for files in range(1, 9):
        folder = tmp_path / str(files)
        folder.mkdir()
        splits.append(make_split(folder, rows, files))
    for hosts in range(1, 9):
        batch_rows = 3 * hosts
        reference = Loader(splits[0], seed=0, batch_rows=batch_rows).batch_at(3)
        for split in splits:
            parts = [
                Loader(split, seed=0, batch_rows=batch_rows, places=range(3 * host, 3 * host + 3)).batch_at(3)
                for host in range(hosts)
            ]
            assert np.array_equal(np.concatenate([part.tokens for part in parts]), reference.tokens)
            assert np.array_equal(np.concatenate([part.weights for part in parts]), reference.weights)


def test_every_order_of_a_small_set_is_equally_likely() -> None:
    orders = Counter(tuple(shuffled_epoch(4, epoch)) for epoch in range(4800))
    assert len(orders) == 24
    # chi-squared with 23 degrees of freedom: 60 is beyond the 99.996th percentile
    assert sum((count - 200) ** 2 / 200 for count in orders.values()) < 60


def test_the_shuffle_of_a_large_set_favours_no_place_and_no_neighbour() -> None:
    rows, bins, epochs = 1600, 16, 100
    met, neighbours = np.zeros((bins, bins)), 0
    for epoch in range(epochs):
        order = shuffled_epoch(rows, epoch)
        assert np.array_equal(np.sort(order), np.arange(rows))
        np.add.at(met, (np.arange(rows) * bins // rows, order * bins // rows), 1)
        neighbours += int((np.diff(order) == 1).sum())
    expected = epochs * rows / bins**2
    # chi-squared over its degrees of freedom, (bins - 1)^2 = 225: standard deviation 0.094
    assert abs(((met - expected) ** 2 / expected).sum() / (bins - 1) ** 2 - 1) < 0.4
    assert abs(neighbours - epochs) < 5 * epochs**0.5


def shuffled_epoch(rows: int, epoch: int) -> np.ndarray:
    return shuffled(np.arange(rows), np.full(rows, epoch), rows, b"0123456789abcdef")


def test_a_row_is_reached_in_the_same_time_at_any_step_of_a_huge_set() -> None:
    rows = 10**9
    found = shuffled(np.array([0, 5, rows - 1]), np.array([0, 10**6, 10**6]), rows, b"0123456789abcdef")
    assert all(0 <= row < rows for row in found.tolist())


def test_one_pass_for_evaluation_sees_every_row_once_and_fills_up_with_padding(split: PreparedSplit) -> None:
    loader = Loader(split, seed=0, batch_rows=8, once=True)
    batches = list(loader.iterate())
    assert len(batches) == loader.steps_per_epoch == 3
    used = np.concatenate([batch.segments[:, 0] > 0 for batch in batches])
    tokens = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert tokens[used].tolist() == list(range(23))
    assert batches[-1].weights[-1].sum() == 0
    with pytest.raises(IndexError):
        loader.batch_at(3)


def test_a_host_whose_rows_lie_apart_loads_just_those(split: PreparedSplit) -> None:
    whole = Loader(split, seed=0, batch_rows=8).batch_at(1)
    mine = Loader(split, seed=0, batch_rows=8, places=[0, 1, 5, 7]).batch_at(1)
    assert np.array_equal(mine.tokens, whole.tokens[[0, 1, 5, 7]])
    assert np.array_equal(mine.weights, whole.weights[[0, 1, 5, 7]])


HOST = """
import sys
from pathlib import Path
from podtune.data.loader import Loader
from podtune.data.prepared import PreparedSplit
sizes = tuple(map(int, sys.argv[3].split(",")))
split = PreparedSplit(Path(sys.argv[1]), "train", "f", sum(sizes), 6, sum(sizes), 0, 0, sizes)
loader = Loader(split, seed=0, batch_rows=6, places=range(3 * int(sys.argv[2]), 3 * int(sys.argv[2]) + 3))
stream = loader.iterate()
for step in range(2 * loader.steps_per_epoch):
    print(step, next(stream).tokens[:, 0].tolist())
stream.close()
"""


def test_two_processes_with_skewed_rows_stop_at_the_same_step(tmp_path: Path) -> None:
    """Pitfall 14: the files differ in rows and the rows in length, and no host runs out of batches before the other."""
    split = make_split(tmp_path, rows=23, files=3)
    arguments = [str(tmp_path), "0", ",".join(map(str, split.shard_rows))]
    hosts = [
        subprocess.Popen(
            [sys.executable, "-c", HOST, arguments[0], str(host), arguments[2]], stdout=subprocess.PIPE, text=True
        )
        for host in (0, 1)
    ]
    lines = [host.communicate(timeout=120)[0].splitlines() for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0]
    assert len(lines[0]) == len(lines[1]) == 2 * 4
    assert lines[0] != lines[1]


def test_stopping_early_leaves_no_thread_behind(split: PreparedSplit) -> None:
    import threading
    import time

    before = threading.active_count()
    stream = Loader(split, seed=0, batch_rows=4).iterate()
    next(stream)
    stream.close()
    del stream
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert threading.active_count() <= before
