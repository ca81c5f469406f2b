"""What is compared: the cases of each mode, and the peers that a policy has."""

from __future__ import annotations

import argparse
import functools
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from programs import EXIT_ENVIRONMENT, EXIT_USAGE, PEERS, ROOT, BenchError, Side, say

# What makes PyTorch fast, in the ways that its users have; "best" tries those that a policy allows and takes the
# fastest.
TORCH_PEERS: dict[str, list[str]] = {
    "torch": ["--compile", "--compile-loss"],  # blocks and loss, as torchtitan does
    "torch-amp": ["--compile", "--compile-loss"],  # the same without a wrapper: one GPU
    "torch-whole": ["--whole"],  # the whole model with its loss, without a wrapper or under DDP
    "torch-eager": [],
}
TRIED_BY_BEST = ("torch", "torch-amp", "torch-whole")
OTHER_PEERS = ("deepspeed", "replicas", "bf16", "best")
OWN_PEERS = ("replicas", "bf16")  # our own program
# What torchao has for each of our recipes, or comes nearest.
TORCHAO = {"tensorwise": "tensorwise", "rowwise": "rowwise", "blockwise": "rowwise"}
# Models that have no preset of ours.
MODEL_OPTIONS = {
    "llama-3b": ["--model.family=llama", "--model.d_model=3072", "--model.n_layers=28", "--model.n_heads=24",
                 "--model.n_kv_heads=8", "--model.d_ff=8192", "--model.vocab_size=128256",
                 "--model.tie_embeddings=true"],
    "llama-6b": ["--model.preset=llama-8b", "--model.n_layers=24"],  # what of llama-8b two GPUs of 80 GB train
}
# What ours is started with by its own launcher.
ALLOCATOR = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
STRATEGIES = {"fsdp": "fsdp2", "zero3": "fsdp2", "zero2": "fsdp2-nores"}  # else the policy's name
ZERO_STAGES = {"zero1": 1, "zero2": 2, "zero3": 3}  # of DeepSpeed; it has no other policy
# What a launcher would say to the only rank.
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
         "MASTER_PORT": "0"}
SMOKE = {"cases": "gpt-tiny:ddp:1;llama-tiny:ddp:1", "seq": 128}
CPU_PEERS = {"eager": [], "compile": ["--compile"]}
DEVICES = {"gpu": ("cuda", "bf16"), "cpu-smoke": ("cpu", "fp32")}  # and what is computed in
GPU = {"cases": "llama-1b:fsdp:1,2,4;llama-1b:ddp:1,2,4", "seq": 2048}


@dataclass(frozen=True)
class Case:
    label: dict[str, object]  # model, ranks, ...: goes into the file as it is
    unit: str
    ours: Side
    peer: Side
    by_rank: bool = False  # measured in tokens/s of one rank of our training
    # Peers of which a trial is to find the fastest; empty: `peer` is the one.
    candidates: Mapping[str, Side] = field(default_factory=dict)
    settings: argparse.Namespace | None = None  # where they differ from those of the other cases
    trial_steps: int = 8  # of each candidate
    # Options of ours and of the peer with which both train on the same; none: on our tokens.
    same: tuple[dict[str, object], dict[str, object]] | None = None

    @property
    def ranks(self) -> int:
        return int(self.label.get("ranks", 1))

    def on_gpus(self, gpus: Sequence[str]) -> Case:
        """The same on these GPUs alone."""
        def move(side: Side) -> Side:
            return replace(side, environment=side.environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})

        return replace(self, ours=move(self.ours), peer=move(self.peer),
                       candidates={name: move(side) for name, side in self.candidates.items()})

    def title(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.label.items())


def torchrun(python: str, ranks: int) -> list[str]:
    """What starts a Python program on `ranks` ranks. A single one needs no launcher."""
    if ranks == 1:
        return [python]
    launcher = [python, "-m", "torch.distributed.run", "--standalone"]
    return launcher + ["--nproc-per-node", str(ranks)]


# Peers


@functools.cache
def import_error(python: str, module: str) -> str | None:
    """Why a Python cannot import a module; None if it can."""
    try:
        done = subprocess.run([python, "-c", f"import {module}"], cwd=ROOT, capture_output=True,
                              text=True, timeout=120)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]


def with_fp8(name: str) -> str:
    return f"{name}-fp8"


def peers_of(policy: str, wanted: str | None, python: str, device: str = "cuda") -> list[str]:
    """Names of the peers that a policy is measured against: those wanted of those there are, by
    default DeepSpeed for ZeRO where it is installed, else the fastest of PyTorch's, which on CPUs compile nothing."""
    has_stage = policy in ZERO_STAGES
    if wanted is None:
        problem = import_error(python, "deepspeed") if has_stage else None
        if problem:
            say(f"{policy}: the peer is PyTorch, since {python} has no DeepSpeed: {problem}")
        return ["deepspeed" if has_stage and not problem else "best" if device == "cuda" else "torch"]
    names = wanted.split(",")
    known = (*TORCH_PEERS, *OTHER_PEERS, *(with_fp8(name) for name in TORCH_PEERS))
    if unknown := set(names) - set(known):
        raise BenchError(EXIT_USAGE, f"there is no peer {min(unknown)}; choose from {', '.join(known)}")
    names = [name for name in names if name != "deepspeed" or has_stage]
    if not names:
        raise BenchError(EXIT_USAGE, f"DeepSpeed does not support {policy}, only {', '.join(ZERO_STAGES)}; "
                                     "add torch to --peer")
    if "deepspeed" in names and (problem := import_error(python, "deepspeed")):
        raise BenchError(EXIT_ENVIRONMENT, f"{python} has no DeepSpeed: {problem}")
    return names


