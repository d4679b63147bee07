"""Values of a model's description: what no model can have, and keys that nothing reads."""

import pytest

from jaxrl_llm.models.config_json import check_hf_config, misspelt_key


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_size": "abc"}, "hf_config.hidden_size='abc': must be a whole number"),
        ({"hiden_size": 64}, "unknown key hf_config.hiden_size; did you mean 'hidden_size'"),
        ({"num_attention_heads": 0}, "hf_config.num_attention_heads=0: must be"),
        ({"num_attention_heads": -3}, "hf_config.num_attention_heads=-3: must be a whole"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no': must be true"),
        ({"rope_scaling": {"factor": -1.0}}, "hf_config.rope_scaling.factor=-1.0: must"),
    ],
)
def test_settings_that_no_model_can_have(values, message):
    with pytest.raises(ValueError, match=message):
        check_hf_config(values)


def test_keys_of_published_configs_are_not_taken_for_mistakes():
    keys = ("intermediate_size_mlp", "_sliding_window_pattern", "original_max_position_embeddings")
    assert misspelt_key(dict.fromkeys(keys, 1)) is None
