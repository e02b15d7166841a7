"""What is wrong with one checkpoint: each module looks for one kind of thing, `check` asks them all; and with a step.

check     all of them, by level
files     missing, short and left-over files
extents   items over one another, or beyond the end
items     the headers and bytes of every item
copies    what is stored twice
paths     nested paths against names
families  entries of which one is missing

steps       what a resume needs of a step that is not there
side_files  files beside its checkpoints, by kind
zips        those that are zips
"""
