"""Pickles as data: screened, loaded into stand-ins, decoded for display. Nothing is imported, nothing is called.

screen    is it safe to hand these bytes to the C unpickler at all?
inert     load them into a graph of stand-ins
tensors   what a graph says about tensors: storage, dtype, shape, strides
plain     a graph as Python values a person can read
"""
