"""prune: delete old steps of a run.

plan     which steps to keep, and why
prune    what there is to decide on
archive  milestones are copied elsewhere, and proven to be there
delete   the deletion, with another look at each step
"""
