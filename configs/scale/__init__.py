"""Layouts from 1 to 1,024 GPUs: `jaxrl plan --config=configs/scale/ppo_7b_8.py`."""
