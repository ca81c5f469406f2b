"""What the raw file says of the machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from programs import output_of

# Beginnings of the environment variables that may change what is measured.
VARIABLES = ("OMP_", "MKL_", "KMP_", "MALLOC_", "NCCL_", "CUDA_", "TORCH", "TRITON_", "DS_",
             "PYTHONPATH", "PYTORCH_")


def first_line(path: str, key: str) -> str | None:
    """The value of the first "key : value" line of a file under /proc."""
    try:
        for line in Path(path).read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == key:
                return value.strip()
    except OSError:
        pass
    return None


def changed_files(commit: str) -> int | None:
    """How many sources differ from that commit or are not in it; None where the repository does not have it."""
    if output_of(["git", "cat-file", "-e", f"{commit}^{{commit}}"]) is None:
        return None
    differ = output_of(["git", "diff", "--name-only", commit, "--"])
    new = output_of(["git", "ls-files", "--others", "--exclude-standard"])
    if differ is None or new is None:
        return None
    return sum(not path.startswith("bench/results/") for path in {*differ.splitlines(), *new.splitlines()})


def describe_commit(said: str | None) -> dict[str, object]:
    """The commit that was said, else the one that is checked out, and how many files differ from it."""
    commit = said or output_of(["git", "rev-parse", "HEAD"])
    return {"commit": commit or "unknown", "changed_files": changed_files(commit) if commit else None}


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    if said := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return said.split(",")
    listed = output_of(["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"])
    return listed.split() if listed else []


def describe_machine(python: str) -> dict:
    memory_kib = (first_line("/proc/meminfo", "MemTotal") or "0").split()[0]
    gpus = output_of(["nvidia-smi", "--query-gpu=name,memory.total,driver_version,power.limit,clocks.max.sm",
                      "--format=csv,noheader"])
    return {
        "cpu": first_line("/proc/cpuinfo", "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kib) / 2**20, 1),
        "kernel": platform.release(),
        "python": output_of([python, "--version"]),
        "torch": output_of([python, "-c", "import torch; print(torch.__version__)"]),
        "gpus": gpus.splitlines() if gpus else [],
        "load_average": os.getloadavg(),
    }


def load_warning(machine: dict) -> str | None:
    """Of a machine as it is described here, before anything was measured."""
    load, cores = (machine.get("load_average") or [0.0])[0], machine.get("cores") or 0
    if load <= 0.5 * cores:
        return None
    return f"load average {load:.1f} on {cores} cores at the start"


def environment() -> dict[str, str]:
    return {key: value.replace(str(Path.home()), "~") for key, value in sorted(os.environ.items())
            if key.startswith(VARIABLES)}
