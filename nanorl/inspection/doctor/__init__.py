"""What will go wrong with a run, said before it does.

    finding.py        a finding: what was seen, why it matters, what mends it
    alarms.py         checks over a batch of rollouts, and the alarms that they are during training
    silence.py        rewards under which being cut off is worth more than playing
    preconditions.py  what can be seen before anything is played: template, tasks, memory, disk
    tool_tokens.py    how much of a prompt its tools are
    minutes.py        how long the run will take, from what the sample took
    borders.py        whether what a run's environment answers reaches the model
    checkup.py        plays a few rollouts with the untrained model and makes all checks

    template_proof.py     a model folder: rollout, training, server and transformers agree
    conversations.py      over which they must; template_trace.py names the template's line
    model_check.py        what `nanorl check --model FOLDER` shows of it

    examination.py    the machine instead of a run: this_machine.py, machine_limits.py, packages.py
                      here, engines.py and walls.py in processes of their own; section.py shows it

`nanorl doctor` examines the machine, `nanorl check` makes the other checks, and a run makes those
of alarms.py at every step. Left out: whether an algorithm's options are wise, which is not to be
seen in a few rollouts.
"""
