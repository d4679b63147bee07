"""A language model that was opened to answer prompts, outside of a run."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import jax
import numpy as np

from jaxrl_llm.checkpoint.layout import ModelPath
from jaxrl_llm.config import ConfigError, DType, MeshConfig, ModelSettings
from jaxrl_llm.data.formats import prompt_of
from jaxrl_llm.distributed.device_memory import free_memory
from jaxrl_llm.distributed.layout import Layout, mesh_of
from jaxrl_llm.distributed.sharding import shardings
from jaxrl_llm.evaluation.answer_settings import (
    AnswerKeys,
    AnswerSettings,
    StreamKeys,
    StreamSettings,
    read_settings,
)
from jaxrl_llm.evaluation.serving import serving_engine
from jaxrl_llm.generation.completions import TextStream, completions_of
from jaxrl_llm.generation.engine import generate, generate_on_mesh
from jaxrl_llm.generation.memory import Replica, fitted
from jaxrl_llm.generation.sampler import SamplingParams
from jaxrl_llm.generation.session import Engine, EngineSettings
from jaxrl_llm.generation.settings import GenerationSettings
from jaxrl_llm.generation.stop_strings import START, stop_strings
from jaxrl_llm.learner.train_state import Params
from jaxrl_llm.models.base import ModelSpec, merge_projections, model_spec
from jaxrl_llm.plan.models import find_model, find_tokenizer, spec_of
from jaxrl_llm.plan.roles import make_role
from jaxrl_llm.plan.weights import load_params
from jaxrl_llm.references import shown
from jaxrl_llm.server.settings import ServerKeys, ServerSettings
from jaxrl_llm.tokenizer import Tokenizer, check_vocabulary
from jaxrl_llm.types import Completion, Prompt

if TYPE_CHECKING:  # it needs the packages of the extra `serve`
    from jaxrl_llm.server.listening import Server

FEWEST_TOKENS = 16  # shortest row of prompts; rows have powers of two, so programs are few
STREAMED = 4  # tokens of a streamed piece of an answer

THE_PROMPT = "the prompt"  # name of a single prompt

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]

    @property
    def text(self) -> str:
        """The first completion."""
        return self.completions[0].text


@dataclass(frozen=True, kw_only=True)
class OpenModel:
    """A language model on the first devices, with its tokenizer."""

    spec: ModelSpec
    params: Params
    tokenizer: Tokenizer
    name: str = "model"  # path that it was opened from
    memory: float = 0.0  # bytes of a device for slots and cache; 0: no limit is known
    layout: Layout | None = None  # where devices share the heads; None: one device
    programs: dict[Any, Any] = field(default_factory=dict, repr=False)  # compiled, by their sizes

    def generate(
        self, prompts: str | Iterable[str | Messages], **settings: Unpack[AnswerKeys]
    ) -> list[Answer]:
        """Answer every prompt, with the log-prob of each token.

        A prompt is a text, or a conversation: a list of {"role": ..., "content": ...}.

        Args:
            n: answers to each prompt; default 1.
            seed: the same prompts, `n` and `seed` give the same samples; default 0.
            max_new_tokens: maximum length of an answer; default 256.
            temperature: default 1; 0 is greedy. Log-probs are at this temperature.
            top_p, top_k: nucleus and top-k sampling; the defaults 1.0 and 0 are off. Log-probs are
                over the tokens that they keep, at most 512.
            stop: one string or several. An answer ends with the token that completes one of them.
                The string stays in the answer.
            chat: whether a text becomes a user message; None: if there is a chat template.
            batch_size: prompts in one batch; default 64.

        Raises: ConfigError for a setting out of bounds; ValueError for a prompt that is too long
            for the model, and for unsupported stop strings. Both come before any prompt is
            answered.
        """
        how = read_settings(AnswerSettings, settings, "generate")
        texts = [prompts] if isinstance(prompts, str) else prompts_in(prompts)
        many = len(texts) > 1
        names = [f"prompt {i}" if many else THE_PROMPT for i in range(len(texts))]
        read = read_prompts(texts, self.tokenizer, chat=how.chat, names=names)
        check_lengths(self, read, names)
        return [answer for batch in complete(self, read, how) for answer in batch]

    def stream(self, prompt: str | Messages, **settings: Unpack[StreamKeys]) -> Iterator[str]:
        """Yield the answer to one prompt in pieces, while it is generated.

        It takes the settings of `generate`, without `n` and `batch_size`, and raises the same
        errors.

        Guarantees: in float32 the pieces together are the text that `generate` returns.
        """
        how = read_settings(StreamSettings, settings, "stream")
        (read,) = read_prompts([prompt], self.tokenizer, chat=how.chat, names=[THE_PROMPT])
        check_lengths(self, [read], [THE_PROMPT])
        yield from _stream(self, read, sampling_params(self, how), how.seed)

    def serve(self, **settings: Unpack[ServerKeys]) -> "Server":
        """Serve the model over HTTP with OpenAI's API, in threads, until `close` of the result.

        The result has the `url`, and may be used in a `with`. Requests that give a seed get the
        samples of `generate` with that seed.

        Args:
            host: address to listen on; default 127.0.0.1, which only this machine reaches.
            port: default 8000; 0 takes a free one.
            api_key: key that requests must have; default none.
            seed: seed of requests that give none; default 0.
            slots: answers generated at once; default 256 on a GPU, 8 on a CPU.
            context: most tokens of a prompt and its answer; default as many as fit.
            queue, answer_s, body_mb: limits of unfinished answers, seconds and megabytes.

        Raises: ConfigError for a setting out of bounds and a port in use.
        """
        from jaxrl_llm.server.listening import Server

        how = read_settings(ServerSettings, settings, "serve")
        engine = serving_engine(
            self.spec,
            self.params,
            self.tokenizer.stop_ids,
            memory=self.memory,
            layout=self.layout,
            context=how.context,
            slots=how.slots,
        )
        return Server(engine, self.tokenizer, self.name, engine.settings.max_context, how)


def open_model(
    model: ModelPath, *, dtype: DType = "float32", family: str = "", tensor: int = 1
) -> OpenModel:
    """Load a language model to be computed in `dtype`, its heads split over `tensor` devices.

    Raises: ValueError when it cannot be opened, or its heads cannot be split so.
    """
    settings = ModelSettings(path=model.path, dtype=dtype, param_dtype=dtype, family=family)
    source = find_model(settings, context=1)  # `complete` knows the length
    tokenizer = find_tokenizer("", settings)
    check_vocabulary(tokenizer, source.config.vocab_size)
    sizes, heads = MeshConfig(tensor=tensor), source.config.num_kv_heads
    mesh = mesh_of(sizes, [heads], devices=jax.local_devices()[:tensor])
    role = make_role("actor", spec_of(source, "causal_lm", settings), settings, mesh)
    spec, params, layout = role.spec, load_params(role, source, seed=0), None
    if tensor == 1:
        spec, params = _merged(spec, params)
    else:
        layout = role.generation
        params = jax.device_put(params, shardings(spec.axes, spec.params, mesh, layout.rules))
    leaves = jax.tree.leaves(params)
    held = sum(x.addressable_shards[0].data.nbytes for x in leaves)
    return OpenModel(
        spec=spec,
        params=params,
        tokenizer=tokenizer,
        name=model.path,
        memory=free_memory(held),
        layout=layout,
    )


def _merged(spec: ModelSpec, params: Params) -> tuple[ModelSpec, Params]:
    """The model in the form that generation reads: no call and no engine makes a copy of it."""
    merge = jax.jit(lambda params: merge_projections(spec, params)[1], donate_argnums=0)
    with warnings.catch_warnings():  # the parts of a merged projection have no use
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        params = merge(params)
    return model_spec(spec.config, spec.kind, spec.dtype, form="merged"), params


def sampling_params(model: OpenModel, how: StreamSettings) -> SamplingParams:
    """The sampling of a model; an answer ends with the token that completes a stop string.

    ValueError for a stop string that the tokenizer cannot have.
    """
    return SamplingParams(
        max_new_tokens=how.max_new_tokens,
        temperature=how.temperature,
        top_k=how.top_k,
        top_p=how.top_p,
        stop_strings=stop_strings(how.stop, model.tokenizer),
    )


def prompts_in(prompts: Iterable[Any]) -> list[Any]:
    """A list of texts or conversations. ConfigError for one conversation in place of a list."""
    listed = list(prompts)
    if listed and all(isinstance(prompt, Mapping) for prompt in listed):
        raise ConfigError("one conversation is given as all prompts: give a list of it, [messages]")
    return listed


def read_prompts(
    prompts: Sequence[str | Messages],
    tokenizer: Tokenizer,
    *,
    chat: bool | None = None,
    names: Sequence[str],
) -> list[Prompt]:
    """Each prompt as `read_prompt` reads it. ConfigError names the one that cannot be read."""
    read = []
    for name, prompt in zip(names, prompts, strict=True):
        try:
            read.append(read_prompt(prompt, tokenizer, chat=chat))
        except ValueError as error:
            where = "" if name == THE_PROMPT else f"{name}: "
            raise ConfigError(f"{where}{error}") from None
    return read


def check_lengths(model: OpenModel, prompts: Sequence[Prompt], names: Sequence[str]) -> None:
    """Raises: ConfigError that names the first prompt that leaves no position of the model."""
    positions = model.spec.config.max_position_embeddings
    for name, prompt in zip(names, prompts, strict=True):
        if len(prompt.token_ids) >= positions:
            raise ConfigError(
                f"{name} has {len(prompt.token_ids)} tokens and the model {positions} positions; "
                "give a shorter prompt"
            )


def read_prompt(
    prompt: str | Messages, tokenizer: Tokenizer, *, chat: bool | None = None
) -> Prompt:
    """A conversation, or a text as a plain string or as a user's message.

    `chat` None makes a text a message where the tokenizer has a template. ConfigError for others.
    """
    messages = prompt if isinstance(prompt, list | tuple) else ()
    if not isinstance(prompt, str) and not (messages and all(map(_is_message, messages))):
        raise ConfigError(
            f"the prompt {shown(prompt)} is neither a text nor a list of "
            '{"role": ..., "content": ...}'
        )
    if isinstance(prompt, str):
        chat = tokenizer.has_chat_template if chat is None else chat
        content: Any = [{"role": "user", "content": prompt}] if chat else prompt
    else:
        content = [dict(message) for message in prompt]
    return prompt_of({"prompt": content}, "prompt", tokenizer, data_source="prompt", index=0)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and {"role", "content"} <= set(value)


def complete(
    model: OpenModel, prompts: Sequence[Prompt], how: AnswerSettings
) -> Iterator[list[Answer]]:
    """`how.n` completions of each prompt, a batch at a time.

    An answer also ends with the tokenizer's stop ids, and where the model has no more positions.
    Sample i of the first prompt is the same whatever `n` is.

    Requires: each prompt leaves a position (`check_lengths`).
    """
    sampling = _for_model(model, prompts, sampling_params(model, how))
    rows, longest = min(how.batch_size, len(prompts)), _longest(model, prompts, sampling)
    for first in range(0, len(prompts), how.batch_size):
        yield _answer_batch(
            model,
            _Batch(
                prompts=prompts[first : first + how.batch_size],
                sampling=sampling,
                n=how.n,
                seed=how.seed,
                first=first * how.n,
                rows=rows,
                longest=longest,
            ),
        )


def _for_model(
    model: OpenModel, prompts: Sequence[Prompt], sampling: SamplingParams
) -> SamplingParams:
    """`sampling` with the tokenizer's stop ids, and a limit that the shortest prompt leaves."""
    positions = model.spec.config.max_position_embeddings
    shortest = min((len(prompt.token_ids) for prompt in prompts), default=0)
    limit = min(sampling.max_new_tokens, positions - shortest)
    return replace(sampling, stop_token_ids=model.tokenizer.stop_ids, max_new_tokens=limit)


