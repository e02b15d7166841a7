"""Several processes as one: a gloo process group whose members notice who is gone. Knows nothing of checkpoints.

together  a work done by a group: torchrun's where it started us, else forked here, watched, ended when one is lost
sharing   how members share a work and come to one end: `agree`, `contribute`, `values_of`, `blocks`
asking    rank 0 decides, and asks the others meanwhile for what only they have
group     membership: meeting, sharing and gathering values, and who is gone
audience  who is told what a member does, and the removal of what lost members leave
torchrun  whether torchrun started us, who then talks to the user, and joining its group
forked    what a forked member does around its work

A work is a callable that every member calls with (group, audience). All call the same of `sharing` in the same order,
and raise only there, so that all return the same, which can be pickled, or raise the same error, which is told once. In
between each does its part, and tells the audience its bytes and, if it writes, where and what it makes:

    def work(group: ProcessGroup, audience: Audience) -> int:
        names = agree(group, lambda: sorted(os.listdir(folder)))  # rank 0 decides
        mine = blocks(names, group.size)[group.rank]
        found = contribute(group, audience, lambda: sum(map(n_lines, mine)))  # each its part; an error is gathered, too
        return agree(group, lambda: sum(values_of(found)))  # rank 0 makes one of it, or raises what one met

    require_gloo("count")
    total = work_together(4, work, timeout=300.0, progress=progress)

A long part calls `require_going(group)` now and then. A work that publishes output tells `audience.writing` before it
writes there and `audience.published` after, and makes files in an object store through `NotedStorage`: so whoever is
left removes what is unfinished. Messages take for granted that the command has --workers and --timeout.
"""
