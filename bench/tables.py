#!/usr/bin/env python3
"""The tables of README.md and docs/, made from raw files.

    bench/tables.py            writes them
    bench/tables.py --check    exits 8 when one differs from what its raw files say; CI runs this

A table stands between two comments:

    <!-- table: KIND FILE [FILE ...] -->
    ...
    <!-- end of table -->

FILE lies in bench/results; FILE:MODEL is the cases of one model in a file of "speed" or "fp8". Kinds: speed (compare.py gpu), fp8 (compare.py gpu --fp8), curves (curves.py), ladder
(runs of trireme train --json), cpu (compare.py cpu), vision (compare.py vision and vision-cpu), collectives (trireme
bench comm), memory (trireme bench memory), gpu-tests (tools/gpu_tests.py). A row of "speed" or "fp8" says what its peer
lacks of what PyTorch's users can switch on. Rows whose sources are of no commit or differ from theirs, and rows that were
measured while other programs ran, say so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from machine import load_warning

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
EXIT_USAGE, EXIT_DIFFERS = 2, 8
REGION = re.compile(r"(<!-- table: (?P<words>[^>]+?) -->\n)(?P<table>.*?)(<!-- end of table -->)", re.DOTALL)


class TableError(Exception):
    """A region that cannot be made."""


def read(name: str) -> dict:
    try:
        return json.loads((RESULTS / name).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise TableError(f"bench/results/{name}: {error}") from error


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def peak_of(side: dict) -> float | None:
    """What the process took of the GPU; torch's own count leaves out what CUDA graphs hold."""
    return side.get("nvml_peak_bytes", side.get("peak_bytes"))


def gib(count: float | None) -> str:
    return f"{count / 2**30:.1f} GiB" if count else "-"


def ratio(case: dict) -> tuple[str, str]:
    return f"**{case['ratio']:.3f}**", f"{case['ratio_min']:.3f} to {case['ratio_max']:.3f}"


def startup(case: dict) -> str:
    ours, peer = (case[side].get("startup_s") for side in ("ours", "peer"))
    if not ours or not peer:
        return "-"
    return f"{ours.get('warm', ours['first']):.1f}, peer {peer.get('warm', peer['first']):.1f}"


def doubts(file: dict) -> list[str]:
    """What is recorded that makes a file's numbers worth less."""
    found = []
    if file.get("commit", "unknown") == "unknown":
        found.append("no commit")
    elif changed := file.get("changed_files"):
        found.append(f"sources differ by {changed} files")
    elif "changed_files" in file and changed is None:
        found.append("sources not compared with their commit")
    if warning := load_warning(file.get("machine", {})):
        found.append(warning)
    return found


def source(name: str, file: dict) -> str:
    return f"({'; '.join([f'[raw](results:{name})', *doubts(file)])})"


# What a peer is


def without_nvls(file: dict) -> bool:
    """NCCL could not reduce in the switches, nor PyTorch's symmetric memory write to all GPUs at once."""
    said = file.get("environment", {})
    return said.get("NCCL_NVLS_ENABLE") == "0" or said.get("TORCH_SYMM_MEM_DISABLE_MULTICAST") == "1"


def lacks(case: dict, file: dict) -> list[str]:
    """What users of PyTorch can switch on, and this peer did not."""
    command, found = case["peer"]["command"], []
    alone = case.get("ranks", 1) == 1
    if re.search("(torch|deepspeed)_train.py", command):
        whole = "--whole" in command
        if not (whole or re.search(r"--compile\b(?!-)", command)):
            found.append("compiled blocks")
        if not (whole or "--compile-loss" in command):
            found.append("compiled loss")
    if "torch_train.py" in command:
        # The program that wrote no commit resharded the root and read the same few batches again.
        if "commit" not in file:
            found += ["fresh tokens"] + (["a root that stays gathered"] if "fsdp2" in command else [])
        if alone and "--strategy=fsdp2" in command and "torch-whole" not in case.get("trials", {}):
            found.append("a trial without FSDP2 around its only rank")
        if not alone and "--strategy=ddp" in command and "--dtype=bf16" in command:
            found.append("gradients sent in bf16")
        ours = case["ours"].get("settings", {}).get("memory", {})
        if "--ac" in command.split() and (recompute := ours.get("recompute", "block")) != "block":
            found.append("attention that is not computed again" if recompute == "all_but_attention"
                         else "activations that are kept")
    if "expandable_segments:True" not in command:
        found.append("expandable segments")
    if not alone and without_nvls(file):
        found.append("NVLS, off on this machine")
    return found


