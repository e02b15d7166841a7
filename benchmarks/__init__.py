"""Speed and memory of dcptool beside the tool people use today, as ratios of whole processes.

    python -m benchmarks                     all rows
    python -m benchmarks inspect-small       some rows
    python -m benchmarks --list              what there is

Both sides of a row run in turn (A B A B …) on the same checkpoint with a warm page cache, so that a machine that slows
down slows both. Printed are medians, the ratio of the medians with the range of the ratios pair by pair, and peak
memory with all children. Checkpoints are made once and kept in --cache.
"""
