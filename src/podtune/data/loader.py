"""Batches for the training loop: batch s is a pure function of (seed, data fingerprint, s).

Rows of one epoch come in an order that a keyed permutation gives directly, so any step is reached without replaying
the ones before it. The global batch is decided first and each host takes the places of it that its devices hold, so
neither the number of hosts nor the number of files changes what is trained on.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32, Int64, UInt64

from podtune.config.errors import UserError
from podtune.data.packing import PackedRow, positions_of
from podtune.data.prepared import PreparedSplit

_ROUNDS = 6
_FEW_ROWS = 1024
_ENDLESS = 2**31 - 1  # grain wants a length; no run has this many steps


@dataclass(frozen=True)
class Batch:
    """Rows of this host. targets[i] is tokens[i + 1] within a segment; weights is 1.0 where that target is trained.

    segments is 0 on padding; positions restart at 0 in each segment.
    """

    tokens: Int32[np.ndarray, "rows tokens"]
    targets: Int32[np.ndarray, "rows tokens"]
    weights: Float32[np.ndarray, "rows tokens"]
    segments: Int32[np.ndarray, "rows tokens"]
    positions: Int32[np.ndarray, "rows tokens"]


class Loader:
    """Batches of a split. batch_rows counts the rows of the global batch, over all processes; places are those of them
    that this process loads, ascending (all by default). On a slice they need not lie together.

    With once=True the rows come in stored order, one pass; what is missing in the last batch is padding. That is for
    evaluation. Otherwise rows are shuffled anew each epoch and batches go on over the end of an epoch without dropping
    or repeating a row within it; a set smaller than a batch fills it from several epochs.
    """

    def __init__(
        self,
        split: PreparedSplit,
        *,
        seed: int,
        batch_rows: int,
        places: Sequence[int] | None = None,
        once: bool = False,
    ) -> None:
        if split.rows < 1:
            raise UserError(f"the {split.name} split in {split.folder} has no rows")
        self.places = np.arange(batch_rows) if places is None else np.asarray(places, np.int64)
        assert batch_rows > 0 and len(self.places) > 0, "a process holds rows of every batch"
        assert np.all(np.diff(self.places) > 0) and self.places[0] >= 0 and self.places[-1] < batch_rows
        self.split = split
        self.batch_rows = batch_rows
        self.once = once
        self._key = hashlib.blake2b(f"{seed}/{split.fingerprint}/{split.name}".encode(), digest_size=16).digest()

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which every row has been seen at least once."""
        return -(-self.split.rows // self.batch_rows)

    def rows_at(self, step: int) -> Int64[np.ndarray, "batch_rows"]:
        """The rows of the split in the global batch of this step; -1 stands for an empty row."""
        sample = np.arange(step * self.batch_rows, (step + 1) * self.batch_rows, dtype=np.int64)
        if self.once:
            return np.where(sample < self.split.rows, sample, -1)
        epoch, within = np.divmod(sample, self.split.rows)
        return shuffled(within, epoch, self.split.rows, self._key)

    def batch_at(self, step: int) -> Batch:
        """This host's rows of the batch of this step."""
        if step < 0 or (self.once and step >= self.steps_per_epoch):
            raise IndexError(f"step {step} of a loader with {self.steps_per_epoch} steps")
        rows = self.rows_at(step)[self.places]
        return assemble_batch(
            [self.split.read(row) if row >= 0 else None for row in rows.tolist()], self.split.row_tokens
        )

    def iterate(self, start_step: int = 0, *, threads: int = 2, ahead: int = 4) -> Iterator[Batch]:
        """Batches from start_step on, endless unless once; threads make `ahead` of them before they are asked for."""
        import grain  # pyright: ignore[reportMissingTypeStubs]  # imports jax

        steps = self.steps_per_epoch if self.once else _ENDLESS
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        source: grain.MapDataset[Batch] = grain.MapDataset.source(_Steps(self, start_step, steps))
        yield from source.to_iter_dataset(options, allow_nones=False)


class _Steps:
    """Steps as a random-access source for grain."""

    def __init__(self, loader: Loader, start_step: int, end_step: int) -> None:
        self.loader, self.start_step, self.end_step = loader, start_step, end_step

    def __len__(self) -> int:
        return max(0, self.end_step - self.start_step)

    def __getitem__(self, index: int) -> Batch:
        return self.loader.batch_at(self.start_step + index)


def assemble_batch(rows: list[PackedRow | None], row_tokens: int) -> Batch:
    """Pads rows to row_tokens by position, never by token id; None gives a row of padding alone."""
    shape = (len(rows), row_tokens)
    tokens, segments, trained = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
    for at, row in enumerate(rows):
        if row is not None:
            used = len(row.tokens)
            tokens[at, :used], segments[at, :used], trained[at, :used] = row.tokens, row.segments, row.trained
    targets, weights = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    targets[:, :-1] = np.where(same, tokens[:, 1:], 0)
    weights[:, :-1] = same & trained[:, 1:]
    return Batch(tokens, targets, weights, segments, positions_of(segments))


def shuffled(
    within: Int64[np.ndarray, "n"], epoch: Int64[np.ndarray, "n"], rows: int, key: bytes
) -> Int64[np.ndarray, "n"]:
    """Place `within` of an epoch -> row, a permutation of range(rows) for each (key, epoch), without a step before.

    Few rows are sorted by a hash. Many go through a Feistel network over the next even number of bits, walked until it
    lands inside range(rows) (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002): on average at most four
    times. Over few rows the network would favour some orders.
    """
    if rows <= _FEW_ROWS:
        orders = {each: _sorted_by_hash(each, rows, key) for each in np.unique(epoch).tolist()}
        return np.array([orders[e][w] for e, w in zip(epoch.tolist(), within.tolist(), strict=True)], np.int64)
    half = max(1, -(-(rows - 1).bit_length() // 2))
    mask = np.uint64((1 << half) - 1)
    first, second = np.frombuffer(key, np.uint64)
    epoch_key = _mix(epoch.astype(np.uint64) + first)
    value = within.astype(np.uint64)
    pending = np.ones(len(value), np.bool_)
    while pending.any():
        left, right = value[pending] >> np.uint64(half), value[pending] & mask
        for number in range(_ROUNDS):
            round_key = _mix(epoch_key[pending] ^ _mix(second + np.array([number], np.uint64)))
            left, right = right, left ^ (_mix(right ^ round_key) & mask)
        value[pending] = left << np.uint64(half) | right
        pending &= value >= np.uint64(rows)
    return value.astype(np.int64)


def _sorted_by_hash(epoch: int, rows: int, key: bytes) -> Int64[np.ndarray, "rows"]:
    first, second = np.frombuffer(key, np.uint64)
    epoch_key = _mix(np.array([epoch], np.uint64) + first)
    return np.argsort(_mix(_mix(np.arange(rows, dtype=np.uint64) + second) ^ epoch_key), kind="stable")


def _mix(value: UInt64[np.ndarray, "n"]) -> UInt64[np.ndarray, "n"]:
    """The finaliser of splitmix64; arithmetic wraps on purpose."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
