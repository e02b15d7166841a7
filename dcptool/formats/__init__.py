"""One package per on-disk format: bytes into a `Checkpoint`, a `Checkpoint` into files laid out.

dcp          torch.distributed.checkpoint directories
torch_save   `.pt` files
safetensors  files, indexes and folders
marker       the file that says a checkpoint is whole
manifests    files of other software with the digests of others
digests      how digests are computed
detect       which format a path is, and what is in a folder
output       the output of a conversion in the format that is asked for
"""
