"""Writes what trireme's models, optimizer and checkpoints are compared with.

    python make_reference.py OUT_DIR [--only NAME]

Every case becomes OUT_DIR/<name>/case.json and case.safetensors (all F32, tokens I64):

    weights/<parameter>   before training
    tokens                (steps, B, T + 1); step s learns tokens[s, :, 1:] from tokens[s, :, :-1]
    logits                (B, T, V) of batch 0 before training
    grads/<parameter>     of the mean loss of batch 0 before training
    final/<parameter>     after `steps` steps of AdamW (fp32 masters in bf16 cases)

and the same under exact/ (exact/logits, exact/grads/<parameter>, exact/final/<parameter>), computed
in fp64 from weights rounded to the case's dtype. A correct implementation in that dtype is about as
far from it as PyTorch is.

case.json holds the settings, `losses` and `grad_norms` (before clipping) of each step, both again
from fp64 as `exact_losses` and `exact_grad_norms`, and `noise`: PyTorch's distance from fp64 as
relative L2 error, worst over the tensors of a kind.

In bf16 cases the model runs on bf16 copies of fp32 masters; bf16 gradients are widened to fp32
before norm, clipping and AdamW, and the copies are refreshed after each step.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import safetensors_io
from models import LanguageModel, ModelConfig, build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    name: str
    dtype: str
    model: ModelConfig
    grad_clip: float  # between the smallest and the largest gradient norm: both branches run
    seq_len: int
    seed: int
    batch: int = 4
    steps: int = 20
    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    # Large enough that gradients which are zero but for rounding, such as those of GPT-2's key
    # bias, do not become full-size updates of random sign.
    eps: float = 1e-5
    weight_decay: float = 0.1


@dataclass
class Outcome:
    losses: list[float]
    grad_norms: list[float]
    logits: Tensor
    grads: Tensors
    final: Tensors


def initial_weights(model: LanguageModel, seed: int) -> Tensors:
    """Nothing is zero or one: a term left out, transposed or misplaced shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, parameter in model.named_parameters():
        noise = 0.1 * torch.randn(parameter.shape, generator=generator)
        is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
        weights[name] = 1.0 + noise if is_norm_weight else noise
    return weights


def make_tokens(case: Case) -> Tensor:
    """(steps, B, T + 1): noisy walks over the vocabulary, so that there is something to learn."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    vocab = case.model.vocab_size
    shape = (case.steps, case.batch)
    tokens = [torch.randint(vocab, shape, generator=generator)]
    for _ in range(case.seq_len):
        step = 1 + torch.randint(3, shape, generator=generator)
        tokens.append((5 * tokens[-1] + step) % vocab)
    return torch.stack(tokens, dim=-1)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats per token; narrow logits are widened to fp32 first."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten())


def make_optimizer(masters: Tensors, case: Case) -> torch.optim.AdamW:
    """Weight decay for matrices only."""
    matrices = [master for master in masters.values() if master.dim() >= 2]
    vectors = [master for master in masters.values() if master.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": case.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    betas = (case.beta1, case.beta2)
    return torch.optim.AdamW(groups, lr=case.lr, betas=betas, eps=case.eps, foreach=False)


def refresh(model: LanguageModel, masters: Tensors, dtype: torch.dtype) -> None:
    """The model's copies of the masters, rounded to `dtype`."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(masters[name].to(dtype))


def run(case: Case, weights: Tensors, tokens: Tensor, exact: bool = False) -> Outcome:
    """Trains for case.steps steps and keeps what the first one saw. `exact`: everything in fp64 but
    the rounding of weights to the case's dtype, which is no error of an implementation."""
    compute = torch.float64 if exact else DTYPES[case.dtype]
    master_dtype = torch.float64 if compute == torch.float64 else torch.float32
    model = build(case.model).to(compute)
    masters = {
        name: weight.to(master_dtype, copy=True).requires_grad_()
        for name, weight in weights.items()
    }
    optimizer = make_optimizer(masters, case)
    outcome = Outcome([], [], torch.empty(0), {}, {})
    for step in range(case.steps):
        refresh(model, masters, DTYPES[case.dtype])
        model.zero_grad(set_to_none=True)
        logits = model(tokens[step, :, :-1])
        loss = mean_loss(logits, tokens[step, :, 1:])
        loss.backward()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad.to(master_dtype, copy=True)
        if step == 0:
            outcome.logits = logits.detach().to(master_dtype)
            outcome.grads = {name: master.grad.clone() for name, master in masters.items()}
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), case.grad_clip, foreach=False)
        optimizer.step()
        outcome.losses.append(loss.item())
        outcome.grad_norms.append(norm.item())
    outcome.final = {name: master.detach().clone() for name, master in masters.items()}
    return outcome


def relative_error(value: Tensor, exact: Tensor) -> float:
    return ((value.double() - exact).norm() / exact.norm()).item()


def worst(values: Tensors, exact: Tensors) -> float:
    return max(relative_error(values[name], exact[name]) for name in exact)


def noise_of(outcome: Outcome, exact: Outcome) -> dict[str, float]:
    """Relative errors of `outcome` against the same case in fp64."""
    losses, exact_losses = (torch.tensor(values, dtype=torch.float64)
                            for values in (outcome.losses, exact.losses))
    norms, exact_norms = (torch.tensor(values, dtype=torch.float64)
                          for values in (outcome.grad_norms, exact.grad_norms))
    return {
        "logits": relative_error(outcome.logits, exact.logits),
        "grads": worst(outcome.grads, exact.grads),
        "final": worst(outcome.final, exact.final),
        "losses": relative_error(losses, exact_losses),
        "grad_norms": relative_error(norms, exact_norms),
    }


