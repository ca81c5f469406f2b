"""Reads what trireme has made of the models of make_hugging_face.py.

    python check_hugging_face.py OUT_DIR PACKAGES_DIR

transformers loads OUT_DIR/<name>/exported without a word of missing or unexpected weights and gives the logits
of the case, within 1e-5. PEFT loads OUT_DIR/adapters/<name>/exported, adapters that trireme has trained as PEFT did,
and gives the logits that PEFT's own gave. DCP's HuggingFaceStorageReader loads OUT_DIR/dcp_exported, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

import safetensors_io

TOLERANCE = 1e-5
ADAPTER_TOLERANCE = 1e-4  # 20 steps of AdamW lie between


def check_case(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, loaded = AutoModelForCausalLM.from_pretrained(
        folder / "exported", output_loading_info=True, dtype=torch.float32, attn_implementation="eager")
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if loaded[kind]:
            raise SystemExit(f"{folder.name}: {kind} {loaded[kind]}")
    case = safetensors_io.load(folder / "case.safetensors")
    with torch.no_grad():
        logits = model.eval()(case["tokens"]).logits
    error = ((logits - case["logits"]).norm() / case["logits"].norm()).item()
    if not error <= TOLERANCE:
        raise SystemExit(f"{folder.name}: logits differ by {error:.1e}")
    print(f"{folder.name}: logits within {error:.1e}")


def check_adapter(folder: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, attn_implementation="eager")
    model = PeftModel.from_pretrained(base, folder / "exported")
    reference = safetensors_io.load(folder / "trained.safetensors")
    with torch.no_grad():
        logits = model.eval()(reference["tokens"]).logits
    error = ((logits - reference["logits"]).norm() / reference["logits"].norm()).item()
    if not error <= ADAPTER_TOLERANCE:
        raise SystemExit(f"adapter of {folder.name}: logits differ by {error:.1e}")
    print(f"adapter of {folder.name}: logits within {error:.1e}")


def check_dcp(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    expected = safetensors_io.load(folder / "dcp.safetensors")
    state = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(folder / "dcp_exported")), no_dist=True)
    for name, tensor in expected.items():
        if not torch.equal(state[name], tensor):
            raise SystemExit(f"dcp: {name} differs")
    print(f"dcp: {len(expected)} tensors, bit for bit")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("packages_dir", type=Path)
    arguments = parser.parse_args()
    out = arguments.out_dir
    if (out / "skipped").exists():
        print("skipped:", (out / "skipped").read_text())
        return
    sys.path.append(str(arguments.packages_dir))
    torch.set_num_threads(1)
    folders = sorted(path.parent for path in out.glob("*/case.safetensors"))
    if not folders:
        raise SystemExit(f"{out} holds no cases")
    for folder in folders:
        check_case(folder)
    for folder in sorted((out / "adapters").iterdir()):
        check_adapter(folder)
    check_dcp(out)


if __name__ == "__main__":
    main()
