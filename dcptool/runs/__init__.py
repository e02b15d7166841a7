"""Run directories: folders of numbered steps.

directory  finds a run and its steps
pointers   files and links that name one of them
best       which of them its trainer recorded as the best
order      in which order they were saved, where their numbers do not tell
activity   whether somebody is writing in one
"""
