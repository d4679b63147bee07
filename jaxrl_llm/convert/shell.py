"""The command that a shell script would start, worked out without running anything.

Known are assignments, arrays, defaults such as ${X:-8}, whole-number sums, and `if` and `case` on
values that are known. What a command prints is never known.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.shell_words import REDIRECTIONS, Part, Token, tokens

UNKNOWN = re.compile("\x00([^\x00]*)\x00")  # stands in a value for a part that is not known
LISTS = ("@", "*")  # the arguments of the script
COMMANDS_BEFORE = ("then", "else", "do", "!", "time", "exec", "nohup")


class Unknown(Exception):
    """A value depends on what is not known; the text is a name or a command."""


def read_command(
    script: str,
    is_ours: Callable[[list[str]], bool],
    environment: Mapping[str, str],
    arguments: Sequence[str] = (),
) -> list[str]:
    """The words of the only command of `script` for which `is_ours` is true.

    `arguments` are those of the script, $1 and so on.

    A part of a word that is not known is marked: see `unknown_in`.
    Raises: ConfigError where there is none or several, or where it depends on what is not known.
    """
    run = _Run(is_ours, dict(environment), arguments=list(arguments))
    run.block(_Statements(tokens(script)), frozenset())
    if not run.found:
        raise ConfigError("no command of the library is in it: give its whole command line")
    if len(run.found) > 1:
        raise ConfigError(
            f"{len(run.found)} commands of the library are in it: give one of them, in quotes"
        )
    return run.found[0]


def unknown_in(text: str) -> list[str]:
    """Names of variables, and commands in $( ), that a word depends on and that are not known."""
    return list(dict.fromkeys(UNKNOWN.findall(text)))


def without_unknown(text: str) -> str:
    """A word without its unknown parts and the separators before them."""
    return re.sub("[-_./ ]*" + UNKNOWN.pattern, "", text)


class _Statements:
    """Tokens, and the place in them."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens = found
        self._at = 0

    def peek(self) -> Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def next(self) -> Token:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def simple(self) -> list[Token]:
        """The words of one command, up to its end; brackets of arrays are kept whole."""
        words: list[Token] = []
        depth = 0
        while (token := self.peek()) is not None:
            depth += (token.plain == "[[") - (token.plain == "]]")
            if token.operator in ("\n", ";", ";;", "|", "&", "&&", "||") and not depth:
                break
            if token.operator == ")" and not depth:
                break
            self.next()
            depth += token.operator == "(" or token.plain.endswith("=(")
            depth -= token.operator == ")"
            if not token.operator or token.operator != "\n":
                words.append(token)
        return words

    def is_function(self) -> bool:
        """Whether NAME ( ) or function NAME comes next."""
        token, after = self._tokens[self._at], self._tokens[self._at + 1 : self._at + 3]
        if token.plain == "function":
            return bool(after) and not after[0].operator
        return [other.operator for other in after] == ["(", ")"]

    def skip(self, *operators: str) -> None:
        while (token := self.peek()) is not None and token.operator in operators:
            self.next()


