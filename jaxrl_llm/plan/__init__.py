"""From a config to compiled programs: stages, roles, plans. No array exists here yet."""
