"""How the PyTorch peer reads images: CIFAR's binary files from memory, JPEG files by workers. Both give bytes, whole
batches at a time, which the device scales."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

CIFAR_SIDE = 32


def draw_part(height: int, width: int, least_area: float = 0.08) -> tuple[int, int, int, int]:
    """Top, left, height and width of a part of any place, as torchvision's RandomResizedCrop draws them."""
    for _ in range(10):
        area = height * width * random.uniform(least_area, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        part_width, part_height = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < part_width <= width and 0 < part_height <= height:
            return (random.randint(0, height - part_height), random.randint(0, width - part_width),
                    part_height, part_width)
    return centre_part(height, width, 1.0)


def centre_part(height: int, width: int, share: float) -> tuple[int, int, int, int]:
    """The square in the middle of which a side is this share of the shorter side."""
    side = max(1, round(share * min(height, width)))
    return (height - side) // 2, (width - side) // 2, side, side


def read_by_torchvision(path: str, side: int, augment: bool) -> Tensor:
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms.v2 import functional

    image = decode_jpeg(read_file(path), mode=ImageReadMode.RGB)
    height, width = image.shape[1:]
    part = draw_part(height, width) if augment else centre_part(height, width, 0.875)
    image = functional.resized_crop(image, *part, [side, side], antialias=True)
    return image.flip(2) if augment and random.random() < 0.5 else image


def read_by_pil(path: str, side: int, augment: bool) -> Tensor:
    from PIL import Image

    with Image.open(path) as file:
        image = file.convert("RGB")
    part = draw_part(image.height, image.width) if augment else centre_part(image.height, image.width, 0.875)
    top, left, height, width = part
    image = image.resize((side, side), Image.Resampling.BILINEAR, (left, top, left + width, top + height))
    if augment and random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


DECODERS = {"torchvision": read_by_torchvision, "pil": read_by_pil}


def choose_decoder(wanted: str) -> str:
    """torchvision's, which decodes into a tensor and resizes with vector instructions, where it is installed."""
    if wanted != "auto":
        return wanted
    try:
        import torchvision.io  # noqa: F401
    except ImportError:
        return "pil"
    return "torchvision"


def channels_last(pixels: Tensor) -> Tensor:
    return pixels.contiguous(memory_format=torch.channels_last)


class CifarImages(Dataset):
    """CIFAR-10's binary files, all in memory. A batch is one indexing."""

    def __init__(self, folder: Path, augment: bool) -> None:
        files = sorted(folder.glob("data_batch_*.bin"))
        if not files:
            raise SystemExit(f"no data_batch_*.bin in {folder}")
        rows = numpy.concatenate([numpy.fromfile(file, numpy.uint8) for file in files])
        rows = torch.from_numpy(rows.reshape(-1, 1 + 3 * CIFAR_SIDE**2))
        self.labels = rows[:, 0].long()
        self.pixels = rows[:, 1:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).permute(0, 2, 3, 1).contiguous()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.labels)

    def mean_and_deviation(self) -> tuple[list[float], list[float]]:
        deviation, mean = torch.std_mean(self.pixels[:10000].double() / 255.0, (0, 1, 2), correction=0)
        return mean.tolist(), deviation.tolist()

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        pixels = self.pixels[chosen]
        if self.augment:
            pixels = self.vary(pixels)
        return pixels.permute(0, 3, 1, 2), self.labels[chosen]

    @staticmethod
    def vary(pixels: Tensor, pad: int = 4) -> Tensor:
        """Each moved within black pixels at its sides, every second one mirrored."""
        count, side = len(pixels), pixels.shape[1]
        padded = pixels.new_zeros(count, side + 2 * pad, side + 2 * pad, 3)
        padded[:, pad:-pad, pad:-pad] = pixels
        moved = torch.randint(0, 2 * pad + 1, (2, count, 1))
        places = torch.arange(side)
        rows, columns = moved[0] + places, moved[1] + places
        mirrored = torch.rand(count) < 0.5
        columns[mirrored] = columns[mirrored].flip(1)
        return padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


class JpegImages(Dataset):
    """FOLDER/CLASS/*.jpg, decoded when they are asked for."""

    def __init__(self, folder: Path, side: int, augment: bool, decoder: str) -> None:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
        found = [(str(file), label) for label, name in enumerate(classes)
                 for file in sorted((folder / name).glob("*.jpg"))]
        if not found:
            raise SystemExit(f"no CLASS/*.jpg in {folder}")
        self.files, labels = zip(*found)
        self.labels = torch.tensor(labels)
        self.side, self.augment, self.read = side, augment, DECODERS[decoder]
        self.read(self.files[0], side, augment)  # imports here what workers would import each for itself

    def __len__(self) -> int:
        return len(self.files)

    @staticmethod
    def mean_and_deviation() -> tuple[list[float], list[float]]:
        return [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        pixels = torch.empty(len(indices), self.side, self.side, 3, dtype=torch.uint8)
        for row, index in enumerate(indices):
            pixels[row] = self.read(self.files[index], self.side, self.augment).permute(1, 2, 0)
        return pixels.permute(0, 3, 1, 2), self.labels[list(indices)]


class Parts(Sampler):
    """For ever, the parts that a rank's batches are read in: all images of an epoch in a drawn order, in which
    batches follow each other."""

    def __init__(self, images: int, batch: int, part: int, rank: int, world: int, seed: int) -> None:
        if images < batch * world:
            raise SystemExit(f"{images} images are fewer than a batch of {batch} on each of {world} ranks")
        self.images, self.batch, self.part = images, batch, part
        self.rank, self.world, self.seed = rank, world, seed

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(self.seed)
        step = self.batch * self.world
        while True:
            order = torch.randperm(self.images, generator=generator).tolist()
            for begin in range(0, self.images - step + 1, step):
                mine = order[begin + self.rank * self.batch :][: self.batch]
                for at in range(0, self.batch, self.part):
                    yield mine[at : at + self.part]


def seed_worker(worker: int) -> None:
    random.seed(torch.initial_seed() + worker)


def as_it_is(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch


def parts_that_fit(part_bytes: int) -> int:
    """In half of the memory through which workers hand over what they have read."""
    try:
        state = os.statvfs("/dev/shm")
    except OSError:
        return 64
    return max(1, state.f_bavail * state.f_frsize // (2 * part_bytes))


def make_loader(images: Dataset, sampler: Parts, workers: int, part_bytes: int, pinned: bool) -> DataLoader:
    """As many workers as wanted, unless there is no room for a part of each; with 4 parts ready each at most."""
    room = parts_that_fit(part_bytes)
    workers = min(workers, room)
    ahead = {"prefetch_factor": min(4, room // workers), "worker_init_fn": seed_worker} if workers else {}
    return DataLoader(images, batch_sampler=sampler, num_workers=workers, collate_fn=as_it_is, pin_memory=pinned,
                      **ahead)