def _longest(model: OpenModel, prompts: Sequence[Prompt], sampling: SamplingParams) -> int:
    """Tokens of the longest row and its answer. Rope may depend on it, so all batches share it."""
    positions = model.spec.config.max_position_embeddings
    lengths = (len(prompt.token_ids) for prompt in prompts)
    return max((min(x + sampling.max_new_tokens, positions) for x in lengths), default=0)


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Prompts that one program answers."""

    prompts: Sequence[Prompt]
    sampling: SamplingParams
    seed: int
    n: int = 1  # samples of each prompt
    first: int = 0  # samples before these, of other batches
    rows: int = 1  # rows of the program; a last batch may have fewer prompts
    longest: int  # tokens of the longest row and its answer, of all batches


def _answer_batch(model: OpenModel, batch: _Batch) -> list[Answer]:
    how, arguments = _arguments(model, batch)
    out = jax.device_get(_program(model, how)(model.params, *arguments))
    completions = completions_of(
        model.tokenizer, batch.sampling.stops, out.tokens, out.lengths, out.logprobs
    )
    return [
        Answer(prompt=prompt, completions=tuple(completions[row * batch.n : (row + 1) * batch.n]))
        for row, prompt in enumerate(batch.prompts)
    ]


def _stream(model: OpenModel, prompt: Prompt, sampling: SamplingParams, seed: int) -> Iterator[str]:
    """The text of one answer in pieces of a few tokens."""
    sampling, strings = _for_model(model, [prompt], sampling), sampling.stop_strings
    longest = _longest(model, [prompt], sampling)
    context = row_width(longest, model.spec.config.max_position_embeddings)
    engine = Engine(
        _spec(model, longest),
        model.params,
        EngineSettings(
            max_context=context,
            num_slots=1,
            cache_tokens=context,
            stop_ids=sampling.stop_token_ids,
            # Settings are static, and programs few.
            sampling=replace(sampling, max_new_tokens=context),
            steps=STREAMED,
            in_generation_form=True,
        ),
        model.layout,
    )
    key = np.asarray(jax.random.key_data(jax.random.key(seed)))
    limit = longest - len(prompt.token_ids)
    sequence = engine.add(prompt.token_ids, limit=limit, seed_key=key, sample_id=0)
    text, given, stop_state = TextStream(model.tokenizer), 0, START
    while engine.has_work:
        engine.step()
        ids = sequence.response[given:]
        given += len(ids)
        if strings is not None:
            for place, token in enumerate(ids):
                stop_state = strings.after(stop_state, token)
                if stop_state == strings.complete:
                    engine.abort(sequence)
                    ids = ids[: place + 1]
                    break
        if ids and ids[-1] in sampling.stop_token_ids:
            ids = ids[:-1]
        piece = text.add(ids) + ("" if engine.has_work else text.end())
        if piece:
            yield piece


class _How(NamedTuple):
    """The sizes and settings of a compiled program."""

    shape: tuple[int, ...]  # shape of the prompts
    settings: GenerationSettings
    longest: int  # tokens of a row and its answer


def _arguments(model: OpenModel, batch: _Batch) -> tuple[_How, tuple[Any, ...]]:
    """The arguments of the engine, in rows of which the last may be empty."""
    n, rows, prompts = batch.n, batch.rows, batch.prompts
    lengths = np.zeros(rows, np.int32)
    lengths[: len(prompts)] = [len(prompt.token_ids) for prompt in prompts]
    positions = model.spec.config.max_position_embeddings
    limits = np.clip(positions - lengths, 1, batch.sampling.max_new_tokens)
    tokens = np.zeros((rows, row_width(int(lengths.max()), positions)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt.token_ids)] = prompt.token_ids
    settings = GenerationSettings(sampling=batch.sampling, group=n, pad_id=model.tokenizer.pad_id)
    replica = Replica(
        config=model.spec.config,
        dtype=model.spec.dtype,
        tensor=1 if model.layout is None else model.layout.mesh.size,
        samples=rows * n,
        width=tokens.shape[1],
    )
    settings = fitted(settings, replica, model.memory)
    return _How(tokens.shape, settings, batch.longest), (
        np.repeat(tokens, n, axis=0),
        np.repeat(lengths, n),
        batch.first + np.arange(rows * n, dtype=np.uint32),
        jax.random.key(batch.seed),
        np.repeat(limits, n),
    )


def row_width(length: int, positions: int) -> int:
    """Tokens of a row for prompts of this length: a power of two, or all positions."""
    return min(max(FEWEST_TOKENS, 1 << (length - 1).bit_length()), positions)


def _program(model: OpenModel, how: _How) -> Callable[..., Any]:
    """`generate`, compiled for these sizes."""
    spec = _spec(model, how.longest)
    key = (how.shape, how.settings, spec.config)
    if key not in model.programs:

        def run(
            params: Params, prompts: Any, lengths: Any, samples: Any, seed: Any, limits: Any
        ) -> Any:
            arguments = (prompts, lengths, samples, seed, how.settings)
            if model.layout is None:
                return generate(spec, params, *arguments, limits_N=limits)
            layout = model.layout
            return generate_on_mesh(spec, params, *arguments, limits_N=limits, layout=layout)

        model.programs[key] = jax.jit(run)
    return model.programs[key]


def _spec(model: OpenModel, longest: int) -> ModelSpec:
    """The model for rows of `longest` tokens, on which rope may depend."""
    config = model.spec.config.for_context(longest)
    return model_spec(config, dtype=model.spec.dtype, form=model.spec.form)
