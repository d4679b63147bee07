"""TRL's own scripts: nearly all keys are known, sizes and schedules are those worked out here."""

import pytest
from example_commands import TRL, from_trl, words_of

from jaxrl_llm import config as c
from jaxrl_llm.convert.conversion import Conversion
from jaxrl_llm.convert.rules import NoCounterpart
from jaxrl_llm.convert.trl_command import convert_trl

GRPO = "trl grpo --model_name_or_path Qwen/Qwen3-8B --dataset_name trl-lib/tldr "
KNOWN = [example for example in TRL if not example["name"].endswith("/sft.py")]


def converted(command: str, rows: int = 0, devices: int = 0) -> Conversion:
    return convert_trl(command.split(), rows=rows, devices=devices)


@pytest.mark.parametrize("example", KNOWN, ids=lambda e: e["name"])
def test_nine_of_ten_keys_of_an_example_are_known(example):
    found = convert_trl(words_of(example), rows=10_000, devices=8)
    _, words = example["command"].split(".py", 1)  # the launcher's own stand before
    assert len(found.keys) == words.count(" --")
    open_keys = [k.key for k in found.of_kind(NoCounterpart)]
    assert len(open_keys) <= 0.1 * len(found.keys), open_keys


def test_what_is_open_in_the_sft_script():
    """Two of its twelve keys; nine of ten over all scripts are known."""
    found = from_trl("scripts/sft.py", rows=10_000)
    assert [k.key for k in found.of_kind(NoCounterpart)] == ["eos_token", "push_to_hub"]
    every = [convert_trl(words_of(example), rows=10_000, devices=8) for example in TRL]
    open_keys = sum(len(f.of_kind(NoCounterpart)) for f in every)
    assert open_keys <= 0.1 * sum(len(f.keys) for f in every)


def test_dpo():
    config = from_trl("scripts/dpo.py").config
    assert config.algorithm == c.DPO(beta=0.1)
    assert (config.data.train_batch_size, config.actor.micro_batch_size) == (16, 2)
    assert (config.total_steps, config.save_every, config.validation.every) == (1000, 500, 50)
    assert config.data.train_files == ("hf://trl-lib/ultrafeedback_binarized#train",)
    assert config.data.val_files == ("hf://trl-lib/ultrafeedback_binarized#test",)
    # TRL's defaults: a linear schedule to 0, no weight decay.
    assert config.actor.optimizer == c.OptimizerConfig(
        learning_rate=5e-7, schedule="linear", weight_decay=0.0
    )
    assert (config.actor.dtype, config.seed) == ("bfloat16", 42)


def test_kto_with_a_warm_up_that_is_a_share():
    config = from_trl("trl/scripts/kto.py", rows=14_000).config
    assert isinstance(config.algorithm, c.KTO)
    assert config.total_steps == 875
    assert config.actor.optimizer.warmup_steps == 88  # 10 % of 875, rounded up
    assert config.actor.optimizer.schedule == "cosine"
    assert config.validation.every == 0  # eval_steps without eval_strategy evaluates nothing


def test_gspo_on_eight_processes():
    config = from_trl("scripts/gspo.py", devices=8, rows=10_000).config
    assert isinstance(config.algorithm, c.GSPO)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.0003, 0.0004)
    assert not config.algorithm.use_kl_loss
    # 8 × 8 × 8 completions a generation, 8 × 8 × 2 an optimizer step, 8 a prompt.
    assert config.data.train_batch_size == 64
    assert (config.actor.ppo_mini_batch_size, config.actor.micro_batch_size) == (16, 8)
    assert config.actor.shuffle  # TRL deals a generation out at random
    assert config.mesh.fsdp == 8
    assert config.actor.lora == c.LoraConfig(
        rank=16, alpha=32.0, dropout=0.05, targets=("q_proj", "v_proj")
    )
    assert config.total_steps == 469  # 3 epochs of 10,000 rows
    assert config.save_every == 125  # 500 optimizer steps, 4 an iteration


def test_ppo_reads_the_policy_from_sft_model_path():
    config = from_trl("ppo/ppo_tldr.py").config
    assert isinstance(config.algorithm, c.PPO)
    assert config.actor.path == "cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr"
    assert config.critic.path == "cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr"
    assert config.reward.model is not None and config.reward.model.path == config.critic.path
    assert config.data.tokenizer == "EleutherAI/pythia-1b-deduped"
    assert (config.total_steps, config.data.train_batch_size) == (469, 64)  # 30,000 / 64
    assert (config.actor.ppo_epochs, config.critic.ppo_epochs) == (4, 4)
    assert (config.algorithm.lam, config.algorithm.kl_coef) == (0.95, 0.05)
    assert config.critic.optimizer == config.actor.optimizer
    assert (config.rollout.temperature, config.data.max_response_length) == (0.7, 53)


