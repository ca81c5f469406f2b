"""The tokens and learning rates of our trainer, for a peer that trains on the same.

Follows trireme/data/sampler.cpp (which windows, in which order), data/shard.h and data/dataset.cpp
(where a window lies) and optim/learning_rate.cpp. Standard library only.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path

MASK = (1 << 64) - 1
ROUNDS = 8
HEADER = struct.Struct("<8sIIQ40x")  # magic, version, bytes of a token, tokens
MAGIC = b"TRITOKEN"


def mix64(key: int, counter: int) -> int:
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def feistel(value: int, half_bits: int, key: int) -> int:
    """One permutation of 0..4^half_bits - 1."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(ROUNDS):
        left, right = right, left ^ (mix64(mix64(key, turn), right) & mask)
    return left << half_bits | right


def permuted(position: int, size: int, seed: int, epoch: int) -> int:
    """Where `position` of 0..size-1 goes; values outside the range walk on until they are in."""
    half_bits = ((size - 1).bit_length() + 1) // 2
    key = mix64(seed & MASK, epoch)
    value = feistel(position, half_bits, key)
    while value >= size:
        value = feistel(value, half_bits, key)
    return value


def sample_indices(samples: int, seed: int, begin: int, count: int) -> list[int]:
    return [permuted(position % samples, samples, seed, position // samples)
            for position in range(begin, begin + count)]


class Tokens:
    """The shards of a split as windows of seq_len + 1 tokens; window i starts at i * seq_len."""

    def __init__(self, paths: Sequence[str | Path], seq_len: int) -> None:
        self.seq_len = seq_len
        self.shards: list[tuple[Path, int, int]] = []  # path, tokens, bytes of a token
        for path in map(Path, paths):
            with path.open("rb") as file:
                magic, version, width, tokens = HEADER.unpack(file.read(HEADER.size))
            if magic != MAGIC or version != 1 or width not in (2, 4):
                raise ValueError(f"{path} is not a token shard of version 1")
            self.shards.append((path, tokens, width))
        tokens = sum(shard[1] for shard in self.shards)
        self.samples = max(0, (tokens - 1) // seq_len)

    def window(self, index: int) -> list[int]:
        begin, wanted, result = index * self.seq_len, self.seq_len + 1, []
        for path, tokens, width in self.shards:
            if begin < tokens:
                count = min(wanted - len(result), tokens - begin)
                with path.open("rb") as file:
                    file.seek(HEADER.size + begin * width)
                    code = "H" if width == 2 else "I"
                    result += struct.unpack(f"<{count}{code}", file.read(count * width))
            if len(result) == wanted:
                return result
            begin = max(0, begin - tokens)
        raise ValueError(f"window {index} is outside the {self.samples} of the shards")

    def rows(self, seed: int, step: int, global_batch: int, rank: int, ranks: int
             ) -> list[list[int]]:
        """A rank's windows of optimizer step 0, 1, ...: its contiguous part of the batch."""
        share = global_batch // ranks
        begin = step * global_batch + rank * share
        return [self.window(i) for i in sample_indices(self.samples, seed, begin, share)]


def learning_rate(optim: dict, step: int, steps: int) -> float:
    """Of step 1, 2, ..., `steps`; `optim` is that section of our config."""
    rate, warmup = optim["lr"], optim["warmup_steps"]
    if step <= warmup:
        return rate * step / warmup
    if optim["schedule"] == "constant":
        return rate
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    linear = optim["schedule"] == "linear"
    left = 1.0 - progress if linear else 0.5 * (1.0 + math.cos(math.pi * progress))
    return optim["min_lr"] + (rate - optim["min_lr"]) * left
