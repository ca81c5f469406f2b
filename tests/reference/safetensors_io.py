"""Reader and writer of the safetensors format, so that the reference needs nothing beyond torch.

A file is: u64 little-endian length of the header, the header as JSON, then the tensors' bytes in
the order of their offsets. Header: {name: {"dtype", "shape", "data_offsets": [begin, end]}} with
offsets relative to the end of the header, and an optional "__metadata__" of strings.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 8


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def save(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes `tensors` to `path`, widest element types first so that each one is aligned."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in names:
            file.write(_bytes_of(tensors[name]))


def load(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of the file. Raises ValueError when its length does not fit its header."""
    data = bytearray(Path(path).read_bytes())
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    if len(body) != max((entry["data_offsets"][1] for entry in header.values()), default=0):
        raise ValueError(f"{path}: {len(body)} bytes of tensors do not match the header")
    result = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = torch.empty(end - begin, dtype=torch.uint8)
        if end > begin:  # frombuffer refuses empty buffers
            raw = torch.frombuffer(bytearray(body[begin:end]), dtype=torch.uint8)
        result[name] = raw.view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return result
