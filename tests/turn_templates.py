"""Chat templates of each kind that public models have, shortened."""

GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"

# Qwen2.5, SmolLM2: every turn stands as it is, and a newline follows the end token.
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    + GENERATE
)

# SmolLM2 has a system message of its own.
SMOLLM2 = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful AI assistant named "
    "SmolLM, trained by Hugging Face<|im_end|>\n{% endif %}" + CHATML
)

# Qwen2.5 with tools: calls are JSON objects, successive results are one user turn.
_TURNS_WITH_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ '\n' if m.content or not loop.first }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}" + GENERATE
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson + '\n' }}{% endfor %}"
    "<|im_end|>\n{% endif %}" + _TURNS_WITH_TOOLS
)

# Qwen3 2507: the same turns, and Qwen's own words about tools.
QWEN3_2507 = (
    "{% if tools %}<|im_start|>system\n# Tools\n\nYou may call one or more functions to assist "
    "with the user query.\n\nYou are provided with function signatures within <tools></tools> XML "
    "tags:\n<tools>{% for t in tools %}{{ '\n' + t | tojson }}{% endfor %}{{ '\n</tools>' }}\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    "<|im_end|>\n{% endif %}" + _TURNS_WITH_TOOLS
)
# Qwen3 as it is trained in several turns: every turn keeps its thinking, if only an empty block.
QWEN3_KEPT = QWEN3_2507.replace(
    "{{ m.content or '' }}",
    "{% if m.role == 'assistant' and '<think>' not in (m.content or '') %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content or '' }}",
)

# Qwen3: thinking of turns before the last question is dropped, and the last has a block always.
QWEN3 = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% set said = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}"
    "{% set thought = m.content.split('</think>')[0] if '</think>' in m.content else '' %}"
    "<think>\n{{ thought.split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ said }}<|im_end|>\n{% endfor %}" + GENERATE
)

# Llama 2, Mistral: blanks around the texts, the model's own end token.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}"
)

# Gemma: the end of a turn is no end token of the model, texts are trimmed, no system.
GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# Phi-3: the model's end token follows the whole conversation.
PHI3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)

# GLM: no end token, the next message begins with one.
GLM = (
    "[gMASK]{% for m in messages %}{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{{ '\n' }}{{ k }}={{ v }}{% endfor %}{{ '\n' }}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)

# gpt-oss: the last answer ends with another token than those before it; thinking is dropped, that
# before a call once there is an answer.
GPT_OSS = (
    "{% set answered = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}"
    "{% for m in messages %}{% if m.role == 'assistant' and m.tool_calls %}"
    "{% if m.thinking and not answered %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant to={{ m.tool_calls[0].function.name }}"
    "<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}"
    "{% if loop.last and m.thinking %}<|start|>assistant<|channel|>analysis<|message|>"
    "{{ m.thinking }}<|end|>{% endif %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)

# DeepSeek-R1: the generation prompt opens a thinking that no answer has; arguments are JSON text.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}<|Assistant|>"
    "{{ m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "{{ '<|call|>' + c.function.arguments + '<|call_end|>' }}{% endfor %}<|end_of_sentence|>"
    "{% elif m.role == 'system' %}{{ m.content }}{% else %}<|User|>{{ m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)

# SmolVLM: content as a list of parts.
PARTS = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}: "
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)

# Without special tokens.
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# A template that rewrites the prompt when a message is added.
COUNTING = "{{ messages | length }}" + CHATML
