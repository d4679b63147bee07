"""A planted fault: the loss falls on observed tokens too. docs/agents.md has what it costs.

python tests/observed_in_loss.py --config=configs/agent.py

Flags are as for scripts/train.py.
"""

from typing import Any

from jaxrl_llm.agents.conversation import Append, Conversation
from jaxrl_llm.launch.main import run

append = Conversation._append


def counts_as_sampled(self: Conversation, ids: list[int], messages: Any) -> Any:
    """`Conversation._append` with mask 1."""
    result = append(self, ids, messages)
    if isinstance(result, Append):
        self.mask[len(self.mask) - len(ids) :] = [1] * len(ids)
    return result


if __name__ == "__main__":
    Conversation._append = counts_as_sampled
    run("train")
