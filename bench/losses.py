"""Whether ours and the peer train alike: the losses of N steps from the same start.

The peer gets our tokens or images, our initial weights and our constants, so what is left is
arithmetic. How much that may move the losses is taken from a second run of the peer, which starts
from the weights of another seed and reads the same data.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from programs import (EXIT_FAILED, BenchError, Side, json_objects, last_with, resolved_config,
                      run_program, say, with_options)

LAST = 10  # steps whose mean decides


def train_ours(ours: Side, folder: Path, options: dict[str, object], timeout: float) -> str:
    """Runs in `folder`, with a cache of its own, so that its tokens are found without a guess."""
    common = {"run-dir": folder, "train.val_batches": 0, "train.sample_tokens": 0}
    environment = ours.environment | {"XDG_CACHE_HOME": str(folder.parent / "cache")}
    command = with_options(ours.command, common | options)
    return run_program(replace(ours, command=command, environment=environment), timeout).text


def initial_weights(ours: Side, seed: int, folder: Path, timeout: float) -> Path:
    """The weights that our run of this seed starts from: those after a step of size zero."""
    still = {"train.steps": 1, "optim.lr": 0, "optim.min_lr": 0, "optim.warmup_steps": 0,
             "optim.weight_decay": 0, "checkpoint.final_weights": "true", "seed": seed}
    train_ours(ours, folder, still, timeout)
    return folder / "latest" / "checkpoints" / "final" / "model.safetensors"


def losses_of_ours(ours: Side, steps: int, folder: Path, timeout: float) -> list[float]:
    options = {"train.steps": steps, "checkpoint.final_weights": "false"}
    objects = json_objects(train_ours(ours, folder, options, timeout))
    return [item["loss"] for item in objects if "step" in item and "loss" in item]


def token_options(ours: Side, scratch: Path) -> tuple[dict[str, object], list[str]]:
    """What a peer that reads tokens is told: our config, and our tokens in their order."""
    config = scratch / "config.json"
    config.write_text(json.dumps(resolved_config(ours.command)))
    tokens = sorted((scratch / "cache").glob("trireme/data/*/train-*.tokens"))
    return {"config": config}, ["--tokens", *map(str, tokens)]


def losses_of_peer(peer: Side, steps: int, weights: Path, same: dict[str, object], words: list[str], timeout: float
                   ) -> list[float]:
    options = {"steps": steps, "warmup": 0, "init": weights} | same
    command = with_options(peer.command, options) + words
    losses = last_with(json_objects(run_program(replace(peer, command=command), timeout).text),
                       "losses")
    if not losses:
        raise BenchError(EXIT_FAILED, f"the peer printed no losses: {peer.printable()}")
    return losses


def last_mean(losses: Sequence[float]) -> float:
    return statistics.fmean(losses[-LAST:])


def compare_losses(ours: Sequence[float], peer: Sequence[float], other: Sequence[float],
                   bound: float) -> dict:
    """`other` are the peer's from another start. The first loss has no step before it that could
    have moved it, so no noise is allowed there. Losses that are not finite agree with nothing."""
    if not len(ours) == len(peer) == len(other):
        raise BenchError(EXIT_FAILED, f"ours has {len(ours)} steps, the peer {len(peer)} and "
                                      f"{len(other)}")
    differences = [abs(a - b) for a, b in zip(ours, peer)]
    noise = abs(last_mean(peer) - last_mean(other))
    allowed = max(bound, noise)
    difference = abs(last_mean(ours) - last_mean(peer))
    return {
        "steps": len(ours),
        "final": {"ours": ours[-1], "peer": peer[-1], "peer_other_seed": other[-1]},
        "max_difference": max(differences),
        "mean_difference": statistics.fmean(differences),
        "first_difference": differences[0],
        "last_steps": min(LAST, len(ours)),
        "last_difference": difference,
        "noise": noise,
        "bound": allowed,
        "first_bound": bound,
        "agree": differences[0] <= bound and difference <= allowed and math.isfinite(noise),
        "ours": list(ours),
        "peer": list(peer),
        "peer_other_seed": list(other),
    }


def check_losses(ours: Side, peer: Side, steps: int, bound: float, timeout: float,
                 same: tuple[dict[str, object], dict[str, object]] | None = None) -> dict:
    """Both sides for `steps` steps. Weights lie in $TMPDIR meanwhile, one seed's at a time. `same` are options of
    either side with which they read the same; none: the peer gets our tokens."""
    with tempfile.TemporaryDirectory(prefix="trireme-losses-") as name:
        scratch = Path(name)
        ours = replace(ours, command=with_options(ours.command, {"train.steps": steps} | (same[0] if same else {})))
        seed = resolved_config(ours.command)["config"]["seed"]
        mine = losses_of_ours(ours, steps, scratch / "ours", timeout)
        options, words = (same[1], []) if same else token_options(ours, scratch)

        def peer_from(weights: Path) -> list[float]:
            losses = losses_of_peer(peer, steps, weights, options, words, timeout)
            weights.unlink()
            return losses

        theirs = peer_from(initial_weights(ours, seed, scratch / "init", timeout))
        others = peer_from(initial_weights(ours, seed + 1, scratch / "other", timeout))
    result = compare_losses(mine, theirs, others, bound)
    final = result["final"]
    say(f"  losses after {steps} steps: ours {final['ours']:.5f}, peer {final['peer']:.5f}, peer "
        f"of another seed {final['peer_other_seed']:.5f}; difference at most "
        f"{result['max_difference']:.2e}, mean {result['mean_difference']:.2e}, last "
        f"{result['last_steps']} {result['last_difference']:.2e}; noise {result['noise']:.2e}")
    return result


def complaint(result: dict) -> str | None:
    """What to say of losses that do not agree."""
    if result["agree"]:
        return None
    return (f"the losses do not agree: the first ones are {result['first_difference']:.4f} apart, "
            f"{result['first_bound']:.4f} is allowed; the means of the last "
            f"{result['last_steps']} are {result['last_difference']:.4f} apart, "
            f"{result['bound']:.4f} is allowed (the larger of --loss-bound and the peer's "
            f"difference between two seeds); the speeds are of two different trainings")
