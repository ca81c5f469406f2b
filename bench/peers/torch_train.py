"""PyTorch peer: trains a Llama or GPT shaped model with one stock strategy and prints a JSON line.

Launch: PYTORCH_ALLOC_CONF=expandable_segments:True torchrun --standalone --nproc_per_node N \
    torch_train.py --model llama-1b --strategy fsdp2 --compile --compile-loss
On one GPU also --strategy amp --whole: plain autocast, no wrapper, the whole model and its loss compiled.
Fused AdamW, SDPA, bf16 compute with fp32 master weights, and an FSDP2 root that stays gathered are the
defaults. training.py says what the options do.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from saving import Saver, add_save_options
from torch_model import Model
from training import (Setup, adamw_arguments, add_options, build_model, leave, report, run_steps,
                      set_up)

STRATEGIES = ("ddp", "fsdp2", "fsdp2-nores", "zero1", "bf16", "amp")


def to_float8(model: Model, recipe: str, head: bool, gathers_float8: bool) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_float8)
    if recipe == "rowwise":
        config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config,
                               module_filter_fn=lambda _, name: head or "head" not in name)


LINEAR = ("qkv", "o", "up", "gate_up", "down")  # layers of a block


def to_nf4(model: Model) -> None:
    """The matrices of blocks as bitsandbytes' QLoRA has them, in blocks of 64 without double quantization."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    for block in model.blocks:
        for name in LINEAR:
            if (layer := getattr(block, name, None)) is None:
                continue
            held = Linear4bit(layer.in_features, layer.out_features, bias=layer.bias is not None,
                              compute_dtype=torch.bfloat16, compress_statistics=False, quant_type="nf4", device="meta")
            held.weight = Params4bit(layer.weight.data, requires_grad=False, compress_statistics=False,
                                     quant_type="nf4", module=held).to(layer.weight.device)
            held.bias = layer.bias
            setattr(block, name, held)
    model.is_loaded_in_4bit = True  # PEFT asks


def add_adapters(model: Model, rank: int, dtype: torch.dtype, nf4: bool) -> None:
    """PEFT's LoRA on every linear layer of the blocks: the base in bf16 or NF4 and frozen, adapters in `dtype`."""
    from peft import LoraConfig, inject_adapter_in_model

    model.to(torch.bfloat16)
    if nf4:
        to_nf4(model)
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=list(LINEAR)),
                            model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def checkpoint_blocks(model: Model) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)