def peer_name(case: dict, file: dict) -> str:
    command = case["peer"]["command"]
    if case.get("against") == "replicas":
        return "our replicas, each alone"
    if case.get("against") == "bf16":
        return "ours in bf16"
    if stage := re.search(r"deepspeed_train.py --stage=(\d)", command):
        name = f"DeepSpeed ZeRO-{stage[1]}"
    else:
        strategy = re.search(r"--strategy=(\S+)", command)
        names = {"fsdp2": "FSDP2", "fsdp2-nores": "FSDP2 without resharding", "ddp": "DDP", "amp": "autocast"}
        name = names.get(strategy[1], strategy[1]) if strategy else "PyTorch"
        if "--whole" in command:
            name += ", whole model compiled"
        elif re.search(r"--compile\b(?!-)", command):
            name += ", compiled"
        if recipe := re.search(r"--fp8=(\S+)", command):
            name += f", torchao {recipe[1]}" + " with the head" * ("--fp8-head" in command)
        if "--ac" in command.split():
            name += ", blocks recomputed"
    missing = lacks(case, file)
    return f"{name} (lacks {'; '.join(missing)})" if missing else name


# Tables


def measured_cases(words: Sequence[str]) -> Iterator[tuple[str, dict, dict]]:
    """Name of a file, the file, and a case of it that was measured."""
    for word in words:
        name, _, model = word.partition(":")
        file = read(name)
        cases = [case for case in file["cases"] if case["alternations"] and model in ("", case["model"])]
        if not cases:
            raise TableError(f"{word}: no such case was measured")
        yield from ((name, file, case) for case in cases)


def case_name(case: dict) -> str:
    gpus = f"{case['ranks']} GPU{'s' if case['ranks'] > 1 else ''}"
    return f"`{case['model']}`, {case['policy']}, {gpus}, T {case['seq_len']}, micro-batch {case['micro_batch']}"


def speed(names: Sequence[str]) -> str:
    rows = []
    for name, file, case in measured_cases(names):
        ours, peer = case["ours"], case["peer"]
        rows.append([
            f"{case_name(case)} {source(name, file)}",
            peer_name(case, file), f"{ours['median']:,.0f}", f"{peer['median']:,.0f}", *ratio(case),
            f"{100 * ours['mfu']:.1f}%" if "mfu" in ours else "-", gib(ours.get("peak_bytes")),
            gib(peer.get("peak_bytes")), startup(case)])
    return markdown(["case", "peer", "ours, tokens/s a GPU", "peer", "ratio", "min to max", "MFU", "our peak",
                     "peer's peak", "start-up, s"], rows)


def fp8(names: Sequence[str]) -> str:
    rows = []
    for name, file, case in measured_cases(names):
        ours, peer, precision = case["ours"], case["peer"], case["ours"]["settings"]["precision"]
        recipe = f"`{case['fp8']}`, {precision.get('fp8_scaling', 'dynamic')}, fast: {precision['fp8_fast']}"
        recipe += ", head" * precision.get("fp8_head", False)
        rows.append([
            f"{case_name(case)} {source(name, file)}", recipe, peer_name(case, file), f"{ours['median']:,.0f}",
            f"{peer['median']:,.0f}", *ratio(case), gib(ours.get("peak_bytes")), gib(peer.get("peak_bytes"))])
    return markdown(["case", "recipe", "peer", "ours, tokens/s a GPU", "peer", "ratio", "min to max", "our peak",
                     "peer's peak"], rows)


