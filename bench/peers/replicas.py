"""N runs of one program at once, a GPU each, that know nothing of each other: what data parallelism
would give if communication cost nothing.

    bench/peers/replicas.py N -- COMMAND

COMMAND prints JSON lines with "step" and "tokens_per_s". For each step of all runs a line with the
mean of their tokens/s is printed, and the highest peak of their memory. Exit code: the first that
is not 0 of the runs, 2 for usage.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TextIO


def visible_gpus(count: int) -> list[str]:
    """One a run; those beyond what CUDA_VISIBLE_DEVICES lists find no GPU."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = listed.split(",") if listed else [str(gpu) for gpu in range(count)]
    return (gpus + ["none"] * count)[:count]


def steps(stream: TextIO) -> Iterator[dict]:
    for line in stream:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a log between, or half a line of a run that was killed
            continue
        if isinstance(record, dict) and "step" in record and "tokens_per_s" in record:
            yield record


def start(command: Sequence[str], gpu: str) -> subprocess.Popen:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def end_together(processes: Sequence[subprocess.Popen], failures: list[int]) -> None:
    """Until all have ended. When one fails the others are told to end, too."""
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            failures.append(failed[0])
            for process in processes:
                process.terminate()
            return


def main(words: Sequence[str]) -> int:
    if len(words) < 3 or not words[0].isdigit() or int(words[0]) < 1 or words[1] != "--":
        print(__doc__, file=sys.stderr)
        return 2
    processes = [start(words[2:], gpu) for gpu in visible_gpus(int(words[0]))]
    failures: list[int] = []
    watch = threading.Thread(target=end_together, args=(processes, failures))
    watch.start()
    for records in zip(*(steps(process.stdout) for process in processes)):
        speeds = [record["tokens_per_s"] for record in records]
        peaks = [record["peak_bytes"] for record in records if record.get("peak_bytes")]
        merged = {"step": records[0]["step"], "tokens_per_s": sum(speeds) / len(speeds),
                  "by_replica": speeds} | ({"peak_bytes": max(peaks)} if peaks else {})
        print(json.dumps(merged), flush=True)
    for process in processes:
        process.communicate()
    watch.join()
    codes = failures + [process.returncode for process in processes]
    return next((abs(code) for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
