"""The options of a run: what there is, how it is given, what a preset stands for.

run_config.py       `RunConfig`, all of them in sections; the sections are in
                    phase_config.py (warm start, RL, evaluation), agent_config.py (agent, sandbox),
                    engine_config.py (engines, adapter), vision_config.py (tower) and
                    cluster_config.py (processes)
presets.py          sets of them that work
names.py            which there are, by their dotted names
values.py           one option's value, as its field's type has it
help_text.py        the text of `nanorl train --help`
run_kind.py         the environment of a run; hosted_kind.py: the same, played in other processes
run_judges.py       the LLM judges of its reward, and where each has its engine
parts.py            what a run is made of, checked before it begins; agent_kit.py: of its rollouts
trust.py            what somebody else's run may make this machine do
store_address.py    where rollouts are kept; reference_names.py: how `--rl.reference` names models

No option imports torch, so that `--help` and a misspelt flag are answered at once.
"""
