"""verl's own examples: nearly all keys are known, sizes and schedules are those worked out here."""

import pytest
from example_commands import VERL, VERSIONS, from_verl, words_of

from jaxrl_llm import config as c
from jaxrl_llm.convert.conversion import Conversion
from jaxrl_llm.convert.rules import NoCounterpart, NotNeeded
from jaxrl_llm.convert.verl_command import convert_verl

MOST_OPEN = 0.1  # share of keys
RL = "python3 -m verl.trainer.main_ppo data.train_files=gsm8k.parquet "
MODEL = "actor_rollout_ref.model.path=Qwen/Qwen3-8B "


def converted(more: str = "", rows: int = 0, devices: int = 0) -> Conversion:
    return convert_verl((RL + MODEL + more).split(), rows=rows, devices=devices)


@pytest.mark.parametrize("example", VERL, ids=lambda e: e["name"])
def test_nine_of_ten_keys_of_an_example_are_known(example):
    found = convert_verl(words_of(example), rows=7473)
    words = words_of(example)
    assert len(found.keys) == len(words[words.index("-m") + 2 :])
    open_keys = [k.key for k in found.of_kind(NoCounterpart)]
    assert len(open_keys) <= MOST_OPEN * len(found.keys), open_keys


def test_the_examples_are_as_many_as_the_page_says():
    assert len(VERL) == 24
    assert {example["commit"] for example in VERL} == set(VERSIONS)


def test_ppo_with_a_critic():
    config = from_verl("ppo_trainer/run_deepseek7b_llm", rows=7473).config
    assert config.algorithm == c.PPO()
    assert config.total_steps == 7 * 15  # whole batches of 1,024 prompts, 15 epochs
    assert config.mesh == c.MeshConfig(fsdp=8, generation=c.PhaseMeshConfig(tensor=4))
    assert config.data.train_batch_size == 1024
    assert (config.actor.ppo_mini_batch_size, config.actor.micro_batch_size) == (256, 16)
    assert config.actor.optimizer == c.OptimizerConfig(learning_rate=1e-6)
    assert config.critic.optimizer == c.OptimizerConfig(learning_rate=1e-5)
    assert (config.critic.micro_batch_size, config.critic.path) == (32, "")
    assert (config.actor.dtype, config.critic.dtype) == ("bfloat16", "bfloat16")
    assert config.rollout.n == 1
    assert (config.save_every, config.validation.every) == (20, 1)
    assert config.reward.functions == (c.GSM8K(),)
    assert config.log.trackers == ("wandb",)


def test_dapo_on_64_devices():
    config = from_verl("gmpo_trainer/test_dapo_7b_math").config
    # 64 devices: sequences of 4, shards of 32, so two replicas of the weights.
    axes = {"data": 2, "pipeline": 1, "fsdp": 8, "expert": 1, "sequence": 4, "tensor": 1}
    assert config.mesh.sizes == axes
    assert config.mesh.generation.tensor == 4
    # verl counts tokens a device, and four devices share a row.
    assert config.actor.micro_batch_tokens == (2048 + 8192) * 2 * 4
    # Its warm-up counts iterations, ours optimizer steps: 512 / 32 an iteration.
    assert config.actor.optimizer.warmup_steps == 10 * 16
    assert config.actor.optimizer.offload and config.actor.optimizer.weight_decay == 0.1
    assert config.total_steps == 200
    assert isinstance(config.algorithm, c.GMPO)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.4, 0.4)
    # verl's geo_mean is a mean over responses, whatever loss_agg_mode says.
    assert config.algorithm.loss_aggregation == "seq-mean-token-mean"
    assert config.reward.functions[-1] == c.OverlongPenalty(max_length=8192, buffer=4096)
    assert (config.validation.temperature, config.validation.top_p) == (1.0, 0.7)


