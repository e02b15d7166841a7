"""report: one self-contained page on a checkpoint.

report    looks, describes, publishes
document  everything the page shows, as plain data
columns   columns of integers as short rules
html      the document as a page
"""