@dataclass
class _Run:
    """The variables of a script so far, and the commands that were looked for."""

    is_ours: Callable[[list[str]], bool]
    variables: dict[str, str]
    arrays: dict[str, list[str]] = field(default_factory=dict)
    found: list[list[str]] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    skipping: bool = False  # in a branch that is not taken
    doubt: str = ""  # what a branch depends on that may or may not be taken

    # ------------------------------------------------------------------------- statements

    def block(self, statements: _Statements, ends: frozenset[str]) -> str:
        """Follow commands up to one of the words `ends`, which is returned; "" at the end."""
        while (token := statements.peek()) is not None:
            if token.operator:
                statements.next()
                if token.operator in ends:
                    return token.operator
                continue
            if token.plain in ends:
                statements.next()
                return token.plain
            self._joined(statements)
        return ""

    def _joined(self, statements: _Statements) -> None:
        """Commands with && and || between them, of which a test may skip the next one."""
        outer = self.skipping, self.doubt
        taken: bool | None = True
        last: bool | None = True
        why = ""
        while True:
            self._take(outer, taken, why)
            status, reason = self._statement(statements)
            self.skipping, self.doubt = outer
            token = statements.peek()
            if token is None or token.operator not in ("&&", "||"):
                return
            statements.next()
            statements.skip("\n")
            if taken is False:  # the command before counts as the one before it
                status, reason = last, ""
            last = status
            turn = token.operator == "||" and status is not None
            taken, why = (not status if turn else status), reason

    def _statement(self, statements: _Statements) -> tuple[bool | None, str]:
        """Follow one; whether it succeeds, or None with what that depends on."""
        token = statements.peek()
        word = token.plain if token is not None else ""
        if word == "if":
            statements.next()
            self._if(statements)
        elif word == "case":
            self._case(statements)
        elif word in ("for", "while", "until"):
            self._loop(statements, word)
        elif word == "{":
            statements.next()
            self.block(statements, frozenset(("}",)))
        elif statements.is_function():
            self._function(statements)
        else:
            return self._command(statements.simple())
        return True, ""

    def _function(self, statements: _Statements) -> None:
        """The body of a function counts where it is called, which is not followed."""
        outer = self.skipping, self.doubt
        word = statements.next()
        name = statements.next().plain if word.plain == "function" else word.plain
        statements.skip("(", ")", "\n")
        self.doubt = self.doubt or f"the function {name} in line {word.line}"
        self._statement(statements)
        self.skipping, self.doubt = outer

    def _if(self, statements: _Statements) -> None:
        outer, done, doubt = (self.skipping, self.doubt), False, ""
        end = "elif"
        while end == "elif":
            self.skipping, self.doubt = outer
            truth, why = self._condition(statements, skip=done)
            doubt = doubt or why
            self._take(outer, truth and not done, doubt)
            done = done or truth is True
            end = self.block(statements, frozenset(("elif", "else", "fi")))
        if end == "else":
            self._take(outer, not done, doubt)
            self.block(statements, frozenset(("fi",)))
        self.skipping, self.doubt = outer

    def _take(self, outer: tuple[bool, str], truth: bool | None, why: str) -> None:
        skipping, doubt = outer
        self.skipping = skipping or truth is False
        self.doubt = doubt or why

    def _condition(self, statements: _Statements, *, skip: bool) -> tuple[bool | None, str]:
        """The words up to `then`: true, false, or None with what is not known."""
        words: list[Token] = []
        while (token := statements.peek()) is not None and token.plain != "then":
            words.append(statements.next())
        if statements.peek() is not None:
            statements.next()
        if self.skipping or skip:
            return False, ""
        try:
            return self._either(words), ""
        except Unknown as unknown:
            return None, str(unknown)

    def _either(self, words: list[Token]) -> bool:
        result, joined = False, "||"
        for test, joiner in _tests(words):
            if joined == "||":
                result = result or self._test(test)
            else:
                result = result and self._test(test)
            joined = joiner
        return result

    def _test(self, words: list[Token]) -> bool:
        """One [ ] or [[ ]], or a command in brackets of its own."""
        if words and words[0].plain == "!":
            return not self._test(words[1:])
        if words and words[0].plain in ("{", "}", ""):
            return self._test(words[1:]) if words[1:] else True
        if not words or words[0].plain not in ("[", "[[", "test"):
            raise Unknown(" ".join(word.plain or "..." for word in words))
        texts = ["".join(self._expand(word)) for word in words[1:] if word.plain not in ("]", "]]")]
        for text in texts:
            for name in unknown_in(text):
                raise Unknown(name)
        return _truth(texts)

    def _case(self, statements: _Statements) -> None:
        statements.next()
        subject = "".join(self._expand(statements.next()))
        doubt = "".join(unknown_in(subject)[:1])
        statements.skip("\n")
        statements.next()  # in
        outer, done = (self.skipping, self.doubt), False
        while True:
            statements.skip("\n", ";;", ";")
            token = statements.peek()
            if token is None or token.plain == "esac":
                break
            matches = self._pattern(statements, subject)
            self._take(outer, None if doubt else matches and not done, doubt)
            done = done or matches
            if self.block(statements, frozenset((";;", "esac"))) != ";;":
                self.skipping, self.doubt = outer
                return
        if statements.peek() is not None:
            statements.next()
        self.skipping, self.doubt = outer

    def _pattern(self, statements: _Statements, subject: str) -> bool:
        """Whether one of the patterns before a bracket matches."""
        found = False
        while (token := statements.peek()) is not None:
            statements.next()
            if token.operator == ")":
                break
            if not token.operator:
                found = found or fnmatch.fnmatchcase(subject, "".join(self._expand(token)))
        return found

    def _loop(self, statements: _Statements, word: str) -> None:
        """A loop may hold what matters only where it is skipped as a whole."""
        outer = self.skipping, self.doubt
        line = statements.next().line
        while (token := statements.peek()) is not None and token.plain != "do":
            statements.next()
        if statements.peek() is not None:
            statements.next()
        self.doubt = self.doubt or f"the loop `{word}` in line {line}"
        self.block(statements, frozenset(("done",)))
        self.skipping, self.doubt = outer

    # ------------------------------------------------------------------------- commands

    def _command(self, words: list[Token]) -> tuple[bool | None, str]:
        """One command. A test may fail; of others success is expected."""
        while words and words[0].plain in (*COMMANDS_BEFORE, "export", "local", "declare"):
            words = words[1:]
        while words and (name := _assigned(words[0])) is not None:
            words = self._assign(name, words)
        if self.skipping or not words:
            return True, ""
        if words[0].plain in ("[", "[[", "test"):
            try:
                return self._either(words), ""
            except Unknown as unknown:
                return None, str(unknown)
        if words[0].plain == "shift":
            by = int(words[1].plain) if len(words) > 1 and words[1].plain.isdigit() else 1
            self.arguments = self.arguments[by:]
            return True, ""
        texts = [text for word in _without_files(words) for text in self._expand(word)]
        if self.is_ours(texts):
            self._check_doubt(words[0].line)
            self.found.append(texts)
        return True, ""

    def _assign(self, name: tuple[str, bool], words: list[Token]) -> list[Token]:
        """Set a variable or an array; the words that follow."""
        key, adds = name
        first = words[0]
        if first.is_plain and first.plain.endswith("=(") and not first.parts[-1].quoted:
            end = next((i for i, word in enumerate(words) if word.operator == ")"), len(words))
            if not self.skipping:
                self._check_doubt(first.line)
                entries = [text for word in words[1:end] for text in self._expand(word)]
                self.arrays[key] = (self.arrays.get(key, []) if adds else []) + entries
            return words[end + 1 :]
        if not self.skipping:
            value = _after_equals(first)
            text = " ".join(self._expand(Token(first.line, value), split=False))
            if _is_own_default(key, value):
                text = UNKNOWN.sub(f"\x00{key}\x00", text)
            if self.doubt:
                text = f"\x00{self.doubt}\x00"  # nobody may read it
            self.variables[key] = (self.variables.get(key, "") if adds else "") + text
        return words[1:]

    def _check_doubt(self, line: int) -> None:
        if self.doubt:
            raise ConfigError(
                f"line {line} is reached only if {_shown(self.doubt)} says so, and scripts are "
                f"read here without being run. {remedy(self.doubt)}"
            )

    # ------------------------------------------------------------------------- expansions

    def _expand(self, word: Token, *, split: bool = True) -> list[str]:
        """A word as none, one or several texts."""
        done: list[str] = []
        text, begun = "", False
        is_list = any(
            part.kind == "variable" and part.text in LISTS or part.text.endswith("[@]")
            for part in word.parts
        )
        for part in word.parts:
            fields = self._part(part)
            if part.kind == "text" or part.quoted and len(fields) == 1:
                text, begun = text + fields[0], begun or not is_list or bool(fields[0])
                continue
            if not part.quoted and split and len(fields) == 1 and not _is_quoted_default(part):
                fields = _split(fields[0])
            for i, entry in enumerate(fields):
                if i:
                    done.append(text)
                    text = ""
                text, begun = text + entry, True
        return [*done, text] if begun else done

    def _part(self, part: Part) -> list[str]:
        if part.kind == "text":
            return [part.text]
        if part.kind == "command" and part.text.strip() == "pwd" and "PWD" in self.variables:
            return [self.variables["PWD"]]
        if part.kind == "command":
            return [f"\x00$({part.text.strip()})\x00"]
        if part.kind == "sum":
            return [self._sum(part.text)]
        return self._variable(part.text)

    def _variable(self, text: str) -> list[str]:
        if text in LISTS:
            return list(self.arguments)
        if text == "#":
            return [str(len(self.arguments))]
        if (array := re.fullmatch(r"(\w+)\[[@*]\]", text)) is not None:
            return list(self.arrays.get(array[1], []))
        found = re.fullmatch(r"(\w+)(?:(:?[-=+?]|##?|%%?|//?)(.*))?", text, re.DOTALL)
        if found is None:
            return [f"\x00{text}\x00"]
        name, how, rest = found[1], found[2] or "", found[3] or ""
        value = self.variables.get(name)
        if name.isdigit() and 0 < int(name) <= len(self.arguments):
            value = self.arguments[int(name) - 1]
        is_set = bool(value) if how.startswith(":") else value is not None
        if how.lstrip(":") in ("-", "="):
            return [value or ""] if is_set else [self._text(rest)]
        if how.lstrip(":") == "+":
            return [self._text(rest)] if is_set else [""]
        if value is None:
            return [f"\x00{name}\x00"]
        if how in ("#", "##", "%", "%%"):
            return [_trimmed(value, how, self._text(rest))]
        if how in ("/", "//"):
            old, _, new = rest.partition("/")
            return [value.replace(self._text(old), self._text(new), -1 if how == "//" else 1)]
        return [value]

    def _text(self, raw: str) -> str:
        """What stands in a ${X:-...}: a text with expansions."""
        plain = raw.replace("\n", " ")
        if len(plain) > 1 and plain[0] == plain[-1] and plain[0] in "'\"":
            plain = plain[1:-1]
        quoted = plain.replace('"', '\\"')
        found = tokens(f'"{quoted}"')
        return "".join(self._expand(found[0], split=False)) if found else ""

    def _sum(self, text: str) -> str:
        """The value of $(( )); names are variables."""
        text = re.sub(r"\$\{?(\w+)\}?", r"\1", text)
        missing: list[str] = []

        def value(name: re.Match[str]) -> str:
            found = self.variables.get(name[0], "")
            if not re.fullmatch(r"-?\d+", found):
                missing.extend(unknown_in(found) or [name[0]])
            return found

        filled = re.sub(r"[A-Za-z_]\w*", value, text)
        if missing:
            return f"\x00{missing[0]}\x00"
        return str(_arithmetic(filled, text))


