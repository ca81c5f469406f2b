"""Plain PyTorch models of images that trireme's own are checked against.

Written from He et al. (2016) and LeCun et al. (1998), with the names of torchvision's checkpoints and
nothing shared with the C++ code. Where torchvision is installed they are checked against it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class VisionConfig:
    """The fields of trireme's plan::VisionConfig."""

    family: str  # resnet or lenet
    depth: int
    width: int
    stem: str  # cifar or imagenet
    norm: str  # batch or group
    norm_groups: int
    channels: int
    image_size: int
    classes: int
    label_smoothing: float


STAGES = {
    18: (False, [2, 2, 2, 2]),
    34: (False, [3, 4, 6, 3]),
    50: (True, [3, 4, 6, 3]),
}

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = norm(width)
        self.downsample = shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = norm(outputs)
        self.downsample = shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


def shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module | None:
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))


class ResNet(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        blocks_of_cifar = (config.depth - 2) // 6
        bottleneck, stages = STAGES.get(config.depth, (False, 3 * [blocks_of_cifar]))
        block = Bottleneck if bottleneck else BasicBlock
        norm: Norm = nn.BatchNorm2d
        if config.norm == "group":
            norm = lambda channels: nn.GroupNorm(config.norm_groups, channels)  # noqa: E731
        self.large = config.stem == "imagenet"
        kernel, stride = (7, 2) if self.large else (3, 1)
        self.conv1 = nn.Conv2d(config.channels, config.width, kernel, stride, padding=kernel // 2,
                               bias=False)
        self.bn1 = norm(config.width)
        self.stages = len(stages)
        inputs = config.width
        for index, count in enumerate(stages):
            width = config.width * 2**index
            layers = []
            for i in range(count):
                layers.append(block(inputs, width, 2 if index > 0 and i == 0 else 1, norm))
                inputs = width * block.expansion
            setattr(self, f"layer{index + 1}", nn.Sequential(*layers))
        self.fc = nn.Linear(inputs, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, H, W) -> (B, classes)"""
        x = F.relu(self.bn1(self.conv1(x)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, padding=1)
        for index in range(self.stages):
            x = getattr(self, f"layer{index + 1}")(x)
        return self.fc(x.mean((2, 3)))


class LeNet(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        side = (config.image_size // 2 - 4) // 2
        self.conv1 = nn.Conv2d(config.channels, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * side * side, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, config.classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def build(config: VisionConfig) -> nn.Module:
    return {"resnet": ResNet, "lenet": LeNet}[config.family](config)


def compare_with_torchvision() -> str:
    """What came of it, in a line. Raises where ours differ from torchvision's."""
    try:
        from torchvision.models import resnet18, resnet34, resnet50
    except ImportError as error:
        return f"torchvision: not compared ({error})"
    for depth, make in {18: resnet18, 34: resnet34, 50: resnet50}.items():
        config = VisionConfig("resnet", depth, 64, "imagenet", "batch", 8, 3, 64, 1000, 0.0)
        ours, theirs = build(config), make()
        theirs.load_state_dict(ours.state_dict())  # strict: all names and shapes
        x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(depth))
        for training in (False, True):
            ours.train(training)
            theirs.train(training)
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    return "torchvision: the same names, shapes and logits for 18, 34 and 50 layers"