def check_telling(case: Case, weights: Tensors, outcome: Outcome) -> None:
    """A case that could not catch an error is refused."""
    clipped = [norm > case.grad_clip for norm in outcome.grad_norms]
    if all(clipped) or not any(clipped):
        raise SystemExit(f"{case.name}: clipping at {case.grad_clip} in {sum(clipped)} of "
                         f"{len(clipped)} steps, norms {outcome.grad_norms}; both must occur")
    if sum(outcome.losses[-5:]) >= sum(outcome.losses[:5]):
        raise SystemExit(f"{case.name}: nothing is learnt, losses {outcome.losses}")
    for name, weight in weights.items():
        if not outcome.grads[name].norm() > 1e-4 or torch.equal(weight, outcome.final[name]):
            raise SystemExit(f"{case.name}: {name} takes no part in training")


def write(case: Case, folder: Path) -> dict[str, float]:
    """Makes both files of a case and returns its noise."""
    weights = initial_weights(build(case.model), case.seed)
    tokens = make_tokens(case)
    outcome = run(case, weights, tokens)
    check_telling(case, weights, outcome)
    exact = run(case, weights, tokens, exact=True)
    noise = noise_of(outcome, exact)
    tensors = {"tokens": tokens, "logits": outcome.logits, "exact/logits": exact.logits.float()}
    for kind, parts in (("weights", weights), ("grads", outcome.grads), ("final", outcome.final),
                        ("exact/grads", exact.grads), ("exact/final", exact.final)):
        tensors |= {f"{kind}/{name}": tensor.float() for name, tensor in parts.items()}
    settings = asdict(case) | {"betas": [case.beta1, case.beta2]}
    results = {"losses": outcome.losses, "grad_norms": outcome.grad_norms, "noise": noise,
               "exact_losses": exact.losses, "exact_grad_norms": exact.grad_norms}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "case.json").write_text(json.dumps(settings | results, indent=2) + "\n")
    path = folder / "case.safetensors"
    safetensors_io.save(path, tensors, {"format": "pt"})
    again = safetensors_io.load(path)
    same = again.keys() == tensors.keys()
    if not same or not all(torch.equal(again[name], tensors[name]) for name in tensors):
        raise SystemExit(f"{path} does not read back as written")
    return noise


def cases() -> list[Case]:
    gpt2_tied = ModelConfig(
        family="gpt2", n_layers=2, d_model=48, n_heads=4, n_kv_heads=4, d_ff=192, vocab_size=61,
        max_seq_len=16, tie_embeddings=True, norm_eps=1e-5, rope_theta=500000.0,
    )
    # Shorter sequences than the table of positions, and a d_ff that is not 4 d_model.
    gpt2_untied = replace(gpt2_tied, d_model=32, n_heads=2, n_kv_heads=2, d_ff=96, vocab_size=256,
                          max_seq_len=40, tie_embeddings=False)
    llama_tied = ModelConfig(
        family="llama", n_layers=2, d_model=64, n_heads=4, n_kv_heads=2, d_ff=160, vocab_size=61,
        max_seq_len=32, tie_embeddings=True, norm_eps=1e-6, rope_theta=10000.0,
    )
    llama_untied = replace(llama_tied, d_model=32, n_heads=4, n_kv_heads=4, d_ff=88, vocab_size=256,
                           tie_embeddings=False, norm_eps=1e-5, rope_theta=500000.0)
    mlp = ModelConfig(
        family="mlp", n_layers=2, d_model=32, n_heads=4, n_kv_heads=4, d_ff=128, vocab_size=61,
        max_seq_len=16, tie_embeddings=False, norm_eps=1e-5, rope_theta=500000.0,
    )
    in_fp32 = [
        Case("gpt2_tied_fp32", "fp32", gpt2_tied, grad_clip=1.6, seq_len=16, seed=1),
        Case("gpt2_untied_fp32", "fp32", gpt2_untied, grad_clip=1.1, seq_len=24, seed=2),
        Case("llama_tied_fp32", "fp32", llama_tied, grad_clip=2.2, seq_len=32, seed=3),
        Case("llama_untied_fp32", "fp32", llama_untied, grad_clip=2.0, seq_len=16, seed=4),
        Case("llama_wide_heads_fp32", "fp32", replace(llama_tied, head_dim=24), grad_clip=2.2,
             seq_len=32, seed=7),
        Case("mlp_untied_fp32", "fp32", mlp, grad_clip=1.45, seq_len=16, seed=5),
        Case("mlp_tied_fp32", "fp32", replace(mlp, tie_embeddings=True), grad_clip=1.4, seq_len=16,
             seed=6),
    ]
    # Rounding noise of bf16 gradients is larger, hence the larger eps: with a smaller one the final
    # biases are noise, in PyTorch as well.
    in_bf16 = [
        replace(case, name=case.name.replace("fp32", "bf16"), dtype="bf16", eps=1e-3)
        for case in in_fp32
        if case.model.family != "mlp"
    ]
    return in_fp32 + in_bf16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("--only", help="the name of one case")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for case in cases():
        if arguments.only in (None, case.name):
            noise = write(case, arguments.out_dir / case.name)
            print(case.name, " ".join(f"{kind} {value:.1e}" for kind, value in noise.items()))


if __name__ == "__main__":
    main()
