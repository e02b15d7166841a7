"""Folders of torch_checkpointing: a file for each item and rank, and `metadata.pkl`, which says how items are cut.

format     which files there are
reader     such a folder into a `Checkpoint`
"""