def shard(model: Model, setup: Setup, reshard: bool) -> Model:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=setup.dtype, reduce_dtype=torch.float32)
    mesh = None if setup.is_cuda else dist.init_device_mesh("cpu", (setup.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # The root's parameters are the first that backward wants.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return model


def replicate(model: Model, setup: Setup, static_graph: bool) -> nn.Module:
    if not dist.is_initialized():
        return model
    devices = [setup.device.index] if setup.is_cuda else None
    return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True,
                                   static_graph=static_graph)


def wrap(model: Model, setup: Setup) -> nn.Module:
    options = setup.options
    if options.strategy.startswith("fsdp2"):
        return shard(model, setup, reshard=options.strategy == "fsdp2")
    if options.strategy == "amp":
        return model
    if options.strategy == "bf16":
        model.to(torch.bfloat16)
        return replicate(model, setup, static_graph=False) if setup.world > 1 else model
    # DDP's first backward of a static graph must synchronise, and the compiler wants to cut the graph by buckets.
    fixed = not options.ac and options.accum == 1 and not options.whole
    return replicate(model, setup, static_graph=fixed)


def make_optimizer(net: nn.Module, setup: Setup) -> torch.optim.Optimizer:
    arguments = adamw_arguments(setup, (p for p in net.parameters() if p.requires_grad))
    if setup.options.strategy != "zero1":
        return torch.optim.AdamW(**arguments)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(arguments.pop("params"), torch.optim.AdamW, **arguments)


def train(setup: Setup) -> None:
    options = setup.options
    model = build_model(setup)
    parameters = sum(p.numel() for p in model.parameters())
    sharded = options.strategy.startswith("fsdp2")
    if options.fp8:
        to_float8(model, options.fp8, options.fp8_head, gathers_float8=sharded)
    if options.lora:
        # FSDP2 wants the parameters of a block in one dtype.
        add_adapters(model, options.lora, torch.bfloat16 if sharded else torch.float32, options.nf4)
    if options.ac:
        checkpoint_blocks(model)
    if options.compile:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, fullgraph=not (options.ac or options.lora))
    if options.compile_loss:
        model.loss_of = torch.compile(model.loss_of, fullgraph=True)
    net = wrap(model, setup)
    if options.whole:
        net = torch.compile(net)
    optimizer = make_optimizer(net, setup)
    casts = options.dtype == "bf16" and options.strategy in ("amp", "ddp", "zero1")
    saver = Saver(options, net, optimizer) if options.save else None
    backends = [getattr(torch.nn.attention.SDPBackend, options.sdpa)] if options.sdpa else []

    def forward_and_backward(ids: Tensor, last: bool) -> Tensor:
        if sharded:
            model.set_requires_gradient_sync(last)
        with contextlib.ExitStack() as stack:
            if not last and hasattr(net, "no_sync"):
                stack.enter_context(net.no_sync())
            if backends:
                stack.enter_context(torch.nn.attention.sdpa_kernel(backends))
            with torch.autocast(setup.device.type, torch.bfloat16, enabled=casts):
                loss = net(ids[:, :-1], ids[:, 1:]) / options.accum
            loss.backward()
        return loss.detach()

    def train_step(parts: Sequence[Tensor]) -> Tensor:
        losses = [forward_and_backward(ids, index == len(parts) - 1)
                  for index, ids in enumerate(parts)]
        if setup.grad_clip:
            nn.utils.clip_grad_norm_(net.parameters(), setup.grad_clip)
        if saver:
            saver.before_update()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if saver:
            saver.after_step()
        return torch.stack(losses).double().sum()

    seconds, losses = run_steps(setup, optimizer.param_groups, train_step)
    peer = {"peer": "torch", "strategy": options.strategy, "fp8": options.fp8,
            "fp8_head": options.fp8_head, "ac": options.ac, "lora": options.lora, "nf4": options.nf4,
            "sdpa": options.sdpa} | ({"saves": saver.finish()} if saver else {})
    report(setup, peer, parameters, seconds, losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--strategy", default="fsdp2", choices=STRATEGIES)
    parser.add_argument("--fp8", default="", choices=["", "tensorwise", "rowwise"])
    parser.add_argument("--fp8-head", action="store_true", help="with --fp8: the head too")
    parser.add_argument("--whole", action="store_true",
                        help="compile the model and its loss as one (amp and ddp)")
    parser.add_argument("--ac", action="store_true", help="recompute each block")
    parser.add_argument("--lora", type=int, default=0, metavar="RANK",
                        help="train adapters of this rank, by PEFT, on frozen bf16 weights")
    parser.add_argument("--nf4", action="store_true", help="with --lora: hold blocks in NF4, by bitsandbytes")
    parser.add_argument("--sdpa", default="", help="name of an SDPBackend")
    add_save_options(parser)
    options = parser.parse_args()
    if options.whole and (options.compile or options.strategy not in ("amp", "ddp")):
        parser.error("--whole is for --strategy amp or ddp, in place of --compile")
    if options.strategy == "amp" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("--strategy amp is for one GPU")
    if options.nf4 and not (options.lora and options.strategy in ("amp", "ddp", "bf16")):
        parser.error("--nf4 goes with --lora, without FSDP2")
    if options.save and not (options.save_after and options.save_to and options.device == "cuda"):
        parser.error("--save goes with --save-after and --save-to, on GPUs")
    setup = set_up(options)
    if setup.is_cuda:
        # Saving talks between hosts.
        backend = "cpu:gloo,cuda:nccl" if options.save else "nccl"
        dist.init_process_group(backend, device_id=setup.device)
    elif "RANK" in os.environ:
        dist.init_process_group("gloo")
    train(setup)
    leave(setup)


if __name__ == "__main__":
    main()
