"""Folders of verl and SkyRL: for each rank a file with its parts of the model, one of the optimizer, one of the rest.

format     which files there are
optimizer  which parameter each number in an optimizer's state is
reader     such a folder into a `Checkpoint`
"""
