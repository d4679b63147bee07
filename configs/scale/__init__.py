"""Layouts from 1 to 1,024 GPUs: `python scripts/plan.py --config=configs/scale/ppo_7b_8.py`."""