def _is_quoted_default(part: Part) -> bool:
    """Whether a part is ${X:-"..."}, which stays one word."""
    return part.kind == "variable" and bool(re.fullmatch(r"\w+:?-\".*\"", part.text, re.DOTALL))


def _split(text: str) -> list[str]:
    """Words of a text that was not quoted; a part that is not known is not split."""
    return [found[0] for found in re.finditer("(?:\x00[^\x00]*\x00|[^\\s\x00])+", text)]


def _assigned(word: Token) -> tuple[str, bool] | None:
    """The name that a word assigns to, and whether it adds; None for other words."""
    text = ""
    for part in word.parts:
        if part.kind != "text" or part.quoted:
            break
        text += part.text
    found = re.match(r"([A-Za-z_]\w*)(\+?)=", text)
    return (found[1], bool(found[2])) if found else None


def _is_own_default(key: str, value: tuple[Part, ...]) -> bool:
    """Whether a value is ${KEY:-...}: then the environment may give it."""
    (part, *more) = [part for part in value if part.kind != "text" or part.text] or [None]
    return not more and part is not None and part.text.startswith((f"{key}:-", f"{key}-"))


def _without_files(words: list[Token]) -> list[Token]:
    """A command without redirections such as 2>&1 or > log."""
    kept: list[Token] = []
    skip = False
    for word in words:
        if word.operator in REDIRECTIONS:
            if kept and kept[-1].plain.isdigit():
                kept.pop()
            skip = True
        elif skip:
            skip = False
        elif not word.operator:
            kept.append(word)
    return kept


