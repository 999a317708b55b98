"""From tasks to batches: which group may start, where it waits, and which batch it belongs to.

    curriculum.py       which task is played next
    staleness.py        when a group may start
    transfer_queue.py   where finished groups wait, for the trainer and for others that read them
    journal.py          the same on the disk, so that a killed process loses none
    batch_policy.py     which groups make a batch, and what becomes of those that do not fit
    assembly.py         takes groups from the queue until a batch is complete
    group.py            a finished group
    replay_policy.py    how many groups that had a signal are trained on again
    replay_groups.py    which those are

trainer.py drives them all. Left out: how a group is played (collector.py) and what is learnt from
it (learner.py, batching.py).
"""
