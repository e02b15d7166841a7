"""`copy`: a step, byte for byte, from any storage to any other, proven on the way.

copy        what is asked for, a step or a run; what came of it
step        one step: look at it, refuse it or not, move its files, publish
together    the same by the processes that torchrun started: each sends what it sees
crew        who copies: one process, or several
spread      files that several processes see, on disks of their own or on storage they share, as one
survey      the source: its files, what is wrong with it, what vouches for it
there       what is at the target already
moving      files in parts through memory, several at the same time
passing     what is found out about a file while its bytes pass
places      where output grows, and how it gets its name
journal     which files are there already, and can be proven
retrying    what may pass is tried again
"""
