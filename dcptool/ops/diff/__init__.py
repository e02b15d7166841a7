"""diff: two checkpoints of any formats and layouts, or a live state dict and one.

diff        the whole comparison
outline     what names and metadata alone tell
pairing     which entry of one side is which of the other
live        a state dict in memory, as torch would flatten it
values      tensors, band by band
bands       the common refinement of two layouts
arithmetic  how two arrays differ
objects     objects, without executing them
graphs      two unpickled graphs
results     options and frozen results
pool        threads a few jobs ahead
"""