def test_gspo_with_a_warm_up_by_ratio():
    config = from_verl("gspo_trainer/test_gspo_3b_math").config
    assert config.algorithm == c.GSPO(kl_coef=0.0, kl_loss_coef=0.0)
    assert config.actor.optimizer.warmup_steps == 25 * 4  # 5 % of 500, 512 / 128 updates each
    assert (config.rollout.n, config.rollout.top_k) == (16, 0)
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 8192)
    assert not config.validation.before_train and config.log.num_samples == 2


def test_a_reward_model_and_both_warm_ups():
    found = from_verl("ppo_trainer/run_qwen2-7b_rm", rows=14_973)
    config = found.config
    assert config.reward.model is not None and config.reward.functions == ()
    assert config.reward.model.path == "/home/user/models/FsfairX-LLaMA3-RM-v0.1"
    assert config.total_steps == 14 * 15
    assert config.actor.optimizer.warmup_steps == 21 * 4
    assert config.critic.optimizer.warmup_steps == 10 * 4
    assert any("=/home/user/models/Qwen2-7B-Instruct: " in fault for fault in found.missing)


def test_grpo_of_the_newest_version():
    config = from_verl("grpo_trainer/run_qwen3_8b_fsdp").config
    assert config.algorithm == c.GRPO()
    assert config.rollout.n == 5
    assert config.actor.micro_batch_tokens == 24576
    assert config.name == "qwen3_8b_grpo_vllm_fsdp"
    grader = c.SourceGrader(source="openai/gsm8k", grader=c.GSM8K())
    assert config.validation.graders == (grader,)


def test_megatron_sizes_are_axes_of_the_mesh():
    more = "actor_rollout_ref.actor.megatron.{}_model_parallel_size={} "
    megatron = more.format("tensor", 2) + more.format("pipeline", 2)
    found = converted(megatron + "trainer.nnodes=2 actor_rollout_ref.rollout.n=4")
    axes = {"data": 1, "pipeline": 2, "fsdp": 4, "expert": 1, "sequence": 1, "tensor": 2}
    assert found.config.mesh.sizes == axes
    with pytest.raises(c.ConfigError, match="8 devices .* are no multiple of tensor 3"):
        converted(more.format("tensor", 3))


def test_sft_of_the_newest_version():
    config = from_verl("sft/gsm8k/run_qwen2_5_0_5b_fsdp").config
    assert config.algorithm == c.SFT()
    assert config.mesh.num_devices == 8
    assert config.data.max_row_length == 1024


def test_the_clip_of_dppo_bounds_a_divergence():
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode=dppo_kl "
    ends = "actor_rollout_ref.actor.clip_ratio_low=0.05 actor_rollout_ref.actor.clip_ratio_high=0.1"
    found = converted("algorithm.adv_estimator=grpo " + loss + ends).config.algorithm
    # verl's own default of the bound on the ratio, 3, and not the paper's.
    assert found == c.DPPOKL(divergence_low=0.05, divergence_high=0.1, clip_c=3.0)


def test_rollout_correction_without_a_ratio_is_policy_gradient():
    found = from_verl("rollout_correction/run_qwen2_5_7b_fsdp").config.algorithm
    assert isinstance(found, c.Pair) and found.loss_mode == "gpg"
    assert found.bypass_mode and (found.rollout_is, found.rollout_is_threshold) == ("sequence", 2.0)
    # The clipped loss has the correction in its ratio: verl does not weigh again.
    folder = "algorithm.rollout_correction."
    clipped = converted(f"{folder}bypass_mode=True {folder}rollout_is=token").config.algorithm
    assert isinstance(clipped, c.PPO) and clipped.bypass_mode and clipped.rollout_is is None


def test_distillation_has_a_teacher():
    config = from_verl("on_policy_distillation_trainer/run_qwen3_8b_fsdp").config
    assert isinstance(config.algorithm, c.Distillation | c.DistillationTopK)
    assert config.teacher is not None and config.teacher.path


def test_a_micro_batch_that_does_not_fit_is_the_next_smaller_one():
    found = converted("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=24")
    assert found.config.actor.micro_batch_size == 16  # of 256 / 8
    assert any("24 does not divide the 32 samples" in note for note in found.notes)


