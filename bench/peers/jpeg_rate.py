"""What Python's libraries do with the JPEG files of a folder, in images a second of one thread's processor time:
decode them, and go the whole way to a scaled tensor. Beside 'trireme bench images FOLDER --json'.

    jpeg_rate.py FOLDER [--side 224] [--rounds 5] [--decoder pil|torchvision]
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from image_files import DECODERS, choose_decoder


def decode_by_pil(data: bytes) -> int:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        image.load()
        return image.width


def decode_by_torchvision(data: bytes) -> int:
    from torchvision.io import ImageReadMode, decode_jpeg

    return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB).shape[2]


ALONE = {"pil": decode_by_pil, "torchvision": decode_by_torchvision}


def rate(work: Callable[[object], object], items: Sequence[object]) -> float:
    began = time.process_time()
    for item in items:
        work(item)
    return len(items) / (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--decoder", choices=["auto", *DECODERS], default="auto")
    options = parser.parse_args()
    torch.set_num_threads(1)
    decoder = choose_decoder(options.decoder)
    paths = [str(path) for path in sorted(options.folder.rglob("*.jpg"))[: options.images]]
    if not paths:
        parser.error(f"no *.jpg in {options.folder}")
    files = [Path(path).read_bytes() for path in paths]
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    deviation = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def whole(path: str) -> torch.Tensor:
        return (DECODERS[decoder](path, options.side, True) / 255.0 - mean) / deviation

    ways = {"alone_per_s": (ALONE[decoder], files), "whole_per_s": (whole, paths)}
    for work, items in ways.values():
        rate(work, items)  # brings caches and clocks up
    samples = {name: [] for name in ways}
    for _ in range(options.rounds):
        for name, (work, items) in ways.items():
            samples[name].append(rate(work, items))
    medians = {name: statistics.median(found) for name, found in samples.items()}
    print(json.dumps({"peer": decoder, "side": options.side, "images": len(paths),
                      "mean_bytes": sum(map(len, files)) / len(files), **medians, "samples": samples,
                      "torch": torch.__version__}))


if __name__ == "__main__":
    main()
