#!/usr/bin/env python3
"""What a save costs training on GPUs: ours beside PyTorch's async_save, as a JSON file.

    bench/stall.py --model llama-3b --ranks 2 --seq 4096 --micro-batch 1 [--accumulation 4] --save-after 20,60
                   [--modes async,pinned] [--rounds 1] [--seconds N] --disk FOLDER --out FILE

Every program trains some steps, saves its whole state (fp32 parameters, moments) after some of them, and goes on
with the next. Of each save
    stall_s    is what the call took that saves,
    visible_s  what the call and the two steps behind it took more than two steps take without a save,
and `write_s`, where it is known, until it was on the disk. Programs take turns. peers/saving.py says what the modes
are. Exit codes: 0 done, 1 a program failed, 3 there is no build.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from cases import ALLOCATOR, MODEL_OPTIONS, torchrun
from machine import describe_commit, describe_machine
from programs import EXIT_ENVIRONMENT, EXIT_FAILED, PEERS, BenchError, Side, json_objects, last_with, run_program, say

STEPS_AFTER = 2
WARM_UP = 5  # steps that no median counts


def our_saves(steps: list[dict], plain_s: float) -> list[dict]:
    """The update of a saved step is waited for by the save, and so no part of the step behind it."""
    saves = []
    for index, step in enumerate(steps):
        behind = steps[index + 1:index + 1 + STEPS_AFTER]
        if "checkpoint_ms" not in step or len(behind) < STEPS_AFTER:
            continue
        stall = step["checkpoint_ms"] / 1e3
        spent = stall + sum(one["step_ms"] for one in behind) / 1e3
        saves.append({"after": step["step"], "stall_s": stall, "visible_s": spent - STEPS_AFTER * plain_s})
    return saves


def plain_seconds(steps: list[dict]) -> float:
    """The median of those that no save is near."""
    saved = {step["step"] for step in steps if "checkpoint_ms" in step}
    near = {after + more for after in saved for more in range(1, STEPS_AFTER + 1)}
    return statistics.median(step["step_ms"] for step in steps
                             if step["step"] > WARM_UP and step["step"] not in near) / 1e3


class Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        # Both go on for some steps behind the last save; ours saves at the end, too, and so one step later.
        self.every = options.save_after[0]
        self.steps = options.save_after[-1] + STEPS_AFTER + 2

    def our_command(self) -> list[str]:
        options = self.options
        model = MODEL_OPTIONS.get(options.model, [f"--model.preset={options.model}"])
        batch = options.ranks * options.micro_batch * options.accumulation
        return [options.bin, "train", "-n", str(options.ranks), *model, f"--data.seq_len={options.seq}",
                "--device=cuda", "--precision.compute=bf16", "--parallel.policy=fsdp",
                f"--train.micro_batch={options.micro_batch}", f"--train.global_batch={batch}",
                f"--train.steps={self.steps}", "--train.val_batches=0", "--train.sample_tokens=0",
                f"--checkpoint.every={self.every}", "--checkpoint.keep=1", "--checkpoint.final_weights=false",
                f"--run-dir={self.folder}", "--json", *options.ours_args]

    def ours(self) -> dict:
        side = Side(self.our_command(), "tokens_per_s")
        output = run_program(side, self.options.timeout)
        steps = [item for item in json_objects(output.text) if "step_ms" in item]
        plain = plain_seconds(steps)
        peaks = [step["peak_bytes"] for step in steps if step.get("peak_bytes")]
        return {"command": side.printable(), "step_s": plain, "saves": our_saves(steps, plain),
                "peak_bytes": max(peaks, default=None), "steps": steps}

    def peer(self, mode: str) -> dict:
        options = self.options
        saves = ",".join(str(step) for step in options.save_after)
        command = [*torchrun(options.python, options.ranks), f"{PEERS}/torch_train.py", f"--model={options.model}",
                   "--strategy=fsdp2", "--compile", "--compile-loss", f"--seq={options.seq}",
                   f"--mbs={options.micro_batch}", f"--accum={options.accumulation}", f"--warmup={WARM_UP}",
                   f"--steps={self.steps - WARM_UP}", f"--save={mode}", f"--save-after={saves}",
                   f"--save-to={self.folder}", *options.peer_args]
        side = Side(command, "tok_s_gpu", environment=ALLOCATOR)
        objects = json_objects(run_program(side, options.timeout).text)
        plain = last_with(objects, "step_ms") / 1e3
        saves = [save | {"visible_s": save["with_next_steps_s"] - STEPS_AFTER * plain}
                 for save in last_with(objects, "saves") if "with_next_steps_s" in save]
        return {"command": side.printable(), "step_s": plain, "saves": saves,
                "peak_bytes": int(last_with(objects, "peak_alloc_gib") * 2**30)}

    def run(self, side: str) -> dict:
        result = self.ours() if side == "ours" else self.peer(side)
        for path in self.folder.iterdir():
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
        for save in result["saves"]:
            say(f"{side}: step {result['step_s']:.3f} s; the save after step {save['after']}: stall "
                f"{save['stall_s']:.3f} s, visible {save['visible_s']:.3f} s")
        return result


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--save-after", type=lambda text: [int(step) for step in text.split(",")], default=[20],
                        help="steps after which to save; multiples of the first")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["async", "pinned"],
                        help="save modes of the peer (default: async,pinned)")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no program after so many seconds")
    parser.add_argument("--timeout", type=float, default=600.0)
    parser.add_argument("--bin", default="./build/release/bin/trireme")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch")
    parser.add_argument("--ours-args", type=shlex.split, default=[])
    parser.add_argument("--peer-args", type=shlex.split, default=[])
    parser.add_argument("--disk", type=Path, help="folder to save in (default: that of temporary files)")
    parser.add_argument("--commit", help="commit to record, if the sources are not in a repository")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if any(step % options.save_after[0] != 0 for step in options.save_after):
        parser.error("--save-after wants multiples of its first step")
    return options


def main() -> int:
    options = parse_arguments()
    began = time.monotonic()
    result = {"benchmark": "stall", "command": "bench/stall.py " + " ".join(sys.argv[1:]),
              **describe_commit(options.commit), "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
              "machine": describe_machine(options.python), "model": options.model, "ranks": options.ranks,
              "rounds": []}
    if not Path(options.bin).exists():
        say(f"{options.bin} does not exist; build it, or set --bin")
        return EXIT_ENVIRONMENT
    code = 0
    with tempfile.TemporaryDirectory(dir=options.disk) as scratch:
        bench = Bench(options, Path(scratch))
        for turn in range(options.rounds):
            sides = ["ours", *options.modes]
            found = result["rounds"]
            found.append({})
            for side in sides if turn % 2 == 0 else reversed(sides):
                if time.monotonic() - began > options.seconds:
                    break
                try:
                    found[-1][side] = bench.run(side)
                except BenchError as error:
                    say(f"{side}: {error}")
                    code = EXIT_FAILED
                options.out.write_text(json.dumps(result, indent=1) + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