@pytest.mark.parametrize(
    ("words", "algorithm"),
    [
        ("", {"loss_aggregation": "token-mean", "use_kl_loss": False, "norm_adv_by_std": True}),
        ("--beta 0.04", {"use_kl_loss": True, "kl_loss_coef": 0.04}),
        ("--beta 0.04", {"kl_loss_type": "k3_unclamped"}),
        ("--beta 0.04", {"kl_loss_unbiased": True}),  # TRL's default
        ("--beta 0.04 --use_bias_correction_kl false", {"kl_loss_unbiased": False}),
        ("--off_policy_mask_threshold 0.2", {"off_policy_mask": 0.2}),
        ("--scale_rewards none", {"norm_adv_by_std": False}),
        ("--scale_rewards batch", {"norm_adv_by_std": True, "std_of": "batch"}),
        ("--scale_rewards batch --loss_type cispo --epsilon_high 5", {"std_of": "batch"}),
        # TRL then scales each reward by its group, whatever scale_rewards says.
        (
            "--multi_objective_aggregation normalize_then_sum --scale_rewards none",
            {"kind": "gdpo", "norm_adv_by_std": True},
        ),
        ("--loss_type dr_grpo", {"loss_aggregation": "seq-mean-token-sum-norm", "loss_scale": 512}),
        ("--loss_type bnpo --epsilon_high 0.3", {"clip_low": 0.2, "clip_high": 0.3}),
        ("--delta 2.5", {"clip_c": 2.5}),
        ("--loss_type cispo --epsilon_high 5", {"kind": "cispo", "clip_high": 4.0}),
    ],
)
def test_losses_of_grpo(words, algorithm):
    found = converted(GRPO + words).config.algorithm
    assert {name: getattr(found, name) for name in algorithm} == algorithm


def test_a_reference_that_follows():
    words = GRPO + "--sync_ref_model true --ref_model_sync_steps 8 --num_iterations 4"
    assert converted(words).config.reference == c.ReferenceConfig(refresh_every=2, mixup_alpha=0.6)
    once = converted(words.replace("8", "9") + " --ref_model_mixup_alpha 1")
    assert once.config.reference == c.ReferenceConfig(refresh_every=2)
    assert any("ref_model_sync_steps=9 became 8" in note for note in once.notes)
    assert converted(GRPO + "--ref_model_sync_steps 8").config.reference == c.ReferenceConfig()


def test_a_float32_head():
    assert converted(GRPO + "--cast_lm_head_to_fp32 true").config.actor.head_dtype == "float32"
    assert converted(GRPO).config.actor.head_dtype == ""


def test_iterations_are_epochs_and_steps_count_updates():
    found = converted(GRPO + "--num_iterations 2 --max_steps 100 --num_processes 4")
    config = found.config
    assert (config.actor.ppo_epochs, config.total_steps, config.mesh.fsdp) == (2, 50, 4)
    assert config.data.train_batch_size == 4  # 8 × 4 completions, 8 a prompt
    assert [k.key for k in found.keys if k.key == "num_processes"] == []


def test_rewards_by_name_and_by_path():
    names = "--reward_funcs accuracy_reward get_soft_overlong_punishment my_lib.rewards.mine"
    config = converted(GRPO + names).config
    assert config.reward.functions == (
        c.MathAnswer(),
        c.OverlongPenalty(max_length=1280, buffer=256),
        c.Custom(path="my_lib.rewards:mine"),
    )


def test_simpo_is_a_loss_of_cpo():
    words = "--loss_type simpo --beta 2 --simpo_gamma 1.5 --cpo_alpha 0"
    found = converted(f"python cpo.py --model_name_or_path a/b --dataset_name c/d {words}")
    assert found.config.algorithm == c.SimPO(beta=2.0, gamma=1.5)


def test_two_losses_of_dpo_are_a_sum():
    words = "--loss_type sigmoid sft --loss_weights 2 1"
    found = converted(f"trl dpo --model_name_or_path a/b --dataset_name c/d {words}")
    assert found.config.algorithm == c.DPO(sft_coef=0.5)


def test_a_yaml_file_gives_keys_that_the_line_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: a/b\ndataset_name: c/d\nlearning_rate: 1e-4\nbeta: 0.5\n")
    config = converted(f"trl dpo --config {file} --beta 0.2").config
    assert isinstance(config.algorithm, c.DPO) and config.algorithm.beta == 0.2
    assert config.actor.optimizer.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("trl gkd --beta 1", "TRL's gkd has no counterpart"),
        ("python scripts/grpo_vlm.py --beta 1", "TRL's grpo_vlm has no counterpart"),
        ("trl dpo --beta 1", "model_name_or_path is missing"),
        (GRPO + "--loss_type vespo", "loss_type=vespo has no counterpart"),
        (GRPO + "--num_generations 3", "8 completions a generation are no whole groups"),
        (GRPO + "--reward_funcs mine", "give a path such as my_rewards.mine"),
        (GRPO + "--logging_steps often", "logging_steps=often: cannot be read"),
        ("trl dpo words", "'words' has no key before it"),
        ("make run", "it has no command of TRL"),
    ],
)
def test_bad_input_names_the_remedy(command, message):
    with pytest.raises(c.ConfigError) as error:
        converted(command)
    assert message in str(error.value)


def test_a_typo_gets_the_nearest_key():
    (unknown,) = converted(GRPO + "--learnin_rate 1e-5").of_kind(NoCounterpart)
    assert unknown.answer == NoCounterpart("not known here; did you mean learning_rate?")
