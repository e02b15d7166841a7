"""Several processes as one: a gloo process group whose members notice who is gone, and what supervises it.

group       membership, sharing, gathering; under torchrun too
supervisor  forks the members on one machine, watches them, ends all when one is lost
"""
