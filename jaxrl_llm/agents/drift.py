"""What a program that sends its conversation as text would lose: other ids than the sampled ones.

The rows of this package keep the sampled ids, so drift changes nothing that is trained.
"""

from collections.abc import Sequence

from jaxrl_llm.agents.styles import Message, Style
from jaxrl_llm.agents.trajectory import Drift, Turn

MEASURED = 16  # samples of a step that are rendered again, the first ones


def drift_of(
    style: Style,
    messages: Sequence[Message],
    prompt: Sequence[int],
    response: Sequence[int],
    turns: Sequence[Turn],
) -> Drift | None:
    """The drift of a conversation; None where no template writes it.

    It is the number of ids of the row behind the prefix that it shares with the ids of the whole
    conversation, rendered and encoded again. A turn drifts if it is not whole in that prefix.
    """
    try:
        again = style.again(messages)
    except ValueError:  # the template refuses what was sampled, such as arguments that are no JSON
        again = prompt
    if again is None or not turns:
        return None
    held = [*prompt, *response]
    pairs = zip(held, again, strict=False)
    shared = next((n for n, (one, other) in enumerate(pairs) if one != other), None)
    shared = min(len(held), len(again)) if shared is None else shared
    drifted = sum(len(prompt) + turn.end > shared for turn in turns)
    return Drift(len(turns), drifted, len(held) - shared)
