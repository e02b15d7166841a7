"""rescue: lost metadata rebuilt from a sibling step.

rescue    the whole of it
matching  data files walked beside the sibling's, item by item
"""
