"""DeepSpeed peer: the model of torch_train.py under ZeRO stage 1, 2 or 3; prints a JSON line.

Launch: torchrun --standalone --nproc_per_node N deepspeed_train.py --model llama-1b --stage 2
bf16 compute and reduction, fp32 master weights, communication overlapped with backward, and torch's
fused AdamW: DeepSpeed's own would first have to be compiled. training.py says what the options do.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from training import (Setup, adamw_arguments, add_options, build_model, leave, report, run_steps,
                      set_up)


def engine_config(setup: Setup) -> dict:
    options = setup.options
    return {
        "train_micro_batch_size_per_gpu": options.mbs,
        "gradient_accumulation_steps": options.accum,
        "gradient_clipping": setup.grad_clip,
        "bf16": {"enabled": options.dtype == "bf16"},
        "zero_optimization": {
            "stage": options.stage,
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": options.bucket,
            "allgather_bucket_size": options.bucket,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }


def train(setup: Setup) -> None:
    import deepspeed

    options = setup.options
    deepspeed.init_distributed("nccl" if setup.is_cuda else "gloo")
    model = build_model(setup)
    parameters = sum(p.numel() for p in model.parameters())
    if options.compile:
        for block in model.blocks:
            block.compile()  # in place: stage 3 looks at the modules themselves
    if options.compile_loss:
        model.loss_of = torch.compile(model.loss_of, fullgraph=True)
    optimizer = torch.optim.AdamW(**adamw_arguments(setup, model.parameters()))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=engine_config(setup))

    def train_step(parts: Sequence[Tensor]) -> Tensor:
        losses = []
        for ids in parts:
            loss = engine(ids[:, :-1], ids[:, 1:])
            engine.backward(loss)
            engine.step()  # updates after the last micro-batch
            losses.append(loss.detach())
        return torch.stack(losses).double().mean()

    seconds, losses = run_steps(setup, engine.optimizer.param_groups, train_step)
    peer = {"peer": "deepspeed", "deepspeed": deepspeed.__version__, "stage": options.stage,
            "settings": engine_config(setup)}
    report(setup, peer, parameters, seconds, losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    parser.add_argument("--stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--bucket", type=int, default=50_000_000,
                        help="elements to reduce or gather at once")
    options = parser.parse_args()
    if options.device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # before deepspeed is imported
    setup = set_up(options)
    train(setup)
    leave(setup)


if __name__ == "__main__":
    main()
