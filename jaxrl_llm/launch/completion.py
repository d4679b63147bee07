"""Scripts that complete the words of `jaxrl` in a shell.

They hold all words, so completing starts no Python.
"""

from collections.abc import Mapping

from jaxrl_llm.config import packaged_configs
from jaxrl_llm.launch.command_line import Parser
from jaxrl_llm.launch.config_keys import sections

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


def script(shell: str, parsers: Mapping[str, Parser]) -> str:
    """The script for a shell. The parser "prepare data" adds its flags to `prepare`."""
    flags: dict[str, str] = {}
    for name, parser in parsers.items():
        command = name.split()[0]
        words = [*flags.get(command, "").split(), *_words(parser)]
        flags[command] = " ".join(dict.fromkeys(words))
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](flags)


def _words(parser: Parser) -> list[str]:
    """The flags of a command, and the keys of a config where it takes one."""
    options = parser._option_string_actions.items()
    words = [f"{name}=" if action.nargs != 0 else name for name, action in options]
    if parser.takes_config:
        names = dict.fromkeys(key.name for _, _, keys in sections() for key in keys)
        words += [f"--config.{name}=" for name in names]
    return [word for word in words if word.startswith("--")]


def _bash(flags: Mapping[str, str]) -> str:
    cases = "\n".join(
        f'                {name}) words="{words}" ;;' for name, words in flags.items()
    )
    return BASH.format(commands=" ".join(flags), configs=" ".join(packaged_configs()), cases=cases)


def _zsh(flags: Mapping[str, str]) -> str:
    # zsh runs completions of bash.
    return "#compdef jaxrl\nautoload -U +X bashcompinit && bashcompinit\n" + _bash(flags)


def _fish(flags: Mapping[str, str]) -> str:
    lines = [f'complete -c jaxrl -n __fish_use_subcommand -f -a "{" ".join(flags)}"']
    for name, words in flags.items():
        lines.append(f'complete -c jaxrl -n "__fish_seen_subcommand_from {name}" -a "{words}"')
    return "\n".join(lines) + "\n"
