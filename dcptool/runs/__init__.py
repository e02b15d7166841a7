"""Run directories: folders of numbered steps.

directory  finds a run and its steps
order      which of them was saved last
pointers   files and links that name one of them
best       which of them its trainer recorded as the best
counters   in which order they were saved, where their numbers count saves and begin anew
activity   whether somebody is writing in one
lease      which job saves to a run now
"""
