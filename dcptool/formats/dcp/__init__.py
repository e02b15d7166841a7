"""torch.distributed.checkpoint directories.

tokens        how a `.metadata` pickle writes numbers, texts and sizes
tensor_runs   many records of tensors of such a pickle, read at once
bulk          many places of items of such a pickle, read at once
metadata      the records of one `.metadata` pickle
build         records of one `.metadata`, or of all `__R.metadata`, into one view of tensors and objects
items         the items in the data files
reader        a folder into a `Checkpoint`
printing      the other half of tensor_runs and bulk: such records written at once
relocate      a `.metadata` written anew for the same entries at other places
write         a directory laid out
"""
