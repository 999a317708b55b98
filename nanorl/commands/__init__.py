"""The verbs of the console command `nanorl`, one file each: a function whose parameters are its
options. nanorl/cli.py registers them.

train.py         train an agent
algorithms.py    the published recipes by their names
new.py           write a first environment, and its test
evaluate.py      play held-out tasks: success, pass@k and how sure they are
compare.py       two evaluations, task by task
live.py          status and scale of a run that goes on
chat.py          talk to the agent of a run, or to a model
chat_session.py  what such a chat holds and shows
serve.py         serve a run's model over HTTP, with a page to chat on
view.py          read the stored rollouts of a run
export.py        write stored rollouts in formats that other tools read
terminal.py      what they share: text that a terminal may show
"""