def curves(names: Sequence[str]) -> str:
    rows = []
    for name in names:
        file = read(name)
        last = file["verdict"]["last_steps"]
        for run in file["runs"]:
            mean = sum(run["losses"][-last:]) / last
            rows.append([run["way"], str(run["seed"]), f"{run['final_val_loss']:.4f}", f"{mean:.4f}"])
    return markdown(["training", "seed", "validation loss", f"mean loss of the last {last} steps"], rows)


SETTINGS = {"memory.recompute": "recompute", "precision.fp8": "FP8", "optim.state": "optimizer state"}


def ladder(names: Sequence[str]) -> str:
    """The settings that runs of one model differ in, and what a GPU needed."""
    rows = []
    for run in (run for name in names for run in read(name)["runs"]):
        options = dict(re.findall(r"--([\w.]+)=(\S+)", run["command"]))
        state, summary = run["summary"]["state_bytes"]["measured"], run["summary"]
        ranks = int(re.search(r" -n (\d+)", run["command"])[1])
        settings = [f"{word} {options[key]}" for key, word in SETTINGS.items() if key in options]
        rows.append([", ".join(settings), f"{summary['tokens_per_s'] / ranks:,.0f}", gib(summary["peak_bytes"]),
                     gib(sum(state[key] for key in ("parameters", "gradients", "optimizer"))),
                     gib(summary["activation_bytes"]["measured"])])
    return markdown(["settings", "tokens/s a GPU", "peak", "model state", "activations"], rows)


def cpu(names: Sequence[str]) -> str:
    rows = [[", ".join(filter(None, (case["model"], case.get("dtype")))) + f" ({'; '.join(doubts(file))})" * bool(doubts(file)), f"{case['ranks']} x {case['threads']}", f"{case['ours']['median']:,.0f}",
             MODES[case.get("against", "eager")], f"{case['peer']['median']:,.0f}", f"**{case['ratio']:.2f}**",
             f"{case['ratio_min']:.2f} to {case['ratio_max']:.2f}", startup(case)]
            for file in map(read, names) for case in file["cases"]]
    return markdown(["model", "ranks x threads", "ours, tokens/s", "peer", "PyTorch", "ratio", "min to max", "start-up, s"],
                    rows)


PRECISIONS = {"amp": "autocast", "bf16": "bf16 weights", "fp32": "fp32"}
MODES = {"eager": "eager", "compile": "compiled", "graphs": "compiled with CUDA graphs", "autotune": "max-autotune",
         "autotune_nographs": "max-autotune without CUDA graphs"}


def vision_peer(against: str) -> str:
    precision, mode, *others = against.split("-")
    return ", ".join([PRECISIONS[precision], MODES[mode], *others])


def vision(names: Sequence[str]) -> str:
    rows = []
    for name in names:
        file = read(name)
        for case in file["cases"]:
            if not case["alternations"]:
                continue
            ours, peer, bound = case["ours"], case["peer"], case["bound"]
            where = f"{case['ranks']} GPU{'s' if case['ranks'] > 1 else ''}"
            if case["device"] == "cpu":
                where = f"{case['ranks']} x {case['threads']} threads"
            rows.append([
                f"`{case['model']}`, {where}, {case['image_size']}x{case['image_size']}, batch {case['batch']}"
                f"{', augmented' if case['augment'] else ''} {source(name, file)}",
                vision_peer(case["against"]), f"{ours['median']:,.0f}", f"{peer['median']:,.0f}", *ratio(case),
                f"{bound['peer']['median']:,.0f}", f"{bound['ratio']:.3f}", gib(peak_of(ours)),
                gib(peak_of(peer))])
    return markdown(["case", "peer", "ours, images/s of a rank", "PyTorch", "ratio", "min to max",
                     "PyTorch without reading", "ratio to that", "our peak", "PyTorch's peak"], rows)


