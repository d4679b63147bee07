"""Text to token ids and back: the built-in character tokenizer, and Hugging Face tokenizers.

`encode` never adds special tokens. A plain-string prompt starts with `bos_id` if the tokenizer adds
one (Llama, Mistral). A conversation is rendered by the chat template, which writes its own.
transformers is imported only when a Hugging Face tokenizer is opened.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxrl_llm.chat_template import LONGEST, try_template
from jaxrl_llm.images import MARK, ImageInput
from jaxrl_llm.references import nearest
from jaxrl_llm.token_bytes import UnknownBytes, bytes_of_tokens
from jaxrl_llm.turns import Message, Turns

log = logging.getLogger(__name__)
PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"
# Printable ASCII and the newline, without "|" and "`". Without "|" no text can spell a special
# token, and the vocabulary has 96 = 2^5 * 3 tokens, a size that any usual tensor axis divides.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127) if chr(code) not in "|`")
BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}  # how byte-level tokenizers write the two
# Llama 3 and gpt-oss write the date; today's would break exact resume.
TEMPLATE_DATE = "26 Jul 2024"
FIXED_DATE = (
    "{%- macro strftime_now(form) -%}{{- '2024-07-26' if form == '%Y-%m-%d' else '"
    + TEMPLATE_DATE
    + "' -}}{%- endmacro %}"
)
# A letter may follow these in a text, and no token holds the end of one and the letter.
ANCHORS = ("\n", "a", ".", "0")
# Variables of a chat template that follow from each row.
OUR_VARIABLES = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize")
SPLIT_SAMPLES = 1024  # tokens whose texts are split to compare two tokenizers
# Further texts by which tokenizers differ.
SPLIT = ("a", " 12345 it's\t12.5", "\n\n  A x_y <a>", "\u00e9\u6f22 \u5b57")
MOST_TRIED = 256  # sets of template variables for which the form of messages is kept
DIGEST_SAMPLES = 4096  # tokens whose texts a digest splits again
PANIC = "PanicException"  # a fault in the Rust code of tokenizers; it is not an Exception
CHAR_MARK = "jaxrl_llm_tokenizer"  # key of tokenizer_config.json that marks a saved CharTokenizer


def _within(tokenizer: "Tokenizer", ids: list[int]) -> list[int]:
    """The ids. ValueError for one that is outside of the model's vocabulary."""
    if tokenizer.limit is not None and ids and max(ids) >= tokenizer.limit:
        text = tokenizer.decode([max(ids)], skip_special=False)
        raise ValueError(
            f"the tokenizer gives the id {max(ids)}, outside of the model's vocabulary of "
            f"{tokenizer.limit} tokens, to {text!r}: take the tokenizer of this model, or leave "
            "such text out"
        )
    return ids


