#!/usr/bin/env python3
"""Loss curves of one model trained in several ways, beside the spread of seeds.

    bench/curves.py [--config "..."] [--ways "NAME: --key=value ...; ..."] [--seeds 3] [--out FILE]

The first way is the reference and runs once for each seed; the others run with the first seed. A way agrees
when its last validation loss is at most the worst of the reference's seeds, and so is the mean of the losses of its
last steps, the reference's spread added once more: a seed decides which text a step reads. Runs go side by side on
the GPUs that there are, one each; on a CPU one after another. Training text is --text: a file or a folder, by default
the Python sources of the torch that --python has, which are real and everywhere the same.

Exit codes: 0 every way agrees, 8 one does not, 1 a run failed, 2 wrong usage, 3 no program or no text.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import datetime
import json
import queue
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from machine import describe_commit, describe_machine, environment, visible_gpus
from programs import (EXIT_BELOW, EXIT_ENVIRONMENT, EXIT_USAGE, ROOT, BenchError, Side, json_objects, last_with,
                      output_of, run_program, say)

CONFIG = ("--model.preset=llama-1b --precision.compute=bf16 --data.seq_len=2048 --train.global_batch=4 "
          "--train.steps=500 --train.val_every=100 --train.val_batches=25 --optim.warmup_steps=50 -n 1 --device=cuda")
WAYS = ("bf16; tensorwise: --precision.fp8=tensorwise; rowwise: --precision.fp8=rowwise; "
        "blockwise: --precision.fp8=blockwise; "
        "delayed: --precision.fp8=tensorwise --precision.fp8_scaling=delayed --precision.fp8_fast=all")
SEED = 42


@dataclass(frozen=True)
class Training:
    way: str
    seed: int
    command: list[str]


def ways_of(text: str) -> dict[str, list[str]]:
    ways = {}
    for part in filter(str.strip, text.split(";")):
        name, _, options = part.partition(":")
        ways[name.strip()] = shlex.split(options)
    if len(ways) < 2:
        raise BenchError(EXIT_USAGE, "--ways needs the reference and at least one other way, separated by ;")
    return ways


def text_of(arguments: argparse.Namespace, folder: Path) -> Path:
    """One file with all sources, in the order of their names."""
    if arguments.text:
        return Path(arguments.text).resolve()
    root = output_of([arguments.python, "-c", "import torch; print(torch.__path__[0])"])
    if not root:
        raise BenchError(EXIT_ENVIRONMENT, f"{arguments.python} has no torch, whose sources are the default text; pass --text")
    target = folder / "sources.txt"
    with target.open("w") as out:
        for path in sorted(Path(root).rglob("*.py")):
            out.write(path.read_text(errors="replace") + "\n")
    return target


def train(training: Training, gpus: queue.Queue, timeout: float) -> dict:
    gpu = gpus.get()
    try:
        visible = {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
        output = run_program(Side(training.command, "", environment=visible), timeout)
    finally:
        gpus.put(gpu)
    objects = json_objects(output.text)
    steps = [item for item in objects if "step" in item and "loss" in item]
    validations = [[item["step"], item["val_loss"]] for item in steps if item.get("val_loss") is not None]
    result = {"way": training.way, "seed": training.seed, "command": shlex.join(training.command),
              "final_val_loss": last_with(objects, "final_val_loss", "val_loss"),
              "losses": [round(item["loss"], 5) for item in steps], "val_losses": validations, "gpus": output.gpus}
    say(f"  {training.way}, seed {training.seed}: loss {steps[-1]['loss']:.4f}, validation {result['final_val_loss']:.4f}")
    return result


def judge(runs: list[dict], last: int) -> dict:
    reference = runs[0]["way"]

    def numbers(run: dict) -> tuple[float, float]:
        return run["final_val_loss"], statistics.fmean(run["losses"][-last:])

    seeds = [numbers(run) for run in runs if run["way"] == reference]
    verdict = {"reference": reference, "last_steps": last,
               "val_loss": {"seeds": [val for val, _ in seeds]}, "train_loss": {"seeds": [loss for _, loss in seeds]}}
    for index, key in enumerate(("val_loss", "train_loss")):
        values = [one[index] for one in seeds]
        bound = max(values) + (max(values) - min(values)) * index
        ways = {run["way"]: numbers(run)[index] for run in runs if run["way"] != reference}
        verdict[key] |= {"spread": max(values) - min(values), "bound": bound, "ways": ways,
                         "agree": all(value <= bound for value in ways.values())}
    return verdict


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=CONFIG, help="arguments of 'trireme train' for all runs")
    parser.add_argument("--ways", default=WAYS, help="names and arguments in which the runs differ")
    parser.add_argument("--seeds", type=int, default=3, help="number of reference runs, each with its own seed")
    parser.add_argument("--last", type=int, default=50, help="number of last steps whose mean loss is compared")
    parser.add_argument("--text", help="file or folder of training text")
    parser.add_argument("--bin", default="./build/release/bin/trireme")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--timeout", type=float, default=1800.0, help="time limit of a run in seconds")
    parser.add_argument("--commit", help="commit to record, if the sources are not in a repository")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "curves.json")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    try:
        with tempfile.TemporaryDirectory(prefix="trireme-curves-") as name:
            return measure(arguments, Path(name))
    except BenchError as error:
        say(f"[bench.curves] {error}")
        return error.code


def measure(arguments: argparse.Namespace, folder: Path) -> int:
    ways, text = ways_of(arguments.ways), text_of(arguments, folder)
    reference = next(iter(ways))
    common = [arguments.bin, "train", *shlex.split(arguments.config), f"--data.path={text}", "--json",
              "--checkpoint.final_weights=false", "--train.sample_tokens=0", f"--run-dir={folder / 'runs'}"]
    pairs = [(reference, SEED + i) for i in range(arguments.seeds)] + [(way, SEED) for way in ways if way != reference]
    trainings = [Training(way, seed, [*common, f"--seed={seed}", *ways[way]]) for way, seed in pairs]
    gpus: queue.Queue = queue.Queue()
    for gpu in visible_gpus() or [""]:
        gpus.put(gpu)
    machine = describe_machine(arguments.python)
    with concurrent.futures.ThreadPoolExecutor(gpus.qsize()) as pool:
        runs = list(pool.map(lambda training: train(training, gpus, arguments.timeout), trainings))
    verdict = judge(runs, arguments.last)
    result = {"mode": "curves", **describe_commit(arguments.commit),
              "measured": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
              "machine": machine, "environment": environment(), "text_bytes": text.stat().st_size if text.is_file() else None,
              "command": shlex.join(sys.argv).replace(str(Path.home()), "~"), "verdict": verdict, "runs": runs}
    arguments.out.write_text(json.dumps(result, indent=1).replace(str(folder), "FOLDER") + "\n")
    for key in ("val_loss", "train_loss"):
        of = verdict[key]
        print(f"{key}: seeds of {verdict['reference']} {', '.join(f'{value:.4f}' for value in of['seeds'])}; "
              + ", ".join(f"{way} {value:.4f}" for way, value in of["ways"].items())
              + f"; at most {of['bound']:.4f}: {'agree' if of['agree'] else 'do not agree'}")
    return 0 if all(verdict[key]["agree"] for key in ("val_loss", "train_loss")) else EXIT_BELOW


if __name__ == "__main__":
    sys.exit(main())
