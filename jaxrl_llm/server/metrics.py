"""The metrics of a server, in the text form that Prometheus reads."""

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from jaxrl_llm.server.worker import Worker

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600)


class Metrics:
    """Counts requests and tokens, and measures times."""

    MEDIA_TYPE = CONTENT_TYPE_LATEST

    def __init__(self, worker: Worker) -> None:
        registry = self._registry = CollectorRegistry()
        self.requests = Counter(
            "jaxrl_requests",
            "Requests by route and HTTP status.",
            ["route", "status"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "jaxrl_prompt_tokens", "Tokens of answered prompts.", registry=registry
        )
        self.sampled_tokens = Counter(
            "jaxrl_sampled_tokens", "Tokens of delivered answers.", registry=registry
        )
        self.first_token = Histogram(
            "jaxrl_first_token_seconds",
            "Time to the first token of a stream.",
            buckets=SECONDS,
            registry=registry,
        )
        self.answer = Histogram(
            "jaxrl_answer_seconds",
            "Time to the end of an answer.",
            buckets=SECONDS,
            registry=registry,
        )
        for name, about, number in (
            ("jaxrl_unfinished_choices", "Choices that are not complete.", "num_unfinished"),
            ("jaxrl_queued_choices", "Choices among them that wait for a slot.", "num_queued"),
            ("jaxrl_free_cache_tokens", "Tokens that fit into the cache.", "num_free_tokens"),
        ):
            gauge = Gauge(name, about, registry=registry)
            gauge.set_function(lambda number=number: getattr(worker, number))

    def text(self) -> bytes:
        """All metrics."""
        return generate_latest(self._registry)
