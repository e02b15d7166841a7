"""Load what dcptool wrote with stock torch and torchao, and print what is in it: fqn → inner tensor → sha256.

Arguments: a `.pt` file or DCP directory; for a directory the `.pt` or DCP it was made of, of whose tensors' classes the
state is that it is loaded into, emptied first.
"""

import hashlib
import io
import json
import sys

import torch
import torch.distributed.checkpoint as dcp
import torchao.optim  # noqa: F401  its classes must be there

TABLES = ("qmap", "nf4")  # torchao's copy_ leaves these as they are


def flat(value, path=""):
    found = {}
    for key, part in value.items():
        name = f"{path}.{key}" if path else str(key)
        found |= flat(part, name) if isinstance(part, dict) else {name: part}
    return found


def stored(path):
    if path.endswith(".pt"):
        return flat(torch.load(path, weights_only=False))
    state = {}
    for index, place in dcp.FileSystemReader(path).read_metadata().storage_data.items():
        with open(f"{path}/{place.relative_path}", "rb") as file:
            file.seek(place.offset)
            state[index.fqn] = torch.load(io.BytesIO(file.read(place.length)), weights_only=False)
    return state


def inner(tensor):
    if type(tensor) is torch.Tensor or not hasattr(tensor, "__tensor_flatten__"):
        return {}
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


def sha256(tensor):
    return hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def values(tensor):
    parts = inner(tensor)
    if not parts:
        return {"": sha256(tensor)}
    whole = tensor.get_original_weight() if "nf4" in parts else tensor.dequantize()
    return {"dequantized": sha256(whole), **{name: sha256(part) for name, part in parts.items()}}


path, *source = sys.argv[1:]
state = stored(source[0] if source else path)
if source:
    for tensor in state.values():
        for name, part in inner(tensor).items() if isinstance(tensor, torch.Tensor) else ():
            name in TABLES or part.zero_()
        if isinstance(tensor, torch.Tensor) and not inner(tensor):
            tensor.zero_()
    dcp.load(state, checkpoint_id=path, no_dist=True)
tensors = {fqn: values(tensor) for fqn, tensor in state.items() if isinstance(tensor, torch.Tensor)}
print("loaded", json.dumps(tensors))
