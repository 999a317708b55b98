"""The options of a run: what there is, how it is given, what a preset stands for.

run_config.py       `RunConfig`, all of them in sections; the sections are in
                    phase_config.py (warm start, RL, evaluation), agent_config.py (agent, sandbox),
                    engine_config.py (engines, adapter) and cluster_config.py (processes)
presets.py          two sets of them that work
parse.py            from flags, a file or Python to a `RunConfig`
names.py            which there are, by their dotted names
values.py           one option's value, as its field's type has it
help_text.py        the text of `nanorl train --help`
bounds.py           what a number may be

Nothing here imports torch, so that `--help` and a misspelt flag are answered at once.
"""
