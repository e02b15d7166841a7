"""What is wrong with one checkpoint: each module looks for one kind of thing, `check` asks them all.

check     all of them, by level
files     missing, short and left-over files
extents   items over one another, or beyond the end
items     the headers and bytes of every item
copies    what is stored twice
paths     nested paths against names
families  entries of which one is missing
"""