def _after_equals(word: Token) -> tuple[Part, ...]:
    at = next(i for i, part in enumerate(word.parts) if part.text == "=")
    return word.parts[at + 1 :]


def _tests(words: list[Token]) -> list[tuple[list[Token], str]]:
    """Commands of a condition, each with the && or || after it. [[ a && b ]] is two."""
    found: list[tuple[list[Token], str]] = []
    test: list[Token] = []
    opened: list[Token] = []
    for word in [*words, Token(0, operator=";")]:
        if word.plain in ("[[", "]]"):
            opened = [word] if word.plain == "[[" else []
        if word.operator in ("&&", "||", ";", "\n"):
            if test:
                found.append((test, word.operator))
            test = list(opened)
        elif not word.operator:
            test.append(word)
    return found


def _truth(texts: list[str]) -> bool:
    """What [ ] says of its words."""
    if texts[:1] == ["!"]:
        return not _truth(texts[1:])
    if len(texts) == 1:
        return bool(texts[0])
    if len(texts) == 2 and texts[0] in ("-z", "-n"):
        return bool(texts[1]) == (texts[0] == "-n")
    if len(texts) == 3:
        left, sign, right = texts
        if sign in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (sign != "!=")
        numbers = {"-eq": "eq", "-ne": "ne", "-lt": "lt", "-le": "le", "-gt": "gt", "-ge": "ge"}
        if sign in numbers and left.lstrip("-").isdigit() and right.lstrip("-").isdigit():
            return bool(getattr(operator, numbers[sign])(int(left), int(right)))
    raise Unknown(f"[ {' '.join(texts)} ]")