def test_unknown_rows_leave_the_steps_open():
    found = converted("trainer.total_epochs=3")
    assert found.config.total_steps == c.Config().total_steps
    assert any("3 × (rows // 1024)" in note for note in found.notes)


def test_rows_of_a_file_that_is_here_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a"}\n' * 10)
    sizes = "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=8"
    found = converted(f"data.train_files={file} {sizes} trainer.total_epochs=3")
    assert found.config.total_steps == 3


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("actor_rollout_ref.rollout.temprature=1", "actor_rollout_ref.rollout.temperature"),
        ("data.train_bach_size=8", "data.train_batch_size"),
        ("actor_rollout_ref.actor.fsdp_config.param_ofload=True", "fsdp_config.param_offload"),
        ("trainer.save_frq=1", "trainer.save_freq"),
    ],
)
def test_a_typo_gets_the_nearest_key(typo, meant):
    (unknown,) = converted(typo).of_kind(NoCounterpart)
    assert isinstance(unknown.answer, NoCounterpart)
    assert unknown.answer.remedy.endswith(f"{meant}?")


def test_a_checkpoint_of_verl_is_not_read():
    found = converted("trainer.resume_mode=resume_path trainer.resume_from_path=here/global_step_4")
    assert found.config.resume == "auto"
    open_keys = [k.key for k in found.of_kind(NoCounterpart)]
    assert open_keys == ["trainer.resume_mode", "trainer.resume_from_path"]


def test_a_folder_of_free_names_takes_any():
    found = converted("+actor_rollout_ref.rollout.engine_kwargs.vllm.anything=1")
    assert [k.key for k in found.of_kind(NotNeeded)][-1].endswith("vllm.anything")


def test_clip_ratio_alone_changes_nothing_as_in_verl():
    found = converted("actor_rollout_ref.actor.clip_ratio=0.1")
    assert isinstance(found.config.algorithm, c.PPO) and found.config.algorithm.clip_high == 0.2


def test_settings_that_the_algorithm_does_not_have_are_not_needed():
    more = "algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov "
    found = converted(more + "actor_rollout_ref.actor.clip_ratio_high=0.3 algorithm.lam=0.9")
    unneeded = {k.key: k.answer for k in found.of_kind(NotNeeded)}
    assert unneeded["algorithm.lam"] == NotNeeded("`kl_cov` does not read it")
    assert "actor_rollout_ref.actor.clip_ratio_high" in unneeded


def test_an_unlisted_pair_says_that_its_clip_is_lost():
    more = "algorithm.adv_estimator=rloo actor_rollout_ref.actor.policy_loss.loss_mode=gspo "
    found = converted(more + "actor_rollout_ref.actor.clip_ratio_high=0.3")
    assert isinstance(found.config.algorithm, c.Pair)
    assert [k.key for k in found.of_kind(NoCounterpart)] == [
        "actor_rollout_ref.actor.clip_ratio_high"
    ]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("algorithm.adv_estimator=mine", "mine with policy_loss.loss_mode=vanilla has no"),
        ("data.train_batch_size=many", "data.train_batch_size=many: expected a number"),
        ("data.train_batch_size=0", "data.train_batch_size=0: must be 1 or more"),
        ("trainer.critic_warmup=inf", "trainer.critic_warmup=inf: cannot be read"),
        ("trainer.save_freq=often", "trainer.save_freq=often: cannot be read"),
        ("data.truncation=up", "config.data.truncation='up': expected one of error"),
        ("data.train_batch_size=640", "must divide config.data.train_batch_size=640"),
        ("actor_rollout_ref.actor.optim.lr=-1", "must be 0 or more"),
        ("actor_rollout_ref.model.path=null", "actor_rollout_ref.model.path is missing"),
        ("oops", "'oops' is no key=value of verl"),
    ],
)
def test_bad_input_names_the_remedy(more, message):
    with pytest.raises(c.ConfigError) as error:
        converted(more)
    assert message in str(error.value)
