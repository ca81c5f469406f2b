"""Writes a folder of JPEG files by class, FOLDER/c0000/00000.jpg, ...: shapes over noise that is as rough as a
photograph, of about 256 x 256 pixels.

    python make_pictures.py FOLDER --images 5120 --classes 1000
    python make_pictures.py FOLDER --cifar --images 51200 --classes 10

With --cifar 32 x 32 pixels each in the files of CIFAR-10's binary version instead. JPEG needs Pillow, or else
torchvision. The same arguments give the same pixels.
"""

from __future__ import annotations

import argparse
import io
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import numpy

QUALITY = 90


def draw(index: int, label: int, side: int, seed: int, longer: int) -> numpy.ndarray:
    """(H, W, 3) bytes, sides up to `longer` more. A class has its hue; place, size and noise are the picture's."""
    random = numpy.random.default_rng((seed, index))
    height, width = (side + int(random.integers(0, longer + 1)) for _ in range(2))
    image = numpy.zeros((height, width, 3), numpy.float32)
    for grain, strength in ((32, 60.0), (8, 30.0), (2, 15.0)):
        rows, columns = -(-height // grain), -(-width // grain)
        noise = random.normal(0.0, strength, (rows, columns, 3)).astype(numpy.float32)
        image += noise.repeat(grain, 0).repeat(grain, 1)[:height, :width]
    y, x = numpy.ogrid[:height, :width]
    hue = numpy.random.default_rng((seed, 1 << 40, label)).uniform(40.0, 215.0, 3)
    for _ in range(4):
        centre_y, centre_x = random.uniform(0, height), random.uniform(0, width)
        reach = random.uniform(side / 12, side / 4)
        if random.random() < 0.5:
            inside = (y - centre_y) ** 2 + (x - centre_x) ** 2 < reach**2
        else:
            inside = (abs(y - centre_y) < reach) & (abs(x - centre_x) < reach)
        image[inside] = 0.3 * image[inside] + hue - 128.0
    return numpy.clip(image + 128.0, 0, 255).astype(numpy.uint8)


def encode(pixels: numpy.ndarray) -> bytes:
    try:
        from PIL import Image
    except ImportError:
        import torch
        from torchvision.io import encode_jpeg

        return bytes(encode_jpeg(torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), QUALITY).numpy())
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY)
    return buffer.getvalue()


def write_picture(index: int, folder: Path, classes: int, side: int, seed: int) -> None:
    label = index % classes
    path = folder / f"c{label:04}" / f"{index:05}.jpg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encode(draw(index, label, side, seed, side // 4)))


def cifar_row(index: int, classes: int, seed: int) -> bytes:
    label = index % classes
    return bytes([label]) + draw(index, label, 32, seed, 0).transpose(2, 0, 1).tobytes()


def write_cifar(folder: Path, images: int, classes: int, seed: int, processes: ProcessPoolExecutor) -> None:
    """Five files to train with, and one of a few images that nobody trained on."""
    folder.mkdir(parents=True, exist_ok=True)
    held_out = 64
    rows = list(processes.map(partial(cifar_row, classes=classes, seed=seed), range(images + held_out), chunksize=256))
    for part in range(5):
        (folder / f"data_batch_{part + 1}.bin").write_bytes(b"".join(rows[:images][part::5]))
    (folder / "test_batch.bin").write_bytes(b"".join(rows[images:]))
    (folder / "batches.meta.txt").write_text("".join(f"class {label}\n" for label in range(classes)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--images", type=int, default=5120)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--side", type=int, default=256, help="shorter side in pixels; the other is up to a quarter longer")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--cifar", action="store_true", help="write CIFAR-10's binary files instead")
    options = parser.parse_args()
    if not 1 <= options.classes <= options.images:
        parser.error("--classes is at least 1 and at most --images")
    write = partial(write_picture, folder=options.folder, classes=options.classes, side=options.side,
                    seed=options.seed)
    with ProcessPoolExecutor() as processes:
        if options.cifar:
            write_cifar(options.folder, options.images, options.classes, options.seed, processes)
            return
        for _ in processes.map(write, range(options.images), chunksize=64):
            pass


if __name__ == "__main__":
    main()
