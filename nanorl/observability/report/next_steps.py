"""What to do next: the last lines of a run that ended, and of one that was stopped.

The commands are whole, with the run's own paths and with the program as it is called here, so that
they can be pasted.
"""

from __future__ import annotations

import shlex

from nanoengine.command_line import program
from nanorl.options.run_config import RunConfig


def next_steps(config: RunConfig) -> str:
    """After a finished run: look, talk to the model, measure it, train on or try another way."""
    run, nanorl = shlex.quote(str(config.run_dir)), program()
    more = max(2 * config.rl.steps, 1)
    one = f" --env {_first_of(config)}" if isinstance(config.env, tuple) else ""
    lines = (
        ("talk to it", f"{nanorl} chat {run}{one}"),
        ("its rollouts", f"{nanorl} view {run}"),
        ("evaluate", f"{nanorl} eval {run} --k 8"),
        ("against before", f"{nanorl} compare {run}:before {run}"),
        ("train on", f"{nanorl} train --resume --out {run} --rl.steps {more}"),
        (
            "or otherwise",
            f"{nanorl} train --fork {run} --out {run}-b --rl.steps {more} --rl.lr 1e-5",
        ),
    )
    return "\n".join(["next:", *(f"  {title:<15} {command}" for title, command in lines)])


def _first_of(config: RunConfig) -> str:
    """The name of a run's first environment of several: a chat is with one."""
    from nanorl.options.env_mix import members_of  # few runs have several

    return shlex.quote(next(iter(members_of(config))))


def how_to_go_on(config: RunConfig, *, has_saved: bool) -> str:
    """After Ctrl-C. Outside of the phases, while the parts are made or the report, there is nothing
    to save."""
    if not (config.run_dir / "config.json").exists():
        return "\nstopped before the run began; nothing was written"
    command = f"{program()} train --resume --out {shlex.quote(str(config.run_dir))}"
    saved = " and saved" if has_saved else ""
    return (
        f"\nstopped{saved}; go on with: {command}\n"
        "(options added to it hold from there on: --rl.lr 1e-5)"
    )
