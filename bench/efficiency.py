"""TFLOP/s of both sides of a case, and their share of what the machine could do."""

from __future__ import annotations

from programs import (EXIT_FAILED, PEERS, BenchError, Side, json_objects, last_with,
                      resolved_config, run_program, say)

PEAK_FLOPS = 989.4e12  # dense bf16 of an H100 SXM and of an H200


def flops_per_token(config: dict) -> float:
    """Forward and backward of our model; causal attention counts half of the square."""
    model, length = config["model"], config["data"]["seq_len"]
    width, heads = model["d_model"], model["n_heads"]
    head_dim = width // heads
    feed_forward = 2 if model["family"] == "gpt2" else 3
    block = (width * (heads + 2 * model["n_kv_heads"]) * head_dim + heads * head_dim * width
             + feed_forward * width * model["d_ff"])
    weights = model["n_layers"] * block + width * model["vocab_size"]
    return 6.0 * weights + 6.0 * length * heads * head_dim * model["n_layers"]


def gemm_tflops(python: str, device: str, timeout: float) -> float:
    size = 8192 if device == "cuda" else 1024
    command = [python, f"{PEERS}/gemm.py", f"--device={device}", f"--size={size}"]
    output = run_program(Side(command, "gemm_tflops"), timeout)
    value = last_with(json_objects(output.text), "gemm_tflops")
    if value is None:
        raise BenchError(EXIT_FAILED, f"{command[1]} printed no gemm_tflops")
    return value


def add_efficiency(result: dict, ours: Side, gemm_python: str | None, timeout: float) -> None:
    """To the result of a case that is measured in tokens/s of one rank."""
    flops = flops_per_token(resolved_config(ours.command)["config"])
    result["flops_per_token"] = flops
    if gemm_python:
        result["gemm_tflops"] = gemm_tflops(gemm_python, result["device"], timeout)
    for name in ("ours", "peer"):
        side = result[name]
        side["tflops"] = side["median"] * flops / 1e12
        line = f"  {name}: {side['tflops']:,.4g} TFLOP/s"
        if result["device"] == "cuda" and "fp8" not in result:  # the peak of bf16 says nothing about FP8
            side["mfu"] = side["median"] * flops / PEAK_FLOPS
            line += f", MFU {side['mfu']:.3f}"
        if gemm_python:
            side["of_gemm"] = side["tflops"] / result["gemm_tflops"]
            line += f", {side['of_gemm']:.3f} of a GEMM's {result['gemm_tflops']:,.4g}"
        say(line)
