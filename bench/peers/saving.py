"""Saves of the PyTorch peer by torch.distributed.checkpoint.async_save, and what training waits for them.

async   as it is called without options: the state is copied to host memory while training waits, and a thread writes
pinned  with a DefaultStager of all its options but shared memory: the copy goes to pinned memory beside the next
        passes, and the next update waits for it, as in torchtitan
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

MODES = ("async", "pinned")
STEPS_AFTER = 2  # that are timed together with a save


def add_save_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--save", default="", choices=["", *MODES], help="how the state is saved")
    parser.add_argument("--save-after", type=lambda text: [int(step) for step in text.split(",")], default=[],
                        metavar="STEP,...", help="steps after which it is saved, counted from 1")
    parser.add_argument("--save-to", default="", help="folder for the saved state")


class Saver:
    """Of one training run. Its calls are to be made by all ranks."""

    def __init__(self, options: argparse.Namespace, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.options, self.net, self.optimizer = options, net, optimizer
        self.step, self.saves = 0, []
        self.staging = self.upload = None
        self.timed_from = 0.0
        self.stager = None
        if options.save == "pinned":
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            self.stager = DefaultStager(StagingOptions(use_shared_memory=False))

    def before_update(self) -> None:
        if self.staging is not None:
            self.staging.result()
            self.staging = None

    def after_step(self) -> None:
        self.step += 1
        if self.step in self.options.save_after:
            self.save()
        elif self.saves and self.step == self.saves[-1]["after"] + STEPS_AFTER:
            torch.cuda.synchronize()
            self.saves[-1]["with_next_steps_s"] = time.perf_counter() - self.timed_from

    def save(self) -> None:
        from torch.distributed.checkpoint import async_save
        from torch.distributed.checkpoint.state_dict import get_state_dict

        torch.cuda.synchronize()
        dist.barrier()
        torch.cuda.synchronize()
        self.timed_from = time.perf_counter()
        if self.upload is not None:
            self.upload.result()  # one at a time
        model, optimizer = get_state_dict(self.net, self.optimizer)
        state = {"model": model, "optimizer": optimizer}
        folder = Path(self.options.save_to) / f"step-{self.step}"
        response = async_save(state, checkpoint_id=folder, async_stager=self.stager)
        if self.stager is not None:
            self.staging, self.upload = response.staging_completion, response.upload_completion
        else:
            self.upload = response
        self.saves.append({"after": self.step, "stall_s": time.perf_counter() - self.timed_from})

    def finish(self) -> list[dict]:
        """Of every save: the step that it came after, what async_save took, and that with the next steps."""
        self.before_update()
        if self.upload is not None:
            begin = time.perf_counter()
            self.upload.result()
            self.saves[-1]["waited_at_the_end_s"] = time.perf_counter() - begin
        if self.stager is not None:
            self.stager.close()
        return self.saves
