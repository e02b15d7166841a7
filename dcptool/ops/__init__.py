"""One module or folder per command, named as the command; each has one public function with a frozen result.

What several of them share is below; the rest each keeps to itself, or takes from the rooms before.

guards        what must hold of a source before it is read, and of output before it gets its name
following     which files beside a checkpoint go with it, and what is said of the others
carrying      these files copied
model_config  the dtype that a model's configuration names
tracking      the file by which a trainer finds its newest step
replacing     what --overwrite may replace
"""
