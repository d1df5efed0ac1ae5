"""The public door: OpenAI's API over HTTP, and the episodes behind it."""
