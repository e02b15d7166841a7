"""One reader per on-disk format; each turns bytes into a `Checkpoint` and gives it a `Source` for its payloads.

torch_zip            the zip that torch.save writes
torch_items          tensors and objects inside such a zip
dcp                  torch.distributed.checkpoint directories
torch_save           `.pt` files
safetensors_header   the header of a safetensors file or blob
safetensors          files, indexes, folders, and the shard sets DCP writes in that format
detect               which of them a path is
"""
