"""Does a rollout come from the named weights and the prescribed sampling? Pure; numpy and torch allowed."""
