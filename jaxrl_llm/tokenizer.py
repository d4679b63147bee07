"""Text to token ids and back: the built-in character tokenizer, and Hugging Face tokenizers.

`encode` never adds special tokens. A plain-string prompt starts with `bos_id` where the tokenizer
has that habit (Llama, Mistral); a conversation is rendered by the chat template, which writes its
own. transformers is imported only when a Hugging Face tokenizer is opened.
"""

import difflib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Message = Mapping[str, Any]

PAD_TOKEN = "<|pad|>"
EOS_TOKEN = "<|eos|>"
# Printable ASCII and the newline, less "|" and "`". Without "|" no text can spell a special token,
# and the vocabulary is 96 = 2^5 * 3, which divides over any usual tensor axis.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127) if chr(code) not in "|`")
BYTE_LEVEL = {" ": "\u0120", "\n": "\u010a"}  # how byte-level tokenizers spell the two
TEMPLATE_DATE = "26 Jul 2024"  # Llama 3 templates write the date; today's would break exact resume
CHAR_MARK = "jaxrl_llm_tokenizer"  # key of tokenizer_config.json that tells our export


@runtime_checkable
class Tokenizer(Protocol):
    """What the data, rewards and export code need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer knows; a model's table may be longer."""
        ...

    @property
    def pad_id(self) -> int:
        """Fills rows on the right; the end id where the tokenizer has no padding token."""
        ...

    @property
    def eos_id(self) -> int:
        """Ends a completion in training rows."""
        ...

    @property
    def bos_id(self) -> int | None:
        """Begins a plain text; None where this tokenizer adds none."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end generation: `eos_id` and those of generation_config.json."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        ...

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special token added. ValueError for text that it cannot represent."""
        ...

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The conversation as one text. ValueError where the template refuses it."""
        ...

    def save(self, directory: str | Path) -> None:
        """Writes files from which transformers' AutoTokenizer gives the same ids."""
        ...


class CharTokenizer:
    """One id a character of `ALPHABET`; 0 pads and 1 ends. Refuses any other character by name."""

    vocab_size = len(ALPHABET) + 2
    pad_id = 0
    eos_id = 1
    bos_id = None
    stop_ids = (1,)
    has_chat_template = False

    def __init__(self) -> None:
        self._texts = (PAD_TOKEN, EOS_TOKEN, *ALPHABET)
        self._ids = {text: i for i, text in enumerate(self._texts)}

    def encode(self, text: str) -> list[int]:
        """Ids of the characters; ValueError that names the first unknown one."""
        try:
            return [self._ids[character] for character in text]
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"the character tokenizer does not know {character!r} (U+{ord(character):04X}, "
                f"position {text.index(character)}): it holds printable ASCII without '|' and '`'; "
                "use a Hugging Face tokenizer for other text"
            ) from None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The characters; padding and end appear as their names unless skipped."""
        first = 2 if skip_special else 0
        return "".join(self._texts[i] for i in ids if i >= first)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Refuses: characters have no roles."""
        raise ValueError(
            "the character tokenizer has no chat template: give prompts as plain strings "
            "(prompt_style='plain' for a task), or a tokenizer of a chat model"
        )

    def save(self, directory: str | Path) -> None:
        """Writes tokenizer.json and tokenizer_config.json, which AutoTokenizer opens."""
        from tokenizers import AddedToken, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as FastTokenizer

        # Byte-level BPE without merges: for some model types (qwen2) transformers keeps nothing of
        # a tokenizer.json but its vocabulary and builds this pipeline itself. An unknown token that
        # does not exist makes an unknown character an error; BPE would drop it silently.
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


class HFTokenizer:
    """transformers' AutoTokenizer for a local directory or a hub name; never runs remote code."""

    def __init__(self, path: str | Path) -> None:
        auto_tokenizer = _auto_tokenizer()
        self.path = str(path)
        try:
            self._tokenizer: Any = auto_tokenizer.from_pretrained(
                self.path, trust_remote_code=False
            )
        except (OSError, ValueError) as error:
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
        self.stop_ids = _stop_ids(self.path, self.eos_id)
        self.bos_id = self._find_bos()

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
        """Id of pad_token, or of eos_token: padding is masked and never attended to."""
        pad = self._tokenizer.pad_token_id
        return self.eos_id if pad is None else int(pad)

    @property
    def has_chat_template(self) -> bool:
        """Whether the directory brought a chat template."""
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of the text, no special token added. Text that spells a special token becomes it."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of the ids, exactly: no space is cleaned up."""
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
    ) -> str:
        """Renders with the model's own template; ValueError where the template raises."""
        if not self.has_chat_template:
            raise ValueError(
                f"the tokenizer of {self.path!r} has no chat template: give prompts as plain "
                "strings, or add chat_template.jinja to its directory"
            )
        from jinja2 import TemplateError

        try:
            return self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                date_string=TEMPLATE_DATE,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def save(self, directory: str | Path) -> None:
        """Writes the tokenizer's files and its chat template."""
        self._tokenizer.save_pretrained(str(directory))

    def _find_bos(self) -> int | None:
        bos = self._tokenizer.bos_token_id
        if bos is None:
            return None
        return int(bos) if self._tokenizer.encode("a")[:1] == [bos] else None


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Opens `"char"`, a directory (one that `CharTokenizer.save` wrote included) or a hub name."""
    if str(path) == "char":
        return CharTokenizer()
    folder = Path(path)
    if folder.is_dir():
        config = folder / "tokenizer_config.json"
        if config.is_file() and json.loads(config.read_text()).get(CHAR_MARK) == "char":
            return CharTokenizer()
    else:
        _refuse_missing_directory(folder)
    return HFTokenizer(path)


def _refuse_missing_directory(folder: Path) -> None:
    """Tells a mistyped directory at once: asking a hub takes many seconds of retries."""
    is_hub_name = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(folder)) and str(folder)[0] != "."
    siblings = [entry.name for entry in folder.parent.glob("*") if entry.is_dir()]
    near = difflib.get_close_matches(folder.name, siblings, n=1)
    named_here = folder.parent.is_dir() if len(folder.parts) > 1 else bool(near)
    if is_hub_name and not named_here:
        return
    hint = f"; did you mean {str(folder.parent / near[0])!r}?" if near else ""
    raise ValueError(
        f"the tokenizer directory {str(folder)!r} does not exist{hint} (give an existing directory "
        "or 'char'; for a model of that name on a hub, start from another directory)"
    )


def _auto_tokenizer() -> Any:
    """AutoTokenizer, without transformers' advice to install torch: tokenizers do not need it."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_keep_import_quiet)
    from transformers import AutoTokenizer

    logger.removeFilter(_keep_import_quiet)
    return AutoTokenizer


def _keep_import_quiet(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


def _stop_ids(path: str, eos_id: int) -> tuple[int, ...]:
    """The end ids of generation_config.json, in order, with the tokenizer's own among them."""
    from transformers.utils.hub import cached_file

    file = cached_file(path, "generation_config.json", _raise_exceptions_for_missing_entries=False)
    found = json.loads(Path(file).read_text()).get("eos_token_id") if file else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return tuple(dict.fromkeys([eos_id, *(int(i) for i in ids)]))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
