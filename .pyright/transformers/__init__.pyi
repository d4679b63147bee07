"""For pyright alone: the names that we import.

Reading the package itself, which imports hundreds of models, took two fifths of its CPU time.
"""

from typing import Any

AutoConfig: Any
AutoModelForCausalLM: Any
AutoTokenizer: Any
PreTrainedTokenizerFast: Any
TrainerCallback: Any
