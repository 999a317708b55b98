"""`nanorl completion`: the lines that make a shell complete verbs, flags and files.

source <(nanorl completion)          # bash, now; append the line to ~/.bashrc for always
source <(nanorl completion --shell zsh)
"""

from __future__ import annotations

from typing import Literal

from nanorl.cli import VERBS

# The flags of a verb are read from its help, once for each verb and shell.
_BASH = """\
declare -A _nanorl_flags
_nanorl() {
    local word="${COMP_WORDS[COMP_CWORD]}" verb="${COMP_WORDS[1]}"
    if [ "$COMP_CWORD" = 1 ]; then
        COMPREPLY=($(compgen -W "VERBS --help --version" -- "$word"))
    elif [[ "$word" == -* ]]; then
        [ -n "${_nanorl_flags[$verb]:-}" ] || _nanorl_flags[$verb]="$("${COMP_WORDS[0]}" "$verb" \\
            --help all 2>/dev/null | grep -oE -- '--[a-z][a-z0-9.-]*' | sort -u | tr '\\n' ' ')"
        COMPREPLY=($(compgen -W "${_nanorl_flags[$verb]}" -- "$word"))
    fi
}
complete -o default -F _nanorl nanorl
"""
_ZSH = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n"


def completion(shell: Literal["bash", "zsh"] = "bash") -> None:
    """Print what makes a shell complete nanorl's verbs, their flags and files.

    Args:
        shell: whose language is printed.
    """
    print((_ZSH if shell == "zsh" else "") + _BASH.replace("VERBS", " ".join(VERBS)), end="")
