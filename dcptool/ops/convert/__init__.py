"""convert: any format to any other, everything checked on the way.

convert       the call: one process, forked ones, or torchrun's
plan          what would be done: which checkpoints, what of them, into which files
corrupt       what of a checkpoint is damaged and may be left out
beside        the files beside it
lightning     a step of Lightning in one file
member        what each process does
result        what was written, or would be
torch_engine  torch's own code instead
"""