def tried_by_best(policy: str, ranks: int, fp8: str, python: str) -> list[str]:
    """What "best" tries: where ours trains in FP8, each in FP8, too, as far as torchao is there."""
    names = [name for name in TRIED_BY_BEST if strategy_of(name, policy, ranks)]
    if fp8:
        if problem := import_error(python, "torchao.float8"):
            raise BenchError(EXIT_ENVIRONMENT, f"{python} has no torchao for the peers in FP8: {problem}; "
                                               "install it, or choose a --peer")
        names += [with_fp8(name) for name in names]
    return names


def strategy_of(peer: str, policy: str, ranks: int) -> str | None:
    """What a PyTorch peer calls a policy; None where it has none."""
    if peer in ("torch-amp", "torch-whole") and ranks == 1:
        return "amp"
    if peer == "torch-amp" or (peer == "torch-whole" and policy != "ddp"):
        return None
    return STRATEGIES.get(policy, policy)


def peer_program(name: str, policy: str, ranks: int, device: str) -> list[str]:
    if name == "deepspeed":
        compiles = TORCH_PEERS["torch"] if device == "cuda" else []
        return [f"{PEERS}/deepspeed_train.py", f"--stage={ZERO_STAGES[policy]}", *compiles]
    strategy = strategy_of(name, policy, ranks)
    if strategy is None:
        raise BenchError(EXIT_USAGE, f"{name} supports one rank only"
                                     f"{' or ddp' if name == 'torch-whole' else ''}, not {policy} on {ranks}")
    compiles = TORCH_PEERS[name] if device == "cuda" else []
    return [f"{PEERS}/torch_train.py", f"--strategy={strategy}", *compiles]


# Modes


def cpu_case(model: str, dtype: str, ranks: int, threads: int, arguments: argparse.Namespace) -> Case:
    steps, warmup, batch = arguments.steps, arguments.warmup, arguments.global_batch
    environment = {"OMP_NUM_THREADS": str(threads)}
    ours = [
        arguments.bin, "train", f"--model.preset={model}", "-n", str(ranks), "--json",
        f"--train.steps={warmup + steps}", f"--train.global_batch={batch}", "--device=cpu",
        "--data.seq_len=128", "--train.val_batches=0", "--optim.lr=3e-3",
        "--optim.schedule=cosine", f"--parallel.policy={arguments.policy}", f"--precision.compute={dtype}",
        *shlex.split(arguments.ours_args),
    ]
    def peer(name: str) -> Side:
        words = torchrun(arguments.python, ranks) + [
            f"{PEERS}/torch_cpu_train.py", f"--model={model}", f"--threads={threads}", "--json",
            f"--steps={steps}", f"--warmup={warmup}", f"--global-batch={batch}", "--lr=3e-3",
            f"--dtype={dtype}",
            *CPU_PEERS[name], *shlex.split(arguments.peer_args),
        ]
        return Side(words, "tokens_per_s", environment=environment)

    against = arguments.peer or "best"
    tried = list(CPU_PEERS) if against == "best" else [against]
    return Case(
        label={"model": model, "dtype": dtype, "device": "cpu", "ranks": ranks, "threads": threads, "against": tried[0]},
        unit="tokens/s of all ranks",
        ours=Side(ours, "tokens_per_s", environment=environment),
        peer=peer(tried[0]),
        candidates={name: peer(name) for name in tried} if len(tried) > 1 else {},
    )


def cpu_cases(arguments: argparse.Namespace) -> list[Case]:
    worlds = [(1, 1), (1, 2), (2, 1)]
    return [
        cpu_case(model, dtype, ranks, threads, arguments)
        for model in arguments.models.split(",")
        for dtype in arguments.dtypes.split(",")
        for ranks, threads in worlds
    ]


def training_command(model: str, policy: str, ranks: int, arguments: argparse.Namespace, fp8: str = ""
                     ) -> list[str]:
    steps, micro_batch = arguments.warmup + arguments.steps, arguments.micro_batch
    device, dtype = DEVICES[arguments.mode]
    return [
        arguments.bin, "train", *MODEL_OPTIONS.get(model, [f"--model.preset={model}"]), "-n", str(ranks),
        "--json", f"--train.steps={steps}", f"--train.global_batch={micro_batch * ranks}",
        f"--train.micro_batch={micro_batch}", f"--data.seq_len={arguments.seq}",
        f"--device={device}", "--train.val_batches=0", f"--precision.compute={dtype}",
        f"--parallel.policy={policy}", "--checkpoint.final_weights=false", "--train.sample_tokens=0",
        *([f"--precision.fp8={fp8}"] if fp8 else []), *shlex.split(arguments.ours_args),
    ]


