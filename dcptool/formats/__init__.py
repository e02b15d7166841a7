"""One reader and one writer per on-disk format; a reader turns bytes into a `Checkpoint` with a `Source` of payloads.

torch_zip            the zip that torch.save writes
torch_zip_scan       such zips that lie back to back, with nothing to tell where one ends
torch_items          tensors and objects inside such a zip
torch_graphs         tensors and objects as torch pickles them, to be written
dcp                  torch.distributed.checkpoint directories
torch_save           `.pt` files
safetensors_header   the header of a safetensors file or blob
safetensors          files, indexes, folders, and the shard sets DCP writes in that format
detect               which of them a path is
…_write              lay out what is to be written in a format
layouts              lay out the output of a conversion in the format that is asked for
"""
