"""An open model that answers many tasks of an event loop at once, in one engine."""

import asyncio
import uuid
from typing import Unpack

from jaxrl_llm.config import ConfigError
from jaxrl_llm.evaluation.answer_settings import ChoiceKeys, ChoiceSettings, read_settings
from jaxrl_llm.evaluation.answering import THE_PROMPT, Answer, Messages, OpenModel, read_prompts
from jaxrl_llm.evaluation.serving import serving_engine
from jaxrl_llm.server.jobs import Choice, Jobs
from jaxrl_llm.server.protocol import Asked
from jaxrl_llm.server.worker import Worker
from jaxrl_llm.types import Completion, Prompt

ANY_NUMBER = 2**31  # answers that may be unfinished


class AsyncModel:
    """Answers prompts of many tasks at once.

        async with rl.AsyncModel(model) as answering:
            answers = await asyncio.gather(*map(answering.generate, prompts))

    A prompt that is awaited joins the others in the engine, and leaves when its task is cancelled.
    """

    def __init__(self, model: OpenModel, *, slots: int = 0, context: int = 0) -> None:
        """`slots` answers are generated at once, of `context` tokens with the prompt at most.

        By default they are found, as `OpenModel.serve` does.
        """
        self._tokenizer = model.tokenizer
        engine = serving_engine(
            model.spec,
            model.params,
            model.tokenizer.stop_ids,
            memory=model.memory,
            layout=model.layout,
            context=context,
            slots=slots,
        )
        self._context = engine.settings.max_context
        self._worker = Worker(engine)
        self._jobs = Jobs(self._worker, model.tokenizer, seed=0, most=ANY_NUMBER)

    async def generate(self, prompt: str | Messages, **settings: Unpack[ChoiceKeys]) -> Answer:
        """Answer a prompt as `OpenModel.generate` does, with the same settings and samples.

        Raises: ConfigError for a setting out of bounds, and for a prompt that is too long.
        """
        how = read_settings(ChoiceSettings, settings, "generate")
        (read,) = read_prompts([prompt], self._tokenizer, chat=how.chat, names=[THE_PROMPT])
        if len(read.token_ids) >= self._context:
            raise ConfigError(
                f"the prompt has {len(read.token_ids)} tokens and the context {self._context}; "
                "give a shorter prompt"
            )
        request = uuid.uuid4().bytes
        job = self._jobs.take(self._asked(read, how), request, again=False)
        try:
            await job.wait()
            job.check()
            completions = tuple(map(self._completion, job.choices))
        finally:
            self._jobs.leave(job, request, delivered=True)
        return Answer(prompt=read, completions=completions)

    def _asked(self, prompt: Prompt, how: ChoiceSettings) -> Asked:
        return Asked(
            prompts=(prompt.token_ids,),
            n=how.n,
            limit=how.max_new_tokens,
            temperature=how.temperature,
            top_p=how.top_p,
            top_k=how.top_k,
            min_p=0.0,
            seed=how.seed,
            stop=how.stop,
            stop_ids=self._tokenizer.stop_ids,
            own_stops=bool(how.stop),
            chat=False,
        )

    def _completion(self, choice: Choice) -> Completion:
        """The completion. As in `generate`, a stop string stays in its text."""
        tokens = tuple(choice.tokens)
        ends = tokens and tokens[-1] in self._tokenizer.stop_ids
        return Completion(
            tokens=tokens,
            text=self._tokenizer.decode(tokens[:-1] if ends else tokens),
            logprobs=tuple(choice.logprobs),
            finished=choice.finish_reason == "stop",
        )

    async def __aenter__(self) -> "AsyncModel":
        self._worker.start(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._worker.close()
