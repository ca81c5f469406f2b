"""TFLOP/s of an N^3 matrix product in bf16 with random data: what a machine gives to a GEMM."""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

IN_A_ROW = 10  # a GPU under load runs at lower clocks than one that just woke up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    size, cuda = arguments.size, arguments.device == "cuda"
    # Zeros would draw less power and run at higher clocks than training does.
    a, b = (torch.randn(size, size, device=arguments.device).bfloat16() for _ in range(2))
    seconds = []
    for _ in range(arguments.repeats + 2):
        begin = time.perf_counter()
        for _ in range(IN_A_ROW):
            a @ b.T
        if cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() - begin) / IN_A_ROW)
    median = statistics.median(seconds[2:])
    print(json.dumps({"gemm_tflops": 2 * size**3 / median / 1e12, "size": size}))


if __name__ == "__main__":
    main()
