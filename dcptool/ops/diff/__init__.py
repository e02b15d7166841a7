"""diff: two checkpoints of any formats and layouts, or a live state dict and one.

diff        the whole comparison
outline     what names and metadata alone tell
pairing     which entry of one side is which of the other
live        a state dict in memory, as torch would flatten it
values      tensors, box by box
refinement  boxes that lie inside one chunk of each side
sides       what is read of each side, and what cannot be
arithmetic  how two arrays differ
objects     objects, without executing them
graphs      two unpickled graphs
results     options and frozen results
"""
