"""TRL's trainers: the values of our keys that take several of TRL's."""

from pathlib import Path
from typing import Any

from jaxrl_llm.config import ConfigError
from jaxrl_llm.convert.conversion import Dialect
from jaxrl_llm.convert.rules import Source, many
from jaxrl_llm.convert.trl_keys import TABLE
from jaxrl_llm.convert.trl_sizes import ONLINE, set_sizes, set_steps
from jaxrl_llm.references import is_file, is_folder

THINK = r"(?s)<think>(?!.*<think>).*</think>.*"
REWARDS: dict[str, dict[str, Any]] = {
    "accuracy_reward": {"kind": "math_answer"},
    "reasoning_accuracy_reward": {"kind": "math_answer"},
    "think_format_reward": {"kind": "format_match", "pattern": THINK},
    "get_soft_overlong_punishment": {
        "kind": "overlong_penalty",
        "max_length": 1280,
        "buffer": 256,
    },
}
NEVER_CLIPS = 1e9  # TRL has no bound on the ratio where the advantage is negative
AGGREGATIONS = {
    "grpo": "seq-mean-token-mean",
    "bnpo": "token-mean",
    "dapo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}
FORMS = ("sigmoid", "robust", "ipo", "hinge", "sigmoid_norm")


def _set_algorithm(source: Source, values: dict[str, Any]) -> None:
    kinds = {"reward": "reward_model", "rloo": "rloo"}
    values["algorithm.kind"] = kinds.get(source.trainer, source.trainer)
    if source.trainer == "grpo":
        _set_grpo(source, values)
    elif source.trainer == "rloo":
        # Without a ratio to clip, the gradient of a sequence is the sum of its tokens'.
        values["algorithm.loss_aggregation"] = "seq-mean-token-sum"
        values["algorithm.clip_c"] = NEVER_CLIPS
    elif source.trainer == "ppo":
        values["algorithm.clip_c"] = NEVER_CLIPS
    elif source.trainer == "dpo":
        _set_dpo(source, values)
    elif source.trainer == "cpo":
        _set_cpo(source, values)
    elif source.trainer == "kto" and source.get("loss_type") not in (None, "kto"):
        raise ConfigError(f"loss_type={source.get('loss_type')}: KTO's loss is kto here")


def _set_grpo(source: Source, values: dict[str, Any]) -> None:
    loss = str(source.get("loss_type"))
    scale = source.get("scale_rewards")
    values["algorithm.norm_adv_by_std"] = scale in ("group", "batch", True)
    if source.get("multi_objective_aggregation") == "normalize_then_sum":
        values["algorithm.kind"] = "gdpo"
        values["algorithm.norm_adv_by_std"] = True  # TRL scales each reward by its group
    elif source.get("importance_sampling_level") == "sequence":
        values["algorithm.kind"] = "gspo"
    elif loss in ("cispo", "sapo"):
        values["algorithm.kind"] = loss
    if scale == "batch" and values["algorithm.kind"] != "gdpo":
        values["algorithm.std_of"] = "batch"
    if loss in AGGREGATIONS:
        values["algorithm.loss_aggregation"] = AGGREGATIONS[loss]
    elif loss not in ("cispo", "sapo"):
        raise ConfigError(
            f"loss_type={loss} has no counterpart; {', '.join(AGGREGATIONS)}, cispo and sapo have"
        )
    if loss == "cispo":
        values["algorithm.clip_low"] = 1.0  # TRL bounds the weight from above alone
        bound = source.number("epsilon_high") or source.number("epsilon")
        if bound < 1:
            raise ConfigError(
                f"epsilon_high={bound:g} bounds the weights of CISPO below 1; 5 works"
            )
        values["algorithm.clip_high"] = bound - 1.0
    if loss == "dr_grpo":
        values["algorithm.loss_scale"] = source.whole("max_completion_length")
    values.setdefault("algorithm.clip_c", NEVER_CLIPS)


def _set_dpo(source: Source, values: dict[str, Any]) -> None:
    losses = [str(name) for name in many(source.get("loss_type"))]
    weights = [float(weight) for weight in many(source.get("loss_weights"))] or [1.0] * len(losses)
    parts = dict(zip(losses, weights, strict=False))
    supervised = parts.pop("sft", 0.0)
    (form, weight), *others = parts.items() or [("", 0.0)]
    if others or form not in FORMS or not weight:
        raise ConfigError(
            f"loss_type={' '.join(losses)} has no counterpart: one of {', '.join(FORMS)}, alone or "
            "with sft"
        )
    values["algorithm.form"] = form
    if supervised:
        values["algorithm.sft_coef"] = supervised / weight


def _set_cpo(source: Source, values: dict[str, Any]) -> None:
    loss, share = str(source.get("loss_type")), float(source.number("cpo_alpha"))
    if loss == "simpo":
        values["algorithm.kind"] = "simpo"
        values["algorithm.gamma"] = float(source.number("simpo_gamma"))
        values["algorithm.sft_coef"] = share
    elif loss in ("sigmoid", "ipo", "hinge"):
        values["algorithm.form"] = loss
        values["algorithm.cpo_alpha"] = share
    else:
        raise ConfigError(f"loss_type={loss} has no counterpart; sigmoid, hinge, ipo, simpo have")


def _set_data(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    name = source.get("dataset_name")
    if not name:
        notes.append("data.train_files: the script names its data set itself; set it")
        return
    config = source.get("dataset_config")
    path = f"{name}/{config}" if config else str(name)
    here = Path(str(name)).expanduser()
    if is_file(here):
        values["data.train_files"] = [str(here)]
        return
    place = str(here) if is_folder(here) else f"hf://{path}"
    values["data.train_files"] = [f"{place}#{source.get('dataset_train_split')}"]
    if source.get("eval_strategy") != "no":
        values["data.val_files"] = [f"{place}#{source.get('dataset_test_split')}"]


def _set_lengths(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    if source.trainer in (*ONLINE, "ppo"):
        notes.append(
            "data.max_prompt_length: TRL has no limit; ours is "
            f"{values.get('data.max_prompt_length', 512)} tokens, and a longer prompt is an error"
        )
        return
    longest = source.whole("max_seq_length", "max_length")
    response = values.get("data.max_response_length") or longest - longest // 2
    if not isinstance(response, int):
        raise ConfigError(f"response_length={response}: expected a number of tokens")
    values["data.max_response_length"] = response
    values.setdefault("data.max_prompt_length", max(longest - response, 1))  # the sum counts
    if source.trainer == "sft":
        notes.append("the loss is on completions, or on the assistant's turns of `messages`")


def _set_rewards(source: Source, values: dict[str, Any], notes: list[str]) -> None:
    functions: list[Any] = []
    for name in many(source.get("reward_funcs")):
        if name in REWARDS:
            functions.append(REWARDS[name])
        elif "." in str(name):
            module, _, function = str(name).rpartition(".")
            functions.append({"kind": "custom", "path": f"{module}:{function}"})
        else:
            raise ConfigError(f"reward_funcs={name}: give a path such as my_rewards.{name}")
    if not functions and not values.get("reward.model.path"):
        functions = [{"kind": "exact_answer"}]
        notes.append(
            "reward.functions: the script has its own reward; exact_answer stands in. Name yours: "
            "my_rewards.py:my_function (docs/write-a-reward.md)"
        )
    values["reward.functions"] = functions
    if functions and functions[0]["kind"] != "overlong_penalty":
        values["validation.grader"] = functions[0]
    if values.get("reward.model.path"):
        values["reward.model.dtype"] = "bfloat16"
    if source.trainer == "ppo":
        values["critic.path"] = values.get("reward.model.path", "")
        for key in ("learning_rate", "schedule", "weight_decay"):
            values[f"critic.optimizer.{key}"] = values[f"actor.optimizer.{key}"]
        values |= {"critic.dtype": values["actor.dtype"], "critic.remat": values["actor.remat"]}


def finish(source: Source, values: dict[str, Any]) -> list[str]:
    """Values that need several of TRL's keys; notes about them."""
    notes: list[str] = []
    _set_algorithm(source, values)
    _set_data(source, values, notes)
    each = set_sizes(source, values, notes)
    set_steps(source, values, notes, each)
    if source.trainer == "rloo" and each > 1:
        notes.append("algorithm: TRL clips the ratio of a response, `rloo` the ratio of each token")
    _set_lengths(source, values, notes)
    if source.trainer in (*ONLINE, "ppo"):
        _set_rewards(source, values, notes)
    if source.get("use_peft"):
        values.setdefault("actor.lora.rank", source.whole("lora_r"))
    if "actor.path" not in values:
        raise ConfigError("model_name_or_path is missing: give it")
    return notes


TRL = Dialect(table=TABLE, finish=finish)
