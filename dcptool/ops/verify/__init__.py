"""verify: is a checkpoint, or every step of a run, whole and undamaged?

verify        what a user names
verdict       which state one folder is in, and why: values
judge         one folder is judged
parts         the checkpoints in it
vouched       what markers and manifests say of its files
torch_load    everything loaded with the installed torch
file_load     the same of .pt files and safetensors
torch_reader  how torch is called for that
"""