def peer_command(against: str, model: str, policy: str, ranks: int, arguments: argparse.Namespace
                 ) -> list[str]:
    if against == "replicas":
        return [arguments.python, f"{PEERS}/replicas.py", str(ranks), "--",
                *training_command(model, "ddp", 1, arguments)]
    if against == "bf16":
        return training_command(model, policy, ranks, arguments, fp8="off")
    device, dtype = DEVICES[arguments.mode]
    name = against.removesuffix("-fp8")
    in_fp8 = [f"--fp8={TORCHAO[arguments.fp8]}"] if name != against else []
    return torchrun(arguments.python, ranks) + peer_program(name, policy, ranks, device) + in_fp8 + [
        f"--model={model}", f"--seq={arguments.seq}", f"--mbs={arguments.micro_batch}",
        f"--steps={arguments.steps}", f"--warmup={arguments.warmup}", f"--device={device}",
        f"--dtype={dtype}", *shlex.split(arguments.peer_args),
    ]


def training_case(model: str, policy: str, ranks: int, against: str,
                  arguments: argparse.Namespace) -> Case:
    device, _ = DEVICES[arguments.mode]
    fp8 = arguments.fp8
    tried = tried_by_best(policy, ranks, fp8, arguments.python) if against == "best" else []
    if len(tried) == 1:
        against = tried[0]
    ours = training_command(model, policy, ranks, arguments, fp8)
    own = against in OWN_PEERS
    environment = {} if device == "cuda" else {"OMP_NUM_THREADS": "1"}
    alone = ALONE if ranks == 1 and not own else {}
    allocator = ALLOCATOR if device == "cuda" and not own else {}

    def side_of(name: str) -> Side:
        return Side(peer_command(name, model, policy, ranks, arguments),
                    "tokens_per_s" if own else "tok_s_gpu", scale=1.0 / ranks if name == "bf16" else 1.0,
                    environment=environment | alone | allocator)

    candidates = {name: side_of(name) for name in tried} if against == "best" else {}
    return Case(
        label={"model": model, "device": device, "policy": policy, "ranks": ranks,
               "seq_len": arguments.seq, "micro_batch": arguments.micro_batch, "against": against}
              | ({"gpus": ranks} if device == "cuda" else {}) | ({"fp8": fp8} if fp8 else {}),
        unit="tokens/s a GPU" if device == "cuda" else "tokens/s a rank",
        ours=Side(ours, "tokens_per_s", scale=1.0 / ranks, environment=environment),
        peer=next(iter(candidates.values())) if candidates else side_of(against),
        by_rank=True,
        candidates=candidates,
        settings=arguments,
    )


# What a case may say for itself, and how it is read.
CASE_OPTIONS = {"seq": int, "micro_batch": int, "steps": int, "losses": int, "profile": int, "peer": str, "fp8": str}


def with_case_options(arguments: argparse.Namespace, text: str) -> argparse.Namespace:
    changed = argparse.Namespace(**vars(arguments))
    for option in filter(None, text.split(",")):
        key, _, value = option.partition("=")
        try:
            setattr(changed, key, CASE_OPTIONS[key](value.replace("+", ",")))
        except (KeyError, ValueError):
            raise BenchError(EXIT_USAGE, f'"{option}" is not an option of a case; choose from '
                                         f"{', '.join(CASE_OPTIONS)}") from None
    return changed


def training_cases(arguments: argparse.Namespace) -> list[Case]:
    cases = []
    for text in filter(None, arguments.cases.split(";")):
        try:
            model, policy, worlds, *options = text.strip().split(":")
            ranks = [int(world) for world in worlds.split(",")]
        except ValueError:
            raise BenchError(EXIT_USAGE, f'"{text}" is not MODEL:POLICY:RANKS[,RANKS][:KEY=VALUE,...]') from None
        own = with_case_options(arguments, ":".join(options))
        peers = peers_of(policy, own.peer, own.python, DEVICES[own.mode][0])
        if not own.fp8 and any(peer.endswith("-fp8") for peer in peers):
            raise BenchError(EXIT_USAGE, f"FP8 peers need FP8 on our side; give {model} fp8=RECIPE, or use --fp8")
        cases += [training_case(model, policy, world, against, own) for world in ranks for against in peers]
    return cases


def pair_case(arguments: argparse.Namespace) -> list[Case]:
    if not (arguments.ours and arguments.peer):
        raise BenchError(EXIT_USAGE, "give a mode, or both --ours and --peer")
    ours, peer = (Side(shlex.split(text), arguments.metric)
                  for text in (arguments.ours, arguments.peer))
    return [Case({"model": arguments.label or "pair"}, arguments.metric, ours, peer)]
