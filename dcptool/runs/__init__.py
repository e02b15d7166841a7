"""Run directories: folders of numbered steps.

directory  finds a run and its steps
pointers   files and links that name one of them
activity   whether somebody is writing in one
"""
