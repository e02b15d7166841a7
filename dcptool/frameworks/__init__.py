"""What one training step is on disk, for each trainer, as values: parts, files beside them, what a resume needs.

A new framework is a module here with a `Profile`, and its name in `table.py`.

profile  what a profile may say, and what it makes of a step
values   single values out of a step's files, such as the number of ranks
table    all of them, and which one a step is of
"""
