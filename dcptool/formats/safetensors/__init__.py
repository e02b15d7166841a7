"""safetensors files, indexes, folders, and the shard sets DCP writes in that format.

header  the header of a file, or of a blob in a DCP directory
reader  into a `Checkpoint`
write   files laid out
"""
