"""What a run leaves on disk: its root, the episodes, and the side tables that grow beside them."""
