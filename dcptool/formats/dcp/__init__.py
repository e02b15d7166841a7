"""torch.distributed.checkpoint directories.

bulk        long runs of equal records of such a pickle, read at once
metadata    the records of one `.metadata` pickle
build       records of one `.metadata`, or of all `__R.metadata`, into one view of tensors and objects
items       the items in the data files
reader      a folder into a `Checkpoint`
"""
