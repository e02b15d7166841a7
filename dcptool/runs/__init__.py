"""Run directories: folders of numbered steps.

directory  finds a run and its steps
order      which of them was saved last
pointers   files and links that name one of them
activity   whether somebody is writing in one
"""
