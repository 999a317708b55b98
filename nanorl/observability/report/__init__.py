"""Reports: a run as people see it, while it goes on and afterwards.

summary.py      summary.json: the whole run in one dict whose fields other tools rely on
metrics.py      metrics.jsonl: one line a step, and TensorBoard
live.py         bars and numbers on the terminal while the run goes on
chat_decode.py  tokens as a person reads them, without the template's marks
transcript.py   one rollout as a few lines of the log
notebook.py     runs, evaluations and rehearsals as a notebook shows them
html.py         report.html; style.css is its style sheet
charts.py       curves and bars of the page, and numbers as people read them
markup.py       the door through which text enters pages and pictures; elements
svg.py          what every picture is drawn of: scales, ticks, curves, boxes, keys
examples.py     chooses the rollouts that the page shows
trace.py        one rollout as segments and tokens to show
"""
