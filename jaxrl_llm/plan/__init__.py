"""From a config to its plan: stages, roles, programs. No array exists here yet."""