class CharTokenizer:
    """One id for each character of `ALPHABET`. Id 0 pads and id 1 ends."""

    vocab_size = len(ALPHABET) + 2
    pad_id = 0
    eos_id = 1
    bos_id = None
    stop_ids = (1,)
    stop_origins: Mapping[int, str] = {1: "character tokenizer"}
    has_chat_template = False
    template_text = ""
    added_tokens: Mapping[str, tuple[int, bool]] = {PAD_TOKEN: (0, True), EOS_TOKEN: (1, True)}
    limit: int | None = None  # size of the model's vocabulary, where it is smaller
    images: ImageInput | None = None  # see `images.see_images`

    def __init__(self) -> None:
        self._texts = (PAD_TOKEN, EOS_TOKEN, *ALPHABET)
        self._ids = {text: i for i, text in enumerate(self._texts)}

    def encode(self, text: str) -> list[int]:
        """Ids of the characters. ValueError names the first unknown character.

        With images, their mark has one id.
        """
        if self.images is not None and MARK in text:
            parts = [self.encode(part) for part in text.split(MARK)]
            return [*parts[0], *(i for part in parts[1:] for i in (self.images.token_id, *part))]
        try:
            return _within(self, [self._ids[character] for character in text])
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"the character tokenizer does not know {character!r} (U+{ord(character):04X}, "
                f"position {text.index(character)}): it holds printable ASCII without '|' and '`'; "
                "use a Hugging Face tokenizer for other text"
            ) from None

    def encode_parts(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Ids of the characters between places."""
        return [self.encode(text[a:b]) for a, b in pairwise([0, *places, len(text)])]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The characters. Without `skip_special`, padding and end appear by name.

        A model may have a larger vocabulary: ids past the last character have no text.
        """
        first, end = 2 if skip_special else 0, len(self._texts)
        return "".join(self._texts[i] for i in ids if first <= i < end)

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        """Refuses: characters have no roles."""
        raise self._no_template()

    def turns(self, *_: Any, **__: Any) -> Turns:
        """Refuses: characters have no roles."""
        raise self._no_template()

    def _no_template(self) -> ValueError:
        return ValueError(
            "the character tokenizer has no chat template: give prompts as plain strings "
            "(prompt_style='plain' for a task), or a tokenizer of a chat model"
        )

    def save(self, directory: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which AutoTokenizer opens."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastTokenizer

        # Byte-level BPE without merges: for some model types (qwen2) transformers reads only the
        # vocabulary of a tokenizer.json and builds this pipeline itself. The unknown token does not
        # exist, so that an unknown character is an error; BPE would drop it silently.
        vocabulary = {BYTE_LEVEL.get(text, text): i for text, i in self._ids.items()}
        fast = FastTokenizer(models.BPE(vocabulary, [], unk_token="<|unknown|>"))
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        fast.decoder = decoders.ByteLevel()
        special = [AddedToken(text, special=True, normalized=False) for text in self._texts[:2]]
        fast.add_special_tokens(special)
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        fast.save(str(folder / "tokenizer.json"))
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS_TOKEN,
            "pad_token": PAD_TOKEN,
            "unk_token": None,  # else transformers adds one to the vocabulary of a qwen2 model
            "clean_up_tokenization_spaces": False,
            CHAR_MARK: "char",
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")

    def token_bytes(self) -> list[bytes]:
        """The characters; padding and end have none."""
        return [b"", b"", *(character.encode() for character in ALPHABET)]

    def digest(self) -> str:
        """Of the texts, in the order of their ids."""
        return _digest(self, self._texts)


class HFTokenizer:
    """transformers' AutoTokenizer for a local directory or a hub name. Never runs remote code."""

    limit: int | None = None  # size of the model's vocabulary, where it is smaller
    images: ImageInput | None = None

    def __init__(self, path: str | Path) -> None:
        auto_tokenizer = _auto_tokenizer()
        self.path = str(path)
        try:
            self._tokenizer: Any = auto_tokenizer.from_pretrained(
                self.path, trust_remote_code=False
            )
            self._take_file()
        except BaseException as error:  # transformers raises anything, and Rust panics
            if not isinstance(error, Exception) and type(error).__name__ != PANIC:
                raise
            raise ValueError(
                f"no tokenizer could be opened from {self.path!r}: {_first_line(error)}. Give a "
                "directory with tokenizer.json and tokenizer_config.json, the name of a model on a "
                "reachable hub, or 'char'"
            ) from error
        if self._tokenizer.eos_token_id is None:
            raise ValueError(
                f"the tokenizer of {self.path!r} names no eos_token, so no response could end: "
                "set eos_token in its tokenizer_config.json"
            )
        self.bos_id = self._find_bos()
        self.model_stop_ids = _stop_ids(self.path, self.eos_id)
        # Id of each added token, and whether it is a special one.
        self.added_tokens = {
            token.content: (i, token.special or i in self._tokenizer.all_special_ids)
            for i, token in self._tokenizer.added_tokens_decoder.items()
        }
        self._chat_variables: dict[str, Any] = {}
        self._tried: dict[str, Turns] = {}  # by tools and variables
        self._told: set[str] = set()
        self._trial: str | None = None  # why its template cannot be used; empty once it can

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer, added tokens included."""
        return len(self._tokenizer)

    @property
    def eos_id(self) -> int:
        """Id of eos_token."""
        return int(self._tokenizer.eos_token_id)

    @property
    def pad_id(self) -> int:
        """Id of pad_token, else of eos_token. Padding is masked and never attended to."""
        pad = self._tokenizer.pad_token_id
        return self.eos_id if pad is None else int(pad)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """End ids of the model's files, then those with which its chat template ends a turn."""
        return tuple(self._stops)

    @property
    def stop_origins(self) -> Mapping[int, str]:
        """Where each end id comes from."""
        return self._stops

    @cached_property
    def _stops(self) -> dict[int, str]:
        origins = dict.fromkeys(self.model_stop_ids, "files of the model")
        more = self.turns().end_ids() if self.has_chat_template else ()
        for i in more:
            if i not in origins:
                log.warning(
                    "The chat template ends a turn with %r (id %d), which no file of %s names as "
                    "an end: it ends responses too, and the exported model names it",
                    self.decode([i], skip_special=False),
                    i,
                    self.path,
                )
                origins[i] = "chat template"
        return origins

    @property
    def template_name(self) -> str:
        """The chat template, for messages."""
        return f"the chat template of {self.path!r}"

    @property
    def has_chat_template(self) -> bool:
        """True if the directory has a chat template."""
        return self._tokenizer.chat_template is not None

    @property
    def template_text(self) -> str:
        """The chat template; of several named ones, all."""
        template = self._tokenizer.chat_template or ""
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def encode(self, text: str) -> list[int]:
        """Ids of the text. Text that spells a special token gives that token's id.

        ValueError for text that the vocabulary cannot represent.
        """
        if self.images is not None:
            text = text.replace(MARK, self.images.text)
        return _within(self, self._encode(text))

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(
                f"the tokenizer of {self.path!r} cannot encode a text: {_first_line(error)}; "
                "fetch its tokenizer.json again"
            ) from error

    def encode_parts(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Ids of the parts of a text before, between and after `places`.

        Together they are the ids of the text. Where one token would hold both sides of a place, the
        side before it is encoded as a text that ends there. So is the text before the first place.
        """
        if not places:
            return [self.encode(text)]
        ids, offsets = self._encode_with_offsets(text)
        cuts = [self._cut(text, ids, offsets, place, i == 0) for i, place in enumerate(places)]
        whole = next((i for i, cut in enumerate(cuts) if cut is None), len(cuts))
        bounds = [0, *(cut for cut in cuts[:whole] if cut is not None)]
        if whole == len(places):
            return [ids[a:b] for a, b in pairwise([*bounds, len(ids)])]
        # A token holds both sides of a place.
        before = self.encode_parts(text[: places[whole]], places[:whole])
        after = [place - places[whole] for place in places[whole + 1 :]]
        return before + self._encode_behind(text[places[whole] :], after)

    def _encode_behind(self, text: str, places: Sequence[int]) -> list[list[int]]:
        """Ids of the parts of a text that does not begin a document: no blank is put before it."""
        for anchor in ANCHORS:
            ids, offsets = self._encode_with_offsets(anchor + text)
            if self._cut(anchor + text, ids, offsets, len(anchor), True) is not None:
                moved = [len(anchor), *(place + len(anchor) for place in places)]
                return self.encode_parts(anchor + text, moved)[1:]
        return self.encode_parts(text, places)

    def _encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoding = self._tokenizer(
            text, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        return _within(self, list(encoding["input_ids"])), encoding["offset_mapping"]

    def _cut(
        self,
        text: str,
        ids: Sequence[int],
        offsets: Sequence[tuple[int, int]],
        place: int,
        checked: bool,
    ) -> int | None:
        """Number of tokens before a place; None where a token holds both sides of it."""
        first = next((i for i, (_, end) in enumerate(offsets) if end > place), len(ids))
        # Some tokenizers leave blanks out of the offsets, or put one where a text begins.
        if checked or text[place - 1 : place] == " " or (first and offsets[first - 1][0] >= place):
            before = self._encode(text[:place])
            return len(before) if list(ids[: len(before)]) == before else None
        return first if first == len(ids) or offsets[first][0] >= place else None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the ids, without clean-up of spaces."""
        if getattr(self._tokenizer, "is_fast", False):
            # transformers looks at every id before, which takes longer than decoding.
            plain = [int(i) for i in ids]
            return self._tokenizer.backend_tokenizer.decode(plain, skip_special_tokens=skip_special)
        return self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render with the model's own template. ValueError if it raises or takes too much."""
        if not self.has_chat_template:
            raise ValueError(
                f"the tokenizer of {self.path!r} has no chat template: give prompts as plain "
                "strings, or add chat_template.jinja to its directory"
            )
        arguments: dict[str, Any] = {
            "date_string": TEMPLATE_DATE,
            **self._chat_variables,
            **(variables or {}),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        if tools and not self._reads("tools"):
            self._tell(f"{self.template_name} does not read tools: column 'tools' has no effect")
        conversation = [dict(message) for message in messages]
        try:
            if self._trial is None:
                self._trial = self._try_template(arguments | {"messages": conversation})
            if self._trial:
                raise ValueError(self._trial)
            text = self._tokenizer.apply_chat_template(
                conversation,
                continue_final_message=continue_final_message,
                tokenize=False,
                chat_template=self._dated_template,
                **arguments,
            )
            if len(text) > LONGEST:  # what was tried may have been shorter
                raise ValueError(f"it writes more than {LONGEST:,} characters")
            return text
        except Exception as error:  # a template is a program of the model's folder
            what = str(error) or type(error).__name__
            raise ValueError(f"the chat template refuses the conversation: {what}") from error

    def turns(
        self, tools: Sequence[Any] | None = None, variables: Mapping[str, Any] | None = None
    ) -> Turns:
        """How the chat template writes turns with these tools and variables of a row."""
        key = json.dumps([bool(tools), variables], sort_keys=True, default=str)
        if key not in self._tried:
            if len(self._tried) >= MOST_TRIED:  # requests to a server bring their own variables
                self._tried.clear()
            self._tried[key] = Turns(self, tools, variables)
        return Turns(self, tools, variables, self._tried[key])

    @cached_property
    def _dated_template(self) -> str | None:
        """A template that asks for the date, with a fixed one; None for another."""
        template = self._tokenizer.chat_template
        dated = isinstance(template, str) and "strftime_now" in template
        return FIXED_DATE + template if dated else None

    def _reads(self, name: str) -> bool:
        return name in self._template_words

    @cached_property
    def _template_words(self) -> set[str]:
        return set(re.findall(r"\w+", self.template_text))

    def _tell(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            log.warning(line)

    def set_chat_variables(self, variables: Mapping[str, Any]) -> None:
        """Give the chat template further variables. ValueError for one that is ours, or unread."""
        words = self._template_words
        for name in variables:
            if name in OUR_VARIABLES:
                raise ValueError(f"config.data.chat_template_kwargs.{name} is set by the rows")
            if name not in words:
                raise ValueError(
                    f"config.data.chat_template_kwargs.{name} is nothing that the chat template "
                    f"of {self.path!r} reads{nearest(name, words)}"
                )
        self._chat_variables, self._trial = dict(variables), None
        self._tried.clear()

    def _try_template(self, variables: Mapping[str, Any]) -> str:
        """Why the template takes too much; empty where it does not. Once, not for each row."""
        special = self._tokenizer.special_tokens_map
        try:
            try_template(self._tokenizer.chat_template, special | variables)
        except ValueError as error:
            return str(error)
        return ""

    def save(self, directory: str | Path) -> None:
        """Write the tokenizer's files and its chat template."""
        self._tokenizer.save_pretrained(str(directory))

    def token_bytes(self) -> list[bytes]:
        """The bytes of each id; joined, they are the decoded text. ValueError where unknown."""
        try:
            return bytes_of_tokens(self._tokenizer)
        except UnknownBytes as error:
            raise ValueError(f"the bytes of {self.path!r}'s tokens are unknown: {error}") from None

    def digest(self) -> str:
        """Of the vocabulary, the special ids, the chat template, and how samples of it are split.

        It is made of what the tokenizer does and not of its files, whose form follows the version
        of transformers.
        """
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        every = -(-len(vocabulary) // DIGEST_SAMPLES)
        texts = "".join(self.decode([i], skip_special=False) for _, i in vocabulary[::every])
        return _digest(self, vocabulary, self._encode(texts), self._tokenizer.chat_template)

    def _take_file(self) -> None:
        """Split as tokenizer.json does. For some types of models transformers splits otherwise."""
        from tokenizers import Tokenizer as FileTokenizer
        from transformers import PreTrainedTokenizerFast
        from transformers.utils.hub import cached_file

        file = cached_file(self.path, "tokenizer.json", _raise_exceptions_for_missing_entries=False)
        if file is None:
            return
        of_file = FileTokenizer.from_file(str(file))
        every = range(0, of_file.get_vocab_size(), of_file.get_vocab_size() // SPLIT_SAMPLES + 1)
        sample = " ".join(of_file.decode([i], skip_special_tokens=False) for i in every)
        if any(_ids(of_file, text) != _ids(self._tokenizer, text) for text in (sample, *SPLIT)):
            log.warning("transformers splits text otherwise than %s, whose splitting is used", file)
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(self.path)

    def _find_bos(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return None
        return int(bos) if self._encode("a", special=True)[:1] == [bos] else None


def _ids(tokenizer: Any, text: str) -> list[int] | None:
    """Ids of a text; None where a vocabulary lacks a part of it."""
    try:
        encoding = tokenizer.encode(text, add_special_tokens=False)
    except Exception:  # tokenizers raises plain Exception
        return None
    return list(getattr(encoding, "ids", encoding))


Tokenizer = CharTokenizer | HFTokenizer


def _digest(tokenizer: Tokenizer, *parts: Any) -> str:
    special = [tokenizer.pad_id, tokenizer.eos_id, tokenizer.bos_id, list(tokenizer.stop_ids)]
    text = json.dumps([special, *parts])
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Open `"char"`, a directory (also one that `CharTokenizer.save` wrote) or a hub name."""
    if str(path) == "char":
        return CharTokenizer()
    folder = Path(path)
    if folder.is_dir():
        config = folder / "tokenizer_config.json"
        if config.is_file() and _read_object(config).get(CHAR_MARK) == "char":
            return CharTokenizer()
    return HFTokenizer(path)


def set_chat_variables(tokenizer: Tokenizer, variables: Mapping[str, Any]) -> None:
    """Give the tokenizer's chat template further variables. ValueError where there is none."""
    if not variables:
        return
    if not isinstance(tokenizer, HFTokenizer) or not tokenizer.has_chat_template:
        raise ValueError(
            "config.data.chat_template_kwargs is set, and the tokenizer has no chat template"
        )
    tokenizer.set_chat_variables(variables)


def check_vocabulary(
    tokenizer: Tokenizer, vocab_size: int, stop_ids: Sequence[int] | None = None
) -> None:
    """Refuse a tokenizer whose special ids are outside of the model's vocabulary.

    `stop_ids` are the run's own, by default the tokenizer's. An embedding lookup outside of the
    table gives NaN, and a stop id outside of it never ends a response.

    Guarantees: from now on, `encode` raises ValueError for text with an id outside of it.
    Raises:
        ValueError: the id and both sizes.
    """
    if isinstance(tokenizer, CharTokenizer | HFTokenizer):
        tokenizer.limit = vocab_size if vocab_size < tokenizer.vocab_size else None
    stops = tokenizer.stop_ids if stop_ids is None else stop_ids
    ids = {"padding": (tokenizer.pad_id,), "end": (tokenizer.eos_id,), "stop": stops}
    if tokenizer.bos_id is not None:
        ids["beginning"] = (tokenizer.bos_id,)
    for name, values in ids.items():
        for value in values:
            if not 0 <= value < vocab_size:
                raise ValueError(
                    f"the {name} id {value} is outside of the model's vocabulary of {vocab_size} "
                    f"tokens (the tokenizer has {tokenizer.vocab_size}): take the tokenizer of "
                    "this model, or change this id in its tokenizer_config.json, in its "
                    "generation_config.json or in config.rollout.stop_token_ids"
                )


def _auto_tokenizer() -> Any:
    """AutoTokenizer. transformers' advice to install torch is hidden: tokenizers do not need it."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_keep_import_quiet)
    from transformers import AutoTokenizer

    logger.removeFilter(_keep_import_quiet)
    return AutoTokenizer


def _keep_import_quiet(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _stop_ids(path: str, eos_id: int) -> tuple[int, ...]:
    """The tokenizer's end id, then the other end ids of the model's files, in order.

    generation_config.json names them, or config.json where that file names none.
    """
    from transformers.utils.hub import cached_file

    for name in ("generation_config.json", "config.json"):
        file = cached_file(path, name, _raise_exceptions_for_missing_entries=False)
        config = _read_object(Path(file)) if file else {}
        text = config.get("text_config") or {}  # an image model has its language half there
        ids = text.get("eos_token_id") if (top := config.get("eos_token_id")) is None else top
        if ids is None:
            continue
        ids = ids if isinstance(ids, list) else [ids]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or i < 0:
                raise ValueError(
                    f"{file} has the eos_token_id {i!r}, which is not a token id: correct or "
                    "remove it"
                )
        return tuple(dict.fromkeys([eos_id, *ids]))
    return (eos_id,)


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object of a file. Raises ValueError, with its name."""
    try:
        content = json.loads(file.read_text())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not readable JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
