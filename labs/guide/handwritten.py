#!/usr/bin/env python3
"""Real handwriting that needs no network: scikit-learn's 1,797 digits as files of MNIST's format.

    labs/guide/handwritten.py [--out data/handwritten] [--val 297] [--seed 1]
    trireme train labs/guide/handwritten.yaml -n 2

The digits are those of the package scikit-learn (Alpaydin and Kaynak 1998, 8 x 8 pixels of 17 shades, written by 43
people), which is read without being imported: it has to be installed, and nothing that it depends on does. They are
enlarged to 28 x 28 and divided by a drawn order, the same for a seed. Exit code 3: the package is not installed.
"""
import argparse
import csv
import gzip
import importlib.util
import pathlib
import random
import struct
import sys

SIDE, SHADES, DRAWN, MARGIN = 8, 16, 28, 2
EXIT_ENVIRONMENT = 3


def find_digits():
    """The file of the installed package; None where there is none."""
    package = importlib.util.find_spec("sklearn")
    for folder in package.submodule_search_locations if package else ():
        path = pathlib.Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if path.is_file():
            return path
    return None


def read_digits(path):
    """(pixels, label) of each, pixels from 0 to 16 row by row."""
    with gzip.open(path, "rt", encoding="ascii") as file:
        rows = [[int(float(value)) for value in row] for row in csv.reader(file)]
    return [(row[:-1], row[-1]) for row in rows]


def neighbours():
    """For each pixel between the margins the two that it lies between, and the share of the second."""
    inner = DRAWN - 2 * MARGIN
    for i in range(inner):
        place = min(max((i + 0.5) * SIDE / inner - 0.5, 0.0), SIDE - 1.0)
        first = min(int(place), SIDE - 2)
        yield first, place - first


TAPS = list(neighbours())


def enlarge(pixels):
    """28 x 28 bytes, linear between pixels, white on black with an empty margin as MNIST has it."""
    rows = [pixels[SIDE * y : SIDE * (y + 1)] for y in range(SIDE)]
    wide = [[row[at] + share * (row[at + 1] - row[at]) for at, share in TAPS] for row in rows]
    empty, side = bytes(DRAWN * MARGIN), bytes(MARGIN)
    drawn = bytearray(empty)
    for at, share in TAPS:
        line = [above + share * (below - above) for above, below in zip(wide[at], wide[at + 1])]
        drawn += side + bytes(round(255 / SHADES * value) for value in line) + side
    return bytes(drawn + empty)


def write_idx(folder, name, digits):
    """Big-endian headers: the type of bytes and the number of dimensions, then each dimension."""
    images = struct.pack(">IIII", 0x0803, len(digits), DRAWN, DRAWN) + b"".join(enlarge(pixels) for pixels, _ in digits)
    labels = struct.pack(">II", 0x0801, len(digits)) + bytes(label for _, label in digits)
    (folder / f"{name}-images-idx3-ubyte").write_bytes(images)
    (folder / f"{name}-labels-idx1-ubyte").write_bytes(labels)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("data/handwritten"))
    parser.add_argument("--val", type=int, default=297, help="number of held-out digits")
    parser.add_argument("--seed", type=int, default=1, help="seed of their order")
    options = parser.parse_args()
    path = find_digits()
    if not path:
        print(f"handwritten: {sys.executable} has no package scikit-learn; 'pip install scikit-learn' gets it",
              file=sys.stderr)
        return EXIT_ENVIRONMENT
    digits = read_digits(path)
    if not 0 < options.val < len(digits):
        parser.error(f"--val is {options.val}; there are {len(digits)} digits, and both parts need some")
    random.Random(options.seed).shuffle(digits)
    options.out.mkdir(parents=True, exist_ok=True)
    write_idx(options.out, "train", digits[options.val :])
    write_idx(options.out, "t10k", digits[: options.val])
    print(f"{len(digits) - options.val} + {options.val} digits in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
