"""Pickles as data: loaded into stand-ins, decoded for display. Nothing is imported, nothing is called.

* standins: what takes the place of names, calls and instances
* opcodes: the arguments of opcodes that carry a value
* machine: runs the opcodes on stand-ins
* inert: load a pickle into a graph of them
* tensors: what a graph says about tensors: storage, dtype, shape, strides
* plain: a graph as Python values a person can read
"""
