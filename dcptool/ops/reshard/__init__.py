"""reshard: the layout of one number of ranks, or mesh, to that of another.

reshard  the call: paths looked at, then a group put to work
source   a step with its parts, or one checkpoint; where the output goes
plan     what would be done
rules    which rank would hold which box
mesh     meshes and placements as users write them
assign   which of several ranks stores it, as torch's planner decides
member   what each process of the group does
result   what was written, or would be
"""
