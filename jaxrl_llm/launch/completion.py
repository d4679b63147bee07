"""Scripts that complete the words of `jaxrl` in a shell.

They hold all words, so completing starts no Python.
"""

import re
from collections.abc import Mapping

from jaxrl_llm.config import packaged_configs
from jaxrl_llm.launch.config_keys import sections

SHELLS = ("bash", "zsh", "fish")

BASH = """\
_jaxrl() {{
    local word="${{COMP_WORDS[COMP_CWORD]}}" words
    if [[ $COMP_CWORD == 1 ]]; then
        words="{commands} --help --version"
    else
        # The shell splits --config=grpo into three words.
        local at=$COMP_CWORD
        [[ $word == "=" ]] && word="" && at=$((at + 1))
        if [[ ${{COMP_WORDS[at - 1]}} == "=" ]]; then
            [[ ${{COMP_WORDS[at - 2]}} == "--config" ]] && words="{configs}"
        else
            case "${{COMP_WORDS[1]}}" in
{cases}
            esac
        fi
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    [[ ${{#COMPREPLY[@]}} == 1 && ${{COMPREPLY[0]}} == *= ]] && compopt -o nospace
}}
complete -o default -F _jaxrl jaxrl
"""


def script(shell: str, docs: Mapping[str, str]) -> str:
    """The script for a shell; `docs` are the help texts of the commands, which list their flags."""
    flags = {name: _flags(text) for name, text in docs.items()}
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags)


def _flags(text: str) -> list[str]:
    """The flags that a help text lists, and the keys of a config where it takes one."""
    found = re.findall(r"(?<!\S)(--[a-z_]+)(?!\w|\.\w)(=?)", text)
    flags = list(dict.fromkeys(name + equals for name, equals in found))
    if any(flag.startswith("--config") for flag in flags):
        names = dict.fromkeys(key.name for _, _, keys in sections() for key in keys)
        flags += [f"--config.{name}=" for name in names]
    return [*flags, "--help"]


def _bash(flags: Mapping[str, list[str]]) -> str:
    cases = "\n".join(
        f'                {name}) words="{" ".join(of)}" ;;' for name, of in flags.items()
    )
    return BASH.format(commands=" ".join(flags), configs=" ".join(packaged_configs()), cases=cases)


def _zsh(flags: Mapping[str, list[str]]) -> str:
    # zsh runs completions of bash.
    return "#compdef jaxrl\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(flags)


def _fish(flags: Mapping[str, list[str]]) -> str:
    lines = [f'complete -c jaxrl -n __fish_use_subcommand -f -a "{" ".join(flags)}"']
    for name, of in flags.items():
        words = " ".join(of)
        lines.append(f'complete -c jaxrl -n "__fish_seen_subcommand_from {name}" -a "{words}"')
    return "\n".join(lines) + "\n"
