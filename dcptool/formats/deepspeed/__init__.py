"""Checkpoints of DeepSpeed: ZeRO 1 to 3, without ZeRO, and universal ones.

format      which folders and files there are
files       what a model's and an optimizer's file say, as values
partitions  where the parts of each parameter lie in flat partitions
zero        the parameters of ZeRO, and the optimizer's state of each
universal   the same of folders of one file each
reader      a folder into a `Checkpoint`
"""
