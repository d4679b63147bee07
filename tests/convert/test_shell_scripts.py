"""Words of a command in a shell script, against what a shell gives for the same lines."""

import shutil
import subprocess

import pytest

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.shell import read_command, unknown_in, without_unknown
from jaxrl_llm.convert.values import value_of

# Each line is run by bash too, where `run` prints its words.
SCRIPTS = {
    "quotes": 'a=\'x y\'\nrun a=$a "$a" \'$a\' \\$a "it\'s" k="[\'$a\', \'b\']" "" e=""',
    "continued": "run one \\\n  two three  # a comment\n",
    "defaults": 'run ${A:-8} ${B:-"x $HOME"} ${HOME:-no} ${C:+set} ${HOME:+set} ${D:=d}',
    "chained": "A=${A:-1}\nB=${B:-$A}\nrun $B${A}c ${A}/$B",
    "sums": "n=4\nm=$((n * 2 + 1))\nrun $((1024 * 8)) $m $(((n + m) * 2)) $((m / 2)) $((-n % 3))",
    "arrays": 'x=(a "b c")\nx+=(d=$((2*3)) "e")\ny=()\nrun "${x[@]}" "${y[@]}" last',
    "branches": 'd=gpu\nif [ "$d" = cpu ]; then n=1\nelif [ "$d" = gpu ]; then n=2\nelse n=3; fi\n'
    "case $d in cpu|tpu) m=1 ;; g*) m=2 ;; *) m=3 ;; esac\nrun $n $m",
    "nested": 'a=1\nif [[ $a == 1 && -n "$HOME" ]]; then\n'
    'if [ -z "$a" ]; then b=1; else b=2; fi; fi\n[[ $a = 2 || $b = 2 ]] && c=3\nrun $b $c',
    "joined": "p=2\n[ $p -gt 1 ] && v=4 || v=null\n[ $p -gt 9 ] && w=4 || w=null\nrun $v $w",
    "groups": "p=1; a=0; b=0\n[ $p = 2 ] && { a=1; b=1; }\n[ $p = 1 ] && { c=1; }\nrun a$a b$b c$c",
    "trimmed": "f=a/b/c.tar.gz\nrun ${f##*/} ${f#*/} ${f%.*} ${f%%.*} ${f/a/z} ${f//a/z}",
    "redirected": "run a 2>&1 | cat > /dev/stdout",
    "several": "x=1; y=2; run $x $y; z=3",
    "arguments": 'shift 1\nrun $1 "$#" "$@"',
}


def ours(words: list[str]) -> bool:
    return words[:1] == ["run"]


def words_of(script: str, environment: dict[str, str] | None = None) -> list[str]:
    return read_command(script, ours, environment or {"HOME": "/home/me"}, ["one", "two", "3 4"])


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize("name", SCRIPTS)
def test_words_are_those_of_bash(name):
    script = "run() { printf '%s\\0' run \"$@\"; }\n" + SCRIPTS[name]
    done = subprocess.run(
        ["bash", "-c", script, "bash", "one", "two", "3 4"],
        env={"HOME": "/home/me", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stderr == ""
    assert words_of(SCRIPTS[name]) == done.stdout.split("\0")[:-1]


def test_nothing_is_run(tmp_path):
    mark = tmp_path / "mark"
    (_, word) = words_of(f"x=$(touch {mark})`touch {mark}`\ntouch {mark}\nrun a-$x")
    assert not mark.exists()
    assert unknown_in(word) == [f"$(touch {mark})"]
    assert without_unknown(word) == "a"


def test_a_default_that_is_not_known_is_asked_for_by_its_name():
    script = "D=${D:-$(detect)}\ncase $D in gpu) n=8 ;; *) n=1 ;; esac\nrun $n"
    with pytest.raises(ConfigError, match="D=VALUE jaxrl convert-config") as error:
        words_of("D=${D:-$(detect)}\nif [ $D = gpu ]; then\n  run 8\nfi")
    assert "line 3 is reached only if $D says so" in str(error.value)
    assert unknown_in(words_of(script)[1]) == ["D"]
    assert words_of(script, {"D": "gpu"}) == ["run", "8"]


def test_the_text_of_a_here_document_is_no_command():
    script = """LR=1
cat <<-'EOF' > config.txt
\tLR=7 it's run
\tEOF
run lr=$LR
"""
    assert words_of(script)[-1] == "lr=1"


@pytest.mark.parametrize("head", ["train() {", "train ()\n{", "function train {"])
def test_a_command_in_a_function_is_refused(head):
    """Its variables are those of the call, which is not followed."""
    script = f"LR=1\n{head}\n  run lr=$LR\n}}\nLR=5\ntrain\n"
    with pytest.raises(ConfigError, match="only if the function train in line 2 says so"):
        words_of(script)


def test_a_function_of_other_commands_is_passed_over():
    script = "say() { echo; }\nrun lr=3\n"
    assert words_of(script)[-1] == "lr=3"


def test_unset_variables_are_marked():
    assert unknown_in(words_of("run a=$NODES")[1]) == ["NODES"]
    assert words_of("run a=$NODES", {"NODES": "2"}) == ["run", "a=2"]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo", "no command of the library is in it"),
        ("run a\nrun b", "2 commands of the library"),
        ("run 'a", "line 1: the quote ' is not closed"),
        ('\nrun "a', 'line 2: the quote " is not closed'),
        ("run ${a", "the bracket { is not closed"),
        ("for i in 1 2; do run $i; done", "the loop `for` in line 1"),
        ("if check; then\nrun a; fi", "line 2 is reached only if \\$check says so"),
        ("run $((2 ** 3))", "is no sum of whole numbers"),
    ],
)
def test_what_cannot_be_read_is_named(script, message):
    with pytest.raises(ConfigError, match=message):
        words_of(script)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("007", 7),
        ("-1", -1),
        ("1.", 1.0),
        ("True", True),
        ("null", None),
        ("a.b", "a.b"),
        ("1_000x", "1_000x"),
        ("'a b'", "a b"),
        ("['a', b,1]", ["a", "b", 1]),
        ("[]", []),
        ("{a: 1, 'b': [x, true]}", {"a": 1, "b": ["x", True]}),
        ("[[1,2],{c: d}]", [[1, 2], {"c": "d"}]),
        ("", ""),
    ],
)
def test_values(text, value):
    assert value_of(text) == value
