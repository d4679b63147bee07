"""A chat tokenizer small enough to write out: one id a printable ASCII character or é."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ["<pad>", "<s>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m.role) }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_tokenizer(
    folder: Path, *, template: str | None = TEMPLATE, add_bos: bool = False, eos: bool = True
) -> Path:
    """A directory for AutoTokenizer; end token `<|im_end|>` (id 3)."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [*SPECIAL, "\n", *(chr(code) for code in range(32, 127)), "é"]
    fast = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    fast.decoder = decoders.Fuse()
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    if add_bos:
        fast.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    fast.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "clean_up_tokenization_spaces": False,
    }
    if eos:
        config["eos_token"] = "<|im_end|>"
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
