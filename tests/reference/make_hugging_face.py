"""Writes models of Hugging Face's transformers and checkpoints of PyTorch's DCP, to be read by trireme.

    python make_hugging_face.py OUT_DIR PACKAGES_DIR

Every case becomes OUT_DIR/<name>/model, as save_pretrained() writes it, and OUT_DIR/<name>/case.safetensors
with `tokens` (B, T) and `logits` (B, T, V) of that model in fp32. OUT_DIR/dcp is what two ranks of DCP have
written with HuggingFaceStorageWriter, and OUT_DIR/dcp.safetensors the same tensors whole.

OUT_DIR/adapters/<name> is a model that PEFT gives LoRA adapters and trains: base/model, adapter.safetensors with
the adapters at the start, and trained.safetensors with the adapters, losses and logits after STEPS steps on tokens.

transformers and peft are installed into PACKAGES_DIR unless they are there. Where that cannot be done, OUT_DIR/skipped
says why, and nothing else is written.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import safetensors_io

PACKAGES = ["transformers>=4.44,<6", "safetensors"]
WITHOUT_TORCH = ["peft>=0.15,<1", "accelerate", "psutil"]  # whose dependencies would bring another torch
INSTALL_SECONDS = 200
BATCH, LENGTH, VOCAB = 2, 40, 256  # no fewer tokens than bytes


def reason_without_transformers(packages: Path) -> str:
    """Empty once transformers can be imported."""
    sys.path.append(str(packages))
    try:
        importlib.import_module("peft")
        return ""
    except ImportError:
        pass
    command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(packages)]
    try:
        for wanted in (PACKAGES, ["--no-deps", *WITHOUT_TORCH]):
            done = subprocess.run(command + wanted, capture_output=True, text=True, timeout=INSTALL_SECONDS,
                                  check=False)
            if done.returncode != 0:
                return "transformers and peft cannot be installed: " + done.stderr.strip()[-400:]
        importlib.invalidate_caches()
        importlib.import_module("peft")
        return ""
    except (subprocess.TimeoutExpired, ImportError) as error:
        return f"transformers and peft cannot be installed: {error}"


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Nothing is zero or one: a term left out or misplaced shows in the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + noise if is_norm_weight else noise)


def llama(**changed):
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = changed.pop("rope", {"rope_type": "default"})
    settings = dict(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=112, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1000.0, **rope})
    return LlamaForCausalLM(LlamaConfig(**(settings | changed)))


def gpt2(**changed):
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = dict(vocab_size=VOCAB, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0,
                    attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**(settings | changed)))


# Of 64 tokens only: with the published 8192 a sequence this short would not tell the frequencies apart. The
# wavelengths of 8 dimensions and base 1000 lie on all three sides of the two factors.
LONG_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64}


def cases():
    """name, model, the part that is saved, arguments of save_pretrained()"""
    for name, model in (
        ("llama_gqa_tied", llama()),
        ("llama_untied", llama(tie_word_embeddings=False, num_key_value_heads=6, intermediate_size=96)),
        ("llama_long_rope", llama(rope=LONG_ROPE, tie_word_embeddings=False,
                                  max_position_embeddings=128)),
        ("llama_wide_heads", llama(head_dim=16)),
        ("gpt2", gpt2()),
        ("gpt2_wide", gpt2(n_inner=80, tie_word_embeddings=False)),
    ):
        yield name, model, model, {}
    sharded = llama(tie_word_embeddings=False)
    yield "llama_sharded", sharded, sharded, {"max_shard_size": "20KB"}
    headless = gpt2()
    yield "gpt2_headless", headless, headless.transformer, {}
    yield "llama_bf16", llama(), None, {}


def write_case(folder: Path, model, saved, arguments, seed: int) -> None:
    randomise(model, seed)
    rounded = None
    if saved is None:  # rounded weights; the logits are those of fp32 all the same
        saved = rounded = model.to(torch.bfloat16)
    saved.save_pretrained(folder / "model", **arguments)
    # to() has rounded the rotary frequencies, too, which are in no file.
    reference = model if saved is not rounded else type(model).from_pretrained(folder / "model", dtype=torch.float32)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed + 1))
    with torch.no_grad():
        logits = reference.eval()(tokens).logits
    safetensors_io.save(folder / "case.safetensors", {"tokens": tokens, "logits": logits})


RANK, ALPHA, STEPS, LEARNING_RATE = 4, 8.0, 20, 5e-3
ADAPTERS = {"llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            "llama_two": ["q_proj", "v_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}
ADAPTERS |= {f"{name}_dora": ADAPTERS[name] for name in ("llama", "gpt2")}


def adapter_tensors(model) -> dict[str, torch.Tensor]:
    """By their names in a file of PEFT."""
    from peft import get_peft_model_state_dict

    return {name: tensor.detach().clone() for name, tensor in get_peft_model_state_dict(model).items()}


def write_adapter(folder: Path, name: str, seed: int) -> None:
    from peft import LoraConfig, get_peft_model

    dora = name.endswith("_dora")
    base = gpt2() if name.startswith("gpt2") else llama(tie_word_embeddings=False)
    randomise(base, seed)
    base.save_pretrained(folder / "base")
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(
        r=RANK, lora_alpha=ALPHA, target_modules=ADAPTERS[name], task_type="CAUSAL_LM", init_lora_weights=False,
        use_dora=dora))
    safetensors_io.save(folder / "adapter.safetensors", adapter_tensors(model))
    tokens = torch.randint(VOCAB, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed + 1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [parameter for parameter in trained if parameter.dim() == 2], "weight_decay": 0.1},
              {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=LEARNING_RATE,
                                  betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for _ in range(STEPS):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        logits = model.eval()(tokens).logits
    safetensors_io.save(folder / "trained.safetensors", adapter_tensors(model) | {
        "tokens": tokens, "losses": torch.tensor(losses, dtype=torch.float64), "logits": logits})


def dcp_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        "rows": torch.randn(10, 6, generator=generator),
        "columns": torch.randn(5, 8, generator=generator).to(torch.bfloat16),
        "whole": torch.arange(6, dtype=torch.int64).reshape(2, 3),
        "one": torch.tensor(3.5),
    }


def write_dcp(rank: int, folder: str, store: str, packages: str) -> None:
    """One of two ranks."""
    sys.path.append(packages)
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    os.environ.update(GLOO_SOCKET_IFNAME="lo", USE_LIBUV="0")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    placements = {"rows": Shard(0), "columns": Shard(1)}
    state = {name: distribute_tensor(tensor, mesh, [placements.get(name, Replicate())])
             for name, tensor in dcp_tensors().items()}
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=True))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path)
    parser.add_argument("packages_dir", type=Path)
    arguments = parser.parse_args()
    out = arguments.out_dir
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if reason := reason_without_transformers(arguments.packages_dir):
        (out / "skipped").write_text(reason + "\n")
        print(reason)
        return
    torch.set_num_threads(1)
    for seed, (name, model, saved, options) in enumerate(cases()):
        write_case(out / name, model, saved, options, seed)
        print(name)
    for seed, name in enumerate(ADAPTERS):
        write_adapter(out / "adapters" / name, name, seed)
        print("adapter of", name)
    safetensors_io.save(out / "dcp.safetensors", dcp_tensors())
    with tempfile.TemporaryDirectory() as scratch:
        torch.multiprocessing.spawn(
            write_dcp, (str(out / "dcp"), f"{scratch}/store", str(arguments.packages_dir)), nprocs=2)
    print("dcp")


if __name__ == "__main__":
    main()
