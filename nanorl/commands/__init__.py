"""The verbs of the console command `nanorl` (cli.py), one file each.

evaluate.py   `nanorl eval`: how good a model is on held-out tasks
compare.py    `nanorl compare`: which of two is better, task by task
"""