SIGNS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b),  # a shell rounds to 0
    ast.Mod: lambda a, b: a - b * int(a / b),
}


def _arithmetic(text: str, shown: str) -> int:
    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
            return SIGNS[type(node.op)](value(node.left), value(node.right))
        raise ValueError

    try:
        return value(ast.parse(text.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError):
        raise ConfigError(f"$(({shown})) is no sum of whole numbers: write its value") from None


def _trimmed(value: str, how: str, pattern: str) -> str:
    """A value without the shortest or longest start (#) or end (%) that matches."""
    places = range(len(value) + 1)
    if how in ("#", "##"):
        fits = [i for i in places if fnmatch.fnmatchcase(value[:i], pattern)]
        return value[(max if how == "##" else min)(fits) :] if fits else value
    fits = [i for i in places if fnmatch.fnmatchcase(value[i:], pattern)]
    return value[: (min if how == "%%" else max)(fits)] if fits else value


def _shown(unknown: str) -> str:
    return unknown if unknown.startswith(("$", "[", "the loop", "the function")) else f"${unknown}"


def remedy(unknown: str) -> str:
    """What to do about a variable or a command that is not known."""
    if unknown.isdigit():
        return f"It is argument {unknown} of the script: give its arguments after --file=FILE"
    if re.fullmatch(r"\w+", unknown):
        return f"Give its value before the command: {unknown}=VALUE jaxrl convert-config ..."
    return "Write the value into the script, or give the command line itself"
