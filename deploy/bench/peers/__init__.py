"""Other engines' Pythons -> their tokens per second beside ours, in one run (`paceline bench --peer`).

environments.py finds and builds the Pythons, process.py talks to one of them, host.py runs there with a drive_*.py;
contest.py alternates blocks, compare.py the texts, suite.py is a whole run. here.py needs no other Python.
"""
