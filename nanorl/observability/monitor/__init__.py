"""Watching a run from outside, and changing how many replicas it has while it goes on.

monitor_control.py      what a monitor needs from the processes of a run: states, and four verbs
readings.py             the roles with what their answers imply: tokens/s, memory, busy seconds
monitor_config.py       the options, `--monitor.*`
board.py                the latest numbers of the run itself, as its steps report them
exposition.py           board and roles as Prometheus' metrics
monitor_server.py       HTTP inside the run's event loop: /metrics, /status and the control verbs
monitor_access.py       monitor.json: where that server listens, and the token of the verbs
alerts.py               which events are worth a message, and when they are over
sender.py               messages to apprise addresses, from threads of their own
monitor.py              all of it around one run; with every option off it starts nothing

docs/scaling.md shows it in use. `nanorl status` and `nanorl scale` (cli.py) are its clients.
"""
