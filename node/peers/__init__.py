"""Other nodes as this one sees them: presences heard and sent, and twins of this very node."""
