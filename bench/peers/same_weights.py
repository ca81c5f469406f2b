"""Our weights in the peer's model: a safetensors file with Hugging Face names, copied in place."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from torch import Tensor, nn

LLAMA = {  # of the peer's block: of ours, joined along the rows
    "n1.weight": ["input_layernorm.weight"],
    "qkv.weight": [f"self_attn.{name}_proj.weight" for name in "qkv"],
    "o.weight": ["self_attn.o_proj.weight"],
    "n2.weight": ["post_attention_layernorm.weight"],
    "gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down.weight": ["mlp.down_proj.weight"],
}
GPT2 = {
    f"{peer}.{kind}": [f"{ours}.{kind}"]
    for peer, ours in {"n1": "ln_1", "qkv": "attn.c_attn", "o": "attn.c_proj",
                       "n2": "ln_2", "up": "mlp.c_fc", "down": "mlp.c_proj"}.items()
    for kind in ("weight", "bias")
}
TOP = {
    "llama": {"emb.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
              "head.weight": "lm_head.weight"},
    "gpt2": {"emb.weight": "transformer.wte.weight", "pos.weight": "transformer.wpe.weight",
             "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias",
             "head.weight": "lm_head.weight"},
}


def source_names(name: str, family: str) -> list[str]:
    """Ours for one parameter of the peer."""
    if not name.startswith("blocks."):
        return [TOP[family][name]]
    _, layer, rest = name.split(".", 2)
    if family == "gpt2":
        return [f"transformer.h.{layer}.{ours}" for ours in GPT2[rest]]
    return [f"model.layers.{layer}.{ours}" for ours in LLAMA[rest]]


class Weights:
    """The fp32 tensors of a safetensors file, mapped."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            self.header = json.loads(file.read(length))
        whole = torch.from_file(str(path), size=os.path.getsize(path), dtype=torch.uint8)
        self.bytes = whole[8 + length :]

    def __getitem__(self, name: str) -> Tensor:
        entry = self.header[name]
        if entry["dtype"] != "F32":
            raise ValueError(f"{name} is {entry['dtype']}, not F32")
        begin, end = entry["data_offsets"]
        return self.bytes[begin:end].view(torch.float32).view(entry["shape"])


@torch.no_grad()
def load_weights(model: nn.Module, path: str | Path, family: str) -> None:
    """Before the model is wrapped or compiled, which would change its names."""
    weights = Weights(path)
    for name, parameter in model.named_parameters():
        value = torch.cat([weights[ours] for ours in source_names(name, family)])
        if family == "gpt2" and name.startswith("blocks.") and value.dim() == 2:
            value = value.T  # GPT-2's checkpoints store (in, out)
        if name == "pos.weight":
            value = value[: len(parameter)]  # no window reaches the positions after them
        if value.shape != parameter.shape:
            raise ValueError(f"{name} is {tuple(parameter.shape)}, but ours is {tuple(value.shape)}")
        parameter.copy_(value)
