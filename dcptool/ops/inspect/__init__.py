"""inspect: what is at a path.

inspect    a checkpoint, several, or a run directory
summary    one checkpoint
notes      what is worth knowing before a resume or a conversion
names      what the names of entries tell
stats      statistics of tensors, and what they point out
measuring  tensors read and measured band by band
moments    of arrays
"""
