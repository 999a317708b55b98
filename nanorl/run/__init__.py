"""A whole run, from its options to what it leaves in its folder. Start at run.py.

run.py, restarts.py      the loop over the phases; a run that failed begins again
phases.py                evaluation_phase.py, warm_start_phase.py, rl_phase.py, one class each
trainer.py               the RL loop: which rollouts may start, which groups make a batch
heldout_success.py       success on held-out tasks
observers.py             who is told of what happens, in which order; kept_records.py: the store
run_checkpoints.py       saves and goes on; cursor.py: where a run stands
parse.py                 from flags, a file or Python to the options of a run
continuation.py          what `--resume` and `--fork` may change; history.py: how a run came to be
replay_state.py          the groups that are trained on again, of a checkpoint and of the store
manifest.py              what a process consisted of; missing_records.py: what a folder has lost
run_outcome.py           summary, card and report; saved_models.py: the models of a run's folder
failed_start.py          the folder of a run that failed before it had anything to lose
"""
