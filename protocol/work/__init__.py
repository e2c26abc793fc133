"""Who does what, and what comes of it: presences, assignment of roles, prompts and audits, rollout submissions."""
