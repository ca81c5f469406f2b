"""Writes what trireme's models of images are compared with, as make_reference.py does for language models.

    python make_vision_reference.py OUT_DIR [--only NAME]

Every case becomes OUT_DIR/<name>/case.json and case.safetensors (F32, classes I64):

    weights/<parameter>        before training
    images, targets            (steps, B, C, H, W) and (steps, B)
    logits                     (B, classes) of batch 0 in training mode, before training
    grads/<parameter>          of the mean loss of batch 0 before training
    final/<parameter>          after `steps` steps
    buffers/<buffer>           running statistics after them
    evaluated                  (B, classes) of batch 0 in evaluation mode then

case.json holds the settings, `losses` and `grad_norms` (before clipping) of each step, and `noise`: how far
PyTorch's fp32 is from fp64, as relative L2 error, worst over all of the above, also from weights that differ by a
rounding. A case that rounding decides, where a ReLU or a maximum falls to the other side, is refused.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import safetensors_io
from vision_models import VisionConfig, build, compare_with_torchvision

Tensors = dict[str, Tensor]
LARGEST_NOISE = 1e-4  # relative L2, of any tensor
OTHER_ROUNDINGS = 6  # starts that differ by one


@dataclass(frozen=True)
class Case:
    name: str
    model: VisionConfig
    grad_clip: float  # between the smallest and the largest gradient norm: both branches run
    seed: int
    batch: int = 6
    steps: int = 20
    lr: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-3  # gradients that are zero but for rounding do not become full-size updates
    weight_decay: float = 0.1


def make_batches(case: Case) -> tuple[Tensor, Tensor]:
    """Noise with a brighter spot whose place is the class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    model = case.model
    size = model.image_size
    targets = torch.randint(model.classes, (case.steps, case.batch), generator=generator)
    images = 0.5 * torch.randn(case.steps, case.batch, model.channels, size, size, generator=generator)
    for step in range(case.steps):
        for row, target in enumerate(targets[step].tolist()):
            top = target * (size - size // 4) // model.classes
            images[step, row, target % model.channels, top : top + size // 4] += 2.0
    return images, targets


def initial_weights(model: nn.Module, seed: int) -> Tensors:
    """Nothing is zero or one; matrices keep the size of what passes them, and residual branches end in
    small norms, so that a deep network is well conditioned."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        module = model.get_submodule(name.rpartition(".")[0])
        if parameter.dim() >= 2:
            weights[name] = noise * (1.5 / parameter[0].numel()) ** 0.5
        elif name.endswith("weight") and isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
            parent = model.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            last = "bn3" if hasattr(parent, "bn3") else "bn2"
            weights[name] = 0.1 * noise + (0.2 if name.endswith(f".{last}.weight") else 1.0)
        else:
            weights[name] = 0.1 * noise
    return weights


def make_optimizer(model: nn.Module, case: Case) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": case.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=case.lr, betas=(case.beta1, case.beta2), eps=case.eps,
                             foreach=False)


def named(parameters) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in parameters}


def train(case: Case, weights: Tensors, dtype: torch.dtype) -> tuple[Tensors, list[float], list[float]]:
    """What the steps leave, their losses and their gradient norms."""
    model = build(case.model).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    images, targets = make_batches(case)
    optimizer = make_optimizer(model, case)
    tensors: Tensors = {"images": images, "targets": targets}
    losses, norms = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        logits = model(images[step].to(dtype))
        loss = F.cross_entropy(logits, targets[step], label_smoothing=case.model.label_smoothing)
        loss.backward()
        if step == 0:
            tensors["logits"] = logits.detach().clone()
            tensors |= {f"grads/{name}": parameter.grad.clone()
                        for name, parameter in model.named_parameters()}
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.grad_clip,
                                                    foreach=False).item())
        optimizer.step()
        losses.append(loss.item())
    tensors |= {f"final/{name}": tensor for name, tensor in named(model.named_parameters()).items()}
    tensors |= {f"buffers/{name}": tensor for name, tensor in named(model.named_buffers()).items()}
    model.eval()
    with torch.no_grad():
        tensors["evaluated"] = model(images[0].to(dtype))
    return tensors, losses, norms


def write(case: Case, folder: Path) -> float:
    """Makes both files of a case and returns how far its fp32 is from fp64."""
    weights = initial_weights(build(case.model), case.seed)
    tensors, losses, norms = train(case, weights, torch.float32)
    exact, exact_losses, _ = train(case, weights, torch.float64)
    check_telling(case, weights, tensors, losses, norms)

    def distance(tensors: Tensors, losses: list[float]) -> float:
        errors = [relative_error(tensors[name], exact[name]) for name in exact if name != "targets"]
        return max(*errors, relative_error(torch.tensor(losses), torch.tensor(exact_losses)))

    noise = distance(tensors, losses)
    for other in range(OTHER_ROUNDINGS):
        near = train(case, rounded_otherwise(weights, other), torch.float32)
        noise = max(noise, distance(near[0], near[1]))
    if noise > LARGEST_NOISE:
        raise SystemExit(f"{case.name}: rounding to fp32 alone moves its tensors by {noise:.1e}; make "
                         f"the case better conditioned")
    tensors |= {f"weights/{name}": weight for name, weight in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    settings = asdict(case) | {"losses": losses, "grad_norms": norms, "noise": noise}
    (folder / "case.json").write_text(json.dumps(settings, indent=2) + "\n")
    safetensors_io.save(folder / "case.safetensors", tensors, {"format": "pt"})
    return noise


def rounded_otherwise(weights: Tensors, seed: int) -> Tensors:
    """Up to one unit in the last place away."""
    generator = torch.Generator().manual_seed(seed)
    return {name: weight * (1.0 + 2.0**-23 * (2.0 * torch.rand(weight.shape, generator=generator) - 1.0))
            for name, weight in weights.items()}


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact.double()).norm() / exact.double().norm()).item()


def check_telling(case: Case, weights: Tensors, tensors: Tensors, losses: list[float],
                  norms: list[float]) -> None:
    """A case that could not catch an error is refused."""
    clipped = [norm > case.grad_clip for norm in norms]
    if all(clipped) or not any(clipped):
        raise SystemExit(f"{case.name}: clipping at {case.grad_clip} in {sum(clipped)} of "
                         f"{len(clipped)} steps, norms {norms}; both must occur")
    half = min(5, len(losses) // 2)
    if sum(losses[-half:]) >= sum(losses[:half]):
        raise SystemExit(f"{case.name}: nothing is learnt, losses {losses}")
    for name, weight in weights.items():
        if not tensors[f"grads/{name}"].norm() > 1e-4 or torch.equal(weight, tensors[f"final/{name}"]):
            raise SystemExit(f"{case.name}: {name} takes no part in training")


def cases() -> list[Case]:
    small = VisionConfig(family="resnet", depth=8, width=8, stem="cifar", norm="batch", norm_groups=4,
                         channels=3, image_size=16, classes=10, label_smoothing=0.0)
    return [
        Case("resnet8_batch", small, grad_clip=1.5, seed=21),
        Case("resnet8_group_smoothed", replace(small, norm="group", label_smoothing=0.1),
             grad_clip=1.6, seed=22),
        # An odd size: strides round up.
        Case("resnet18_imagenet", replace(small, depth=18, stem="imagenet", image_size=75, classes=7),
             grad_clip=4.2, seed=23, lr=3e-4),
        Case("resnet50_imagenet", replace(small, depth=50, width=4, stem="imagenet", image_size=64,
                                          channels=1), grad_clip=9.0, seed=41, steps=4),
        Case("lenet", replace(small, family="lenet", channels=1, image_size=28), grad_clip=8.0, seed=25),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--only", help="the name of one case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    print(compare_with_torchvision())
    for case in cases():
        if arguments.only in (None, case.name):
            noise = write(case, arguments.out_dir / "vision" / case.name)
            print(f"{case.name} fp32 is {noise:.1e} from fp64")


if __name__ == "__main__":
    main()