def collectives(names: Sequence[str]) -> str:
    columns = {"ours, reduce-scatter": ("reduce_scatter", "ordered, peer memory"),
               "NCCL bf16": ("reduce_scatter", "backend bf16"),
               "cast, NCCL fp32": ("reduce_scatter", "cast, backend fp32"),
               "ours, gather by kernels": ("all_gather", "peer memory"),
               "by copy engines": ("all_gather", "copy engines"), "NCCL": ("all_gather", "backend")}
    times = {(row["mib"], row["operation"], row["by"]): row["ms"]
             for name in names for row in read(name)["rows"] if not row.get("in_place")}
    sizes = sorted({size for size, _, _ in times})
    try:
        rows = [[f"{size:g}", *(f"{times[size, *column]:.3f}" for column in columns.values())] for size in sizes]
    except KeyError as missing:
        raise TableError(f"{' '.join(names)}: no row {missing}") from missing
    return markdown(["MiB", *columns], rows)


def memory(names: Sequence[str]) -> str:
    rows = [row for name in names for row in read(name)["rows"]]
    first = rows[0]["state_bytes"]["measured"]["total"]
    return markdown(["policy", "state a rank", "saved", "sent a step", "peak resident", "predicted peak"],
                    [[row["policy"], f"{row['state_bytes']['measured']['total'] / 2**20:.0f} MiB",
                      f"{100 * (1 - row['state_bytes']['measured']['total'] / first):.0f}%",
                      f"{row['wire_bytes_per_step']['measured'] / 2**20:.0f} MiB",
                      f"{row['peak_bytes'] / 2**20:.0f} MiB",
                      f"{row['peak_bytes_predicted'] / 2**20:.0f} MiB"] for row in rows])


def gpu_tests(names: Sequence[str]) -> str:
    rows = []
    for name in names:
        record = read(name)
        counts = ", ".join(f"{count} {result}" for result, count in sorted(record["counts"].items()))
        rows.append(["; ".join([record["commit"][:12], *doubts(record)]), record["date"][:10], record["device"], record["driver"], counts,
                     f"{record['seconds']:.0f}"])
    return markdown(["commit", "date", "machine", "driver", "tests", "seconds"], rows)


KINDS: dict[str, Callable[[Sequence[str]], str]] = {
    "speed": speed, "fp8": fp8, "curves": curves, "ladder": ladder, "cpu": cpu, "vision": vision,
    "collectives": collectives, "memory": memory, "gpu-tests": gpu_tests}


def make(words: str) -> str:
    kind, *names = words.split()
    if kind not in KINDS or not names:
        raise TableError(f'"{words}" is not one of {", ".join(KINDS)} and a file')
    return KINDS[kind](names)


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    yield from sorted((ROOT / "docs").glob("*.md"))


def with_tables(page: Path) -> str:
    links = os.path.relpath(RESULTS, page.parent)

    def replaced(region: re.Match[str]) -> str:
        try:
            table = make(region["words"]).replace("(results:", f"({links}/")
            return region[1] + table + region[4]
        except (TableError, KeyError) as error:
            raise TableError(f"{page.relative_to(ROOT)}: {region['words']}: {error}") from error

    return REGION.sub(replaced, page.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check that the tables are up to date")
    check = parser.parse_args().check
    stale = []
    try:
        for page in pages():
            text = with_tables(page)
            if text == page.read_text():
                continue
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(text)
    except TableError as error:
        print(f"[bench.tables] {error}", file=sys.stderr)
        return EXIT_USAGE
    if check and stale:
        print(f"[bench.tables] {', '.join(stale)}: tables differ from their raw files; run bench/tables.py",
              file=sys.stderr)
        return EXIT_DIFFERS
    return 0


if __name__ == "__main__":
    sys.exit(main())
