"""Models of images of the PyTorch peer: residual networks by torchvision's names, in its structure, and with
the stems and depths that trireme/plan/vision_model.h knows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Network:
    depth: int
    width: int
    small_stem: bool  # 3x3, for images of 32x32; else 7x7 and a maximum
    norm: str = "batch"  # or "group", of 8 groups


MODELS = {
    "small-resnet20": Network(20, 16, True),
    "resnet18-cifar": Network(18, 64, True),
    "resnet50-cifar": Network(50, 64, True),
    "resnet18": Network(18, 64, False),
    "resnet34": Network(34, 64, False),
    "resnet50": Network(50, 64, False),
}
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def blocks_of(depth: int) -> tuple[int, ...]:
    """Of each stage."""
    if depth in DEPTHS:
        return DEPTHS[depth]
    count, rest = divmod(depth - 2, 6)
    if count < 1 or rest:
        raise SystemExit(f"no ResNet has {depth} layers; use {', '.join(map(str, DEPTHS))} or 6 n + 2")
    return (count,) * 3


def make_norm(kind: str, channels: int) -> nn.Module:
    return nn.GroupNorm(8, channels) if kind == "group" else nn.BatchNorm2d(channels)


def convolution(channels: int, out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer


class Block(nn.Module):
    """Basic or, where it ends with four times the channels inside, bottleneck (v1.5: its 3x3 strides)."""

    def __init__(self, channels: int, middle: int, out: int, stride: int, norm: str) -> None:
        super().__init__()
        self.bottleneck = out != middle
        if self.bottleneck:
            self.conv1, self.bn1 = convolution(channels, middle, 1), make_norm(norm, middle)
            self.conv2, self.bn2 = convolution(middle, middle, 3, stride), make_norm(norm, middle)
            self.conv3, self.bn3 = convolution(middle, out, 1), make_norm(norm, out)
        else:
            self.conv1, self.bn1 = convolution(channels, middle, 3, stride), make_norm(norm, middle)
            self.conv2, self.bn2 = convolution(middle, out, 3), make_norm(norm, out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(convolution(channels, out, 1, stride), make_norm(norm, out))

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        if self.bottleneck:
            x = self.bn3(self.conv3(self.relu(x)))
        return self.relu(x + shortcut)


class ResNet(nn.Module):
    def __init__(self, network: Network, classes: int) -> None:
        super().__init__()
        width, norm = network.width, network.norm
        expansion = 4 if network.depth in (50, 101, 152) else 1
        if network.small_stem:
            self.conv1, self.maxpool = convolution(3, width, 3), nn.Identity()
        else:
            self.conv1, self.maxpool = convolution(3, width, 7, 2), nn.MaxPool2d(3, 2, 1)
        self.bn1 = make_norm(norm, width)
        self.relu = nn.ReLU(inplace=True)
        self.stages: list[str] = []
        channels, middle = width, width
        for stage, count in enumerate(blocks_of(network.depth), start=1):
            out = middle * expansion
            blocks = []
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                blocks.append(Block(channels, middle, out, stride, norm))
                channels = out
            self.stages.append(f"layer{stage}")
            setattr(self, self.stages[-1], nn.Sequential(*blocks))
            middle *= 2
        self.fc = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for stage in self.stages:
            x = getattr(self, stage)(x)
        return self.fc(x.mean((2, 3)))


class Trained(nn.Module):
    """A network with its loss and what scales its pixels, so that a compiler sees all of it."""

    def __init__(self, network: nn.Module, mean: list[float], deviation: list[float], smoothing: float) -> None:
        super().__init__()
        self.network, self.smoothing = network, smoothing
        shape = (1, -1, 1, 1)
        scale = 1.0 / (255.0 * torch.tensor(deviation).view(shape))
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("offset", -255.0 * torch.tensor(mean).view(shape) * scale, persistent=False)

    def forward(self, pixels: Tensor, labels: Tensor) -> Tensor:
        """Bytes (N, 3, H, W) and labels (N) to the mean loss."""
        images = (pixels * self.scale + self.offset).to(self.network.conv1.weight.dtype)
        logits = self.network(images).float()
        return F.cross_entropy(logits, labels, label_smoothing=self.smoothing)
