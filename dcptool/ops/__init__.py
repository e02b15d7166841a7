"""One module or folder per command, named as the command; each has one public function with a frozen result.

What several of them share is `guards`; the rest each keeps to itself, or takes from the rooms before.
"""
