"""A domain as people handle it: domain.toml, founding, joining, invitations."""
